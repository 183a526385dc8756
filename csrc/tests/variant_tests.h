// Tests by size, variant and layout; and short names for what a case is made of.
#pragma once

#include "check.h"

namespace tilewise::test {

inline MaskSpec band(i64 left, i64 right, bool bottom_right = true) {
  return {MaskOp::band, left, right, bottom_right};
}
inline MaskSpec below(i64 length) { return {.op = MaskOp::below, .length = length}; }
inline MaskSpec lengths(std::vector<i64> values = {}) { return {.op = MaskOp::below, .lengths = std::move(values)}; }
inline MaskSpec documents(i64 count, int broadcast = 0) {
  return {.op = MaskOp::same_document, .broadcast = broadcast, .documents = count};
}
inline MaskSpec dense(int broadcast, double density = 0.7, Layout layout = Layout::plain) {
  return {.op = MaskOp::dense, .broadcast = broadcast, .layout = layout, .density = density};
}
inline const MaskSpec kAnd = {.op = MaskOp::all}, kOr = {.op = MaskOp::any}, kNot = {.op = MaskOp::negate};

inline ScoreSpec alibi(int broadcast = 0) { return {.op = ScoreOp::alibi, .broadcast = broadcast}; }
inline ScoreSpec softcap(double cap) { return {.op = ScoreOp::softcap, .cap = cap}; }
inline ScoreSpec bias(int broadcast, Layout layout = Layout::plain, bool narrow = false) {
  return {.op = ScoreOp::bias, .broadcast = broadcast, .narrow = narrow, .layout = layout};
}

inline u64 next_seed() {
  static u64 seed = 100;
  return seed++;
}

inline Case make(DType dtype, i64 queries, i64 keys, int head_dim = 16, int value_dim = 16) {
  Case c;
  c.dtype = dtype, c.queries = queries, c.keys = keys, c.head_dim = head_dim, c.value_dim = value_dim;
  c.seed = next_seed();
  return c;
}

inline void test_sizes(DType dtype) {
  const i64 sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 191, 193, 260};
  for (i64 n : sizes) {
    for (i64 m : {i64{1}, n, 260 - n}) {
      Case c = make(dtype, m, n, 8, 5);
      c.heads = 1;
      check(c);
      if (n == 0 || n == 16 || n == 65 || n == 129) {
        c.mask = {band(-1, 0)};
        check(c);
      }
    }
  }
  Case longer = make(dtype, 70, 1100, 8, 8);  // several chunks of keys
  check(longer);
  longer.mask = {band(700, 0)};
  check(longer);
  Case none = make(dtype, 3, 4);
  none.batch = 0;
  check(none);
}

inline void test_depths(DType dtype) {
  const int depths[][2] = {{1, 1},    {2, 3},     {3, 2},     {5, 1},    {7, 8},    {8, 16},   {15, 17},
                           {16, 15},  {31, 33},   {40, 24},   {64, 64},  {65, 63},  {80, 96},  {127, 65},
                           {128, 40}, {192, 128}, {255, 257}, {512, 31}, {33, 512}, {576, 512}};
  for (const auto& [head_dim, value_dim] : depths) {
    Case c =
        make(dtype, head_dim * value_dim > 40000 ? 5 : 37, head_dim * value_dim > 40000 ? 19 : 45, head_dim, value_dim);
    c.heads = 1;
    check(c);
  }
}

inline void test_heads(DType dtype) {
  const i64 heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}, {6, 3}};
  for (const auto& [all, kv] : heads) {
    Case c = make(dtype, 35, 70, 8, 8);
    c.batch = 2, c.heads = all, c.kv_heads = kv, c.mask = {band(-1, 0)};
    check(c);
  }
}

inline void test_masks(DType dtype) {
  const std::vector<std::vector<MaskSpec>> masks = {
      {band(-1, 0)},
      {band(-1, 0, false)},
      {band(5, 0)},
      {band(0, 0)},
      {band(20, 3)},
      {band(-1, 40, false)},
      {band(3, -1)},
      {band(70, 0, false)},
      {below(0)},
      {below(1)},
      {below(33)},
      {below(1000)},
      {lengths()},
      {lengths({0, 64})},
      {lengths({129, 1})},
      {documents(3)},
      {documents(1)},
      {documents(9, 1)},
      {documents(0)},
      {kNot, documents(4)},  // reordered below: the operand comes first
      {band(-1, 0), below(20), kOr},
      {band(-1, 0), lengths({40, 7}), kOr},
      {band(-1, 0), lengths({100, 130}), kAnd},
      {band(-1, 0), kNot},
      {lengths({17, 90}), kNot},
      {band(10, 10), kNot, lengths({77, 50}), kAnd},
      {band(-1, 0), documents(3), kAnd, lengths({99, 30}), kAnd},
      {documents(3), kNot, band(30, -1), kOr, dense(0), kAnd, kNot},
      {band(-1, 0), dense(0, 0.5), kAnd, kNot, kNot},
      {band(2, 2), band(-1, -1), kNot, kOr, below(90), kAnd},
      {band(-1, 0), band(-1, 0), kNot, kAnd},  // nothing
      {band(-1, 0), band(-1, 0), kNot, kOr},   // everything
  };
  for (std::vector<MaskSpec> mask : masks) {
    if (mask[0].op == MaskOp::negate) std::swap(mask[0], mask[1]);
    Case c = make(dtype, 70, 129, 8, 8);
    c.batch = 2, c.heads = 1, c.mask = mask;
    check(c);
    c.queries = 130, c.keys = 65;
    check(c);
  }
}

inline void test_dense_masks(DType dtype) {
  for (int broadcast = 0; broadcast < 16; broadcast++) {
    Case c = make(dtype, 67, 75, 8, 8);
    c.batch = 2, c.mask = {dense(broadcast, 0.6)};
    check(c);
  }
  for (Layout layout : {Layout::heads_inside, Layout::odd_rows, Layout::odd_columns, Layout::transposed}) {
    Case c = make(dtype, 130, 141, 8, 8);
    c.mask = {dense(0, 0.3, layout)};
    check(c);
    c.mask = {dense(2, 0.0, layout), band(-1, 0), kAnd};
    check(c);
  }
}

inline void test_scores(DType dtype) {
  const std::vector<std::vector<ScoreSpec>> chains = {{alibi()},
                                                      {alibi(1)},
                                                      {softcap(2)},
                                                      {softcap(30)},
                                                      {alibi(), softcap(3)},
                                                      {softcap(3), alibi()},
                                                      {bias(0), softcap(2), alibi()},
                                                      {softcap(2), bias(3), softcap(4), bias(5)}};
  for (const auto& chain : chains) {
    Case c = make(dtype, 66, 83, 8, 8);
    c.batch = 2, c.score = chain;
    check(c);
    c.mask = {band(40, 0)}, c.sinks = true, c.seed++;
    check(c);
  }
}

inline void test_biases(DType dtype) {
  for (int broadcast = 0; broadcast < 16; broadcast++) {
    Case c = make(dtype, 67, 150, 8, 8);
    c.batch = 2, c.score = {bias(broadcast, Layout::plain, broadcast % 2)};
    if (broadcast % 3 == 0) c.mask = {band(-1, 0)};
    check(c);
  }
  for (Layout layout :
       {Layout::heads_inside, Layout::odd_rows, Layout::odd_columns, Layout::transposed, Layout::shifted}) {
    Case c = make(dtype, 35, 70, 8, 8);
    c.score = {bias(0, layout), softcap(6), bias(2, layout, true)};
    check(c);
  }
}

inline void test_layouts(DType dtype) {
  const Layout all[] = {Layout::plain,      Layout::heads_inside, Layout::odd_rows, Layout::odd_columns,
                        Layout::transposed, Layout::shifted,      Layout::expanded};
  const Layout results[] = {Layout::plain, Layout::heads_inside, Layout::odd_rows, Layout::shifted};
  for (int i = 0; i < 7; i++) {
    for (int dim : {24, 17}) {
      Case c = make(dtype, 67, 140, dim, dim - 1);
      c.q = all[i], c.k = all[(i + dim) % 7], c.v = all[(i + 2 * dim + 1) % 7], c.out = results[i % 4];
      check(c);
      c.q = c.k = c.v = all[i], c.queries = 5, c.keys = 33, c.batch = 2, c.kv_heads = 2;
      check(c);
    }
  }
}

inline void test_options(DType dtype) {
  Case c = make(dtype, 66, 70);
  for (double scale : {0.0, -0.3, 1.0, 0.01}) {
    c.scale = scale;
    check(c);
    c.mask = {band(-1, 0)}, c.sinks = !c.sinks, c.seed++;
  }
  c = make(dtype, 66, 70);
  c.grad_lse = false;
  check(c);
  c.sinks = true;
  check(c);
  c.mask = {below(0)};  // dead rows with a sink
  check(c);
  c.sinks = false;  // and without
  check(c);
  c.mask = {band(-1, 0)}, c.queries = 100;  // some rows
  check(c);
  c.dropout = 0.5, c.mask = {lengths({5, 0, 61})}, c.batch = 3;
  check(c);
}

inline void test_dropout(DType dtype) {
  for (double p : {0.1, 0.5, 0.9}) {
    Case c = make(dtype, 67, 150, 8, 8);
    c.batch = 2, c.heads = 3, c.dropout = p;
    check(c);
    c.mask = {band(30, 0)}, c.score = {bias(3), softcap(4)}, c.seed++;
    check(c);
  }
}

}  // namespace tilewise::test
