// Rows of a strided operand brought into the layouts that the matrix product reads.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

// One row of an operand as computing-type vectors, whatever the distance between its elements.
template <class C, class E>
TW_INLINE Vec<C> widen_strided(const E* p, i64 col, i64 count) {
  if (col == 1) return widen(p, count);
  alignas(kVectorBytes) C gathered[kLanes<C>] = {};
  for (i64 i = 0; i < count && i < kLanes<C>; i++) gathered[i] = widen_one(p + i * col);
  return load(gathered);
}

// to[d][i] = from[i][d] for `rows` rows of `depth` elements, zero for rows up to `width`.
template <class E, class C>
TW_NOINLINE static void pack_transposed(const E* from, i64 row, i64 col, int rows, int depth, int width, C* to) {
  constexpr int lanes = kLanes<C>;
  for (int i = 0; i < width; i += lanes) {
    for (int d = 0; d < depth; d += lanes) {
      Vec<C> r[lanes];
      TW_UNROLL(16)
      for (int x = 0; x < lanes; x++)
        r[x] = i + x < rows ? widen_strided<C>(from + (i + x) * row + d * col, col, depth - d) : Vec<C>{};
      transpose<C>(r);
      for (int x = 0; x < lanes && d + x < depth; x++) store(to + static_cast<i64>(d + x) * width + i, r[x]);
    }
  }
}

// to[j][0 .. stride) = from[j], widened, zeros behind `depth`.
template <class E, class C>
TW_NOINLINE static void pack_rows(const E* from, i64 row, i64 col, int rows, int depth, i64 stride, C* to) {
  constexpr int lanes = kLanes<C>;
  for (int j = 0; j < rows; j++) {
    int d = 0;
    for (; d + lanes <= stride; d += lanes)
      store(to + j * stride + d, widen_strided<C>(from + j * row + d * col, col, depth - d));
    if (d < stride)
      store_first(to + j * stride + d, stride - d, widen_strided<C>(from + j * row + d * col, col, depth - d));
  }
}

// to[i][d] = from[d][i] * factor[i] for the live rows, 0 for the others (bit i of `live`).
template <class E, class C>
TW_NOINLINE static void unpack_transposed(const C* from, int width, int rows, int depth, const C* factor, u64 live,
                                          E* to, i64 row) {
  constexpr int lanes = kLanes<C>;
  for (int i = 0; i < rows; i += lanes) {
    const Vec<C> scale = load(factor + i);
    for (int d = 0; d < depth; d += lanes) {
      Vec<C> r[lanes];
      TW_UNROLL(16)
      for (int x = 0; x < lanes; x++)
        r[x] = d + x < depth ? keep_where<C>(live >> i, load(from + static_cast<i64>(d + x) * width + i) * scale)
                             : Vec<C>{};
      transpose<C>(r);
      for (int x = 0; x < lanes && i + x < rows; x++) narrow(to + (i + x) * row + d, depth - d, r[x]);
    }
  }
}

#if defined(TW_PAIRS)
// ---- 16-bit elements in pairs, for the dot-product instruction

// Pairs of neighbouring 16-bit elements as 32-bit words; an odd last one gets a zero for its neighbour.
TW_INLINE Vec<i32> pairs_strided(const u16* p, i64 col, i64 count) {
  constexpr int room = 2 * kLanes<i32>;
  Vec<i32> words{};
  if (col == 1 && count >= room) {
    std::memcpy(&words, p, sizeof words);
  } else if (col == 1) {
    if (count > 0) std::memcpy(&words, p, static_cast<std::size_t>(min(count, room)) * 2);
  } else {
    u16 gathered[room] = {};
    for (i64 i = 0; i < count && i < room; i++) gathered[i] = p[i * col];
    std::memcpy(&words, gathered, sizeof words);
  }
  return words;
}

// A transposed operand in pairs along the depth: to[d / 2][i] = (from[i][d], from[i][d + 1]).
TW_NOINLINE static void pack_transposed_pairs(const u16* from, i64 row, i64 col, int rows, int depth, int width,
                                              i32* to) {
  constexpr int lanes = kLanes<i32>;
  const int words = (depth + 1) / 2;
  for (int i = 0; i < width; i += lanes) {
    for (int d = 0; d < words; d += lanes) {
      Vec<i32> r[lanes];
      TW_UNROLL(16)
      for (int x = 0; x < lanes; x++)
        r[x] = i + x < rows ? pairs_strided(from + (i + x) * row + 2 * d * col, col, depth - 2 * d) : Vec<i32>{};
      transpose<i32>(r);
      for (int x = 0; x < lanes && d + x < words; x++) store(to + static_cast<i64>(d + x) * width + i, r[x]);
    }
  }
}

// Rows of pairs along the depth: to[j][d / 2].
TW_NOINLINE static void pack_rows_pairs(const u16* from, i64 row, i64 col, int rows, int depth, i64 stride, i32* to) {
  constexpr int lanes = kLanes<i32>;
  for (int j = 0; j < rows; j++)
    for (int d = 0; d < stride; d += lanes)
      store_first(to + j * stride + d, stride - d, pairs_strided(from + j * row + 2 * d * col, col, depth - 2 * d));
}
// Pairs along the rows: to[j / 2][d] = (from[j][d], from[j + 1][d]); zeros where there is no row or column.
TW_NOINLINE static void interleave_rows(const u16* from, i64 row, i64 col, int rows, int depth, i64 stride, i32* to) {
  constexpr int lanes = kLanes<i32>;
  for (int j = 0; j < rows; j += 2) {
    for (int d = 0; d < stride; d += lanes) {
      Vec<u32> word[2] = {};
      for (int x = 0; x < 2 && j + x < rows; x++) {
        const u16* p = from + (j + x) * row + d * col;
        if (col == 1) {
          word[x] = __builtin_convertvector(load16(p, depth - d), Vec<u32>);
        } else {
          for (int y = 0; y < lanes && d + y < depth; y++) word[x][y] = p[y * col];
        }
      }
      store_first(to + static_cast<i64>(j / 2) * stride + d, stride - d, (Vec<i32>)(word[0] | (word[1] << 16)));
    }
  }
}
#endif

}  // namespace tilewise::TILEWISE_ISA
