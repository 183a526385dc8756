// Tests of few queries: their keys are split, and heads that share keys are computed together.
#pragma once

#include "variant_tests.h"

namespace tilewise::test {

inline Case few(DType dtype, i64 queries, i64 keys, i64 heads, i64 kv_heads, int head_dim = 16, int value_dim = 16) {
  Case c = make(dtype, queries, keys, head_dim, value_dim);
  c.heads = heads, c.kv_heads = kv_heads;
  return c;
}

inline void test_few_queries(DType dtype) {
  // One split and several, the last of them short; the rows of one task and of several, in blocks of every size.
  const i64 keys[] = {1, 15, 191, 511, 576, 577, 1300};
  const std::pair<i64, i64> rows[] = {{1, 1}, {1, 3}, {2, 7}, {5, 5}, {8, 1}, {7, 11}};
  int turn = 0;
  for (i64 n : keys) {
    const auto& [queries, group] = rows[turn++ % 6];
    check(few(dtype, queries, n, 2 * group, 2, 8 + turn, 40 - turn));
    Case c = few(dtype, queries, n, group, 1, 33, 17);
    c.mask = {band(turn % 2 ? -1 : 40, 0)}, c.sinks = turn % 3 == 0, c.statistics = turn % 2 == 0;
    c.k = Layout::heads_inside, c.v = turn % 2 ? Layout::heads_inside : Layout::plain;
    check(c);
  }
  for (int width : {1, 16, 31, 32, 48, 64, 100, 128, 130}) check(few(dtype, 3, 70, 3, 1, width, 131 - width));
  for (int width : {64, 96, 128, 256})
    for (i64 group : {1, 2, 8, 17}) check(few(dtype, 1, 400 - group, group, 1, width, width));
  for (int layout = 0; layout < 6; layout++) {
    Case c = few(dtype, 2, 600, 6, 2, 21, 12);
    c.q = c.k = c.v = static_cast<Layout>(layout);
    check(c);
  }
}

inline void test_few_queries_variants(DType dtype) {
  // Heads of a group that see other keys: blocks that some of them skip, rows that see none.
  for (i64 queries : {1, 4, 8}) {
    for (int broadcast : {0, 2, 5}) {
      Case c = few(dtype, queries, 700, 6, 2, 24, 20);
      c.batch = 2, c.mask = {dense(broadcast, 0.1), lengths(), kAnd}, c.poison = true, c.statistics = true;
      check(c);
      c.mask = {band(600, -1), documents(3), kAnd}, c.score = {alibi(), softcap(5), bias(broadcast)};
      check(c);
    }
    Case c = few(dtype, queries, 650, 4, 2);
    c.dropout = 0.3, c.sinks = true, c.scale = -0.5, c.score = {bias(0), softcap(20)};
    check(c);
  }
  Case packed = make(dtype, 0, 0, 24, 17);
  packed.heads = 6, packed.query_lengths = {1, 70, 8, 0, 9, 2}, packed.key_lengths = {700, 80, 90, 5, 600, 0};
  packed.mask = {band(-1, 0)}, packed.sinks = true;
  check(packed);
}

// A head alone has the bits that it has in its group, and a sequence those that it has among others.
inline void test_few_queries_alone(DType dtype, i64 queries, int head_dim, int value_dim) {
  Case all = few(dtype, queries, 1200, 7, 1, head_dim, value_dim);
  all.batch = 2, all.mask = {band(-1, 0)};
  for (const Kernels* kernels : instruction_sets()) {
    Instance whole(all, Place::end);
    whole.run(*kernels, 1);
    for (i64 b = 0; b < all.batch; b++) {
      for (i64 h = 0; h < all.heads; h += 2) {
        Case one = all;
        one.batch = one.heads = 1;
        Instance alone(one, Place::start);
        const auto copy = [&](Tensor& to, const Tensor& from, i64 head) {
          to.each([&](i64 x, i64 y, i64 r, i64 d) { to.put(x, y, r, d, from.get(b, head, r, d)); });
        };
        copy(alone.q, whole.q, h), copy(alone.k, whole.k, 0), copy(alone.v, whole.v, 0);
        alone.run(*kernels, 3);
        alone.out.each([&](i64 x, i64 y, i64 r, i64 d) {
          expect(alone.out.get(x, y, r, d) == whole.out.get(b, h, r, d),
                 std::string("a head alone and in its group, ") + kernels->name);
        });
      }
    }
  }
}

inline void test_few_queries_alone(DType dtype) {
  test_few_queries_alone(dtype, 3, 40, 48);
  test_few_queries_alone(dtype, 1, 64, 80);
  test_few_queries_alone(dtype, 2, 33, 128);
}

// Short sequences whose heads share no keys have a kernel of their own, and the bits of the other one, which serves who
// asks for more: whatever is masked, fetched or not, and however many threads and queries there are.
inline void test_few_queries_short(DType dtype) {
  const auto same = [](const Tensor& x, i64 row, const Tensor& y, const Case& c, const Kernels* kernels) {
    x.each([&](i64 b, i64 h, i64 r, i64 d) {
      const double mine = x.get(b, h, r, d), other = y.get(b, h, r + row, d);
      expect(std::memcmp(&mine, &other, sizeof mine) == 0,
             std::string("a kernel of their own, ") + kernels->name + ", " + c.text());
    });
  };
  int turn = 0;
  for (int width : {32, 40, 64}) {
    for (i64 keys : {5, 64, 130, 575}) {
      Case c = few(dtype, 1, keys, 3, 3, width, 80 - width / 2);
      c.batch = 6, c.sinks = turn % 2 == 0, c.k = turn % 3 == 0 ? Layout::heads_inside : Layout::plain;
      if (turn % 4 == 1) c.mask = {band(40, -1)};
      if (turn % 4 == 2) c.mask = {dense(0, 0.3), lengths(), kAnd}, c.poison = true;
      turn++;
      for (const Kernels* kernels : instruction_sets()) {
        Case asked = c;
        asked.statistics = true;
        Instance own(c, Place::end), other(asked, Place::start);
        other.run(*kernels, 1);
        for (int fetch : {0, 1}) {
          forward_fetch = fetch;
          own.run(*kernels, turn % 2 == 0 ? 1 : 3);
          same(own.out, 0, other.out, c, kernels), same(own.lse, 0, other.lse, c, kernels);
        }
        if (!c.mask.empty()) continue;
        Case more = c;
        more.queries = turn % 3 == 0 ? 3 : 5;
        Instance several(more, Place::end);
        several.run(*kernels, 1);
        for (i64 row = 0; row < more.queries; row++) {
          own.q.each([&](i64 b, i64 h, i64 r, i64 d) { own.q.put(b, h, r, d, several.q.get(b, h, row, d)); });
          own.run(*kernels, 2);
          same(own.out, row, several.out, c, kernels);
        }
      }
      forward_fetch = -1;
    }
  }
}

}  // namespace tilewise::test
