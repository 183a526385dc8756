// Plain attention as an operation-by-operation library does it: the matrix of all heads is written and read again by
// every pass (algorithms 0 and 3 of the FlashAttention paper). Float32, contiguous [heads][rows][width].
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/args.h"

namespace tilewise::test {

struct PlainSizes {
  i64 heads, queries, keys;
  int head_dim, value_dim;
  double scale;
};

constexpr i64 kRowsAtOnce = 16;     // of the left operand, while the right one goes by
constexpr i64 kColumnsAtOnce = 64;  // of a product with a transposed operand, in a packed panel

// to[i][j] = factor * sum over d of a[i][d] * b[j][d]
inline void times_transposed(const float* a, const float* b, i64 rows, i64 columns, i64 depth, float factor,
                             float* to) {
  std::vector<float> panel(static_cast<std::size_t>(depth * kColumnsAtOnce));
  for (i64 i0 = 0; i0 < rows; i0 += kRowsAtOnce)
    for (i64 j0 = 0; j0 < columns; j0 += kColumnsAtOnce) {
      const i64 some = std::min(kColumnsAtOnce, columns - j0);
      for (i64 j = 0; j < some; j++)
        for (i64 d = 0; d < depth; d++)
          panel[static_cast<std::size_t>(d * kColumnsAtOnce + j)] = b[(j0 + j) * depth + d];
      for (i64 i = i0; i < std::min(rows, i0 + kRowsAtOnce); i++) {
        float sums[kColumnsAtOnce] = {};
        for (i64 d = 0; d < depth; d++) {
          const float left = a[i * depth + d] * factor, *right = panel.data() + d * kColumnsAtOnce;
          for (i64 j = 0; j < kColumnsAtOnce; j++) sums[j] += left * right[j];
        }
        std::copy(sums, sums + some, to + i * columns + j0);
      }
    }
}

// to[i][d] = factor * sum over j of m[i][j] * b[j][d]
inline void times(const float* m, const float* b, i64 rows, i64 columns, i64 width, float factor, float* to) {
  for (i64 i0 = 0; i0 < rows; i0 += kRowsAtOnce) {
    const i64 end = std::min(rows, i0 + kRowsAtOnce);
    std::fill(to + i0 * width, to + end * width, 0.0f);
    for (i64 j = 0; j < columns; j++)
      for (i64 i = i0; i < end; i++) {
        const float left = m[i * columns + j] * factor;
        for (i64 d = 0; d < width; d++) to[i * width + d] += left * b[j * width + d];
      }
  }
}

// to[j][d] = factor * sum over i of m[i][j] * a[i][d]
inline void transposed_times(const float* m, const float* a, i64 rows, i64 columns, i64 width, float factor,
                             float* to) {
  std::fill(to, to + columns * width, 0.0f);
  for (i64 i0 = 0; i0 < rows; i0 += kRowsAtOnce)
    for (i64 j = 0; j < columns; j++)
      for (i64 i = i0; i < std::min(rows, i0 + kRowsAtOnce); i++) {
        const float left = m[i * columns + j] * factor;
        for (i64 d = 0; d < width; d++) to[j * width + d] += left * a[i * width + d];
      }
}

// Three passes: scores; softmax; product.
inline void plain_forward(const PlainSizes& n, const float* q, const float* k, const float* v, float* s, float* p,
                          float* out) {
  const i64 matrix = n.queries * n.keys;
  for (i64 h = 0; h < n.heads; h++)
    times_transposed(q + h * n.queries * n.head_dim, k + h * n.keys * n.head_dim, n.queries, n.keys, n.head_dim,
                     static_cast<float>(n.scale), s + h * matrix);
  for (i64 row = 0; row < n.heads * n.queries; row++) {
    const float* from = s + row * n.keys;
    float *to = p + row * n.keys, sum = 0;
    const float top = *std::max_element(from, from + n.keys);
    for (i64 j = 0; j < n.keys; j++) sum += to[j] = std::exp(from[j] - top);
    for (i64 j = 0; j < n.keys; j++) to[j] /= sum;
  }
  for (i64 h = 0; h < n.heads; h++)
    times(p + h * matrix, v + h * n.keys * n.value_dim, n.queries, n.keys, n.value_dim, 1,
          out + h * n.queries * n.value_dim);
}

// Five passes: dV; dP; softmax; dQ; dK.
inline void plain_backward(const PlainSizes& n, const float* q, const float* k, const float* v, const float* p,
                           const float* grad_out, float* grad_p, float* grad_s, float* grad_q, float* grad_k,
                           float* grad_v) {
  const i64 matrix = n.queries * n.keys, query = n.queries * n.head_dim, key = n.keys * n.head_dim;
  const i64 value = n.keys * n.value_dim, result = n.queries * n.value_dim;
  const float scale = static_cast<float>(n.scale);
  for (i64 h = 0; h < n.heads; h++)
    transposed_times(p + h * matrix, grad_out + h * result, n.queries, n.keys, n.value_dim, 1, grad_v + h * value);
  for (i64 h = 0; h < n.heads; h++)
    times_transposed(grad_out + h * result, v + h * value, n.queries, n.keys, n.value_dim, 1, grad_p + h * matrix);
  for (i64 at = 0; at < n.heads * matrix; at += n.keys) {
    float sum = 0;
    for (i64 j = 0; j < n.keys; j++) sum += p[at + j] * grad_p[at + j];
    for (i64 j = 0; j < n.keys; j++) grad_s[at + j] = p[at + j] * (grad_p[at + j] - sum);
  }
  for (i64 h = 0; h < n.heads; h++)
    times(grad_s + h * matrix, k + h * key, n.queries, n.keys, n.head_dim, scale, grad_q + h * query);
  for (i64 h = 0; h < n.heads; h++)
    transposed_times(grad_s + h * matrix, q + h * query, n.queries, n.keys, n.head_dim, scale, grad_k + h * key);
}

}  // namespace tilewise::test
