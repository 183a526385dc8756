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
    // In tiles a head that shares its keys with none has other bits: there are two.
    const i64 own = dtype == DType::bf16 && std::string(kernels->name) == "avx512_amx" ? 2 : 1;
    for (i64 b = 0; b < all.batch; b++) {
      for (i64 h = 0; h + own <= all.heads; h += 2) {
        Case one = all;
        one.batch = 1, one.heads = own;
        Instance alone(one, Place::start);
        const auto copy = [&](Tensor& to, const Tensor& from, i64 head) {
          to.each([&](i64 x, i64 y, i64 r, i64 d) { to.put(x, y, r, d, from.get(b, head + y, r, d)); });
        };
        copy(alone.q, whole.q, h), copy(alone.k, whole.k, 0), copy(alone.v, whole.v, 0);
        alone.run(*kernels, 3);
        alone.out.each([&](i64 x, i64 y, i64 r, i64 d) {
          expect(alone.out.get(x, y, r, d) == whole.out.get(b, h + y, r, d),
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

// One and two rows have the same bits however their keys and values are fetched.
inline void test_few_queries_fetched(DType dtype) {
  int turn = 0;
  for (i64 heads : {3, 6}) {
    for (i64 keys : {1024, 1300, 2000}) {
      Case c = few(dtype, 1, keys, heads, 3, 40, 64);
      if (turn % 3 == 1) c.mask = {band(1100, -1)}, c.poison = true;
      if (turn % 3 == 2) c.mask = {dense(0, 0.3), lengths(), kAnd};
      turn++;
      for (const Kernels* kernels : instruction_sets()) {
        forward_fetch = 0;
        Instance first(c, Place::end);
        first.run(*kernels, 1);
        for (int fetch : {1, 2}) {
          forward_fetch = fetch;
          Instance other(c, Place::end);
          other.run(*kernels, fetch);
          first.out.each([&](i64 b, i64 h, i64 r, i64 d) {
            const double mine = first.out.get(b, h, r, d), its = other.out.get(b, h, r, d);
            expect(std::memcmp(&mine, &its, sizeof mine) == 0,
                   std::string("fetched, ") + kernels->name + ", " + c.text());
          });
        }
      }
      forward_fetch = -1;
    }
  }
}

// Rows of 8-bit numbers with a scale each, and the numbers that they stand for, as a tensor of a wider type has them.
struct NarrowRows {
  Array<unsigned char> bytes;
  Array<float> scales;
  View numbers, factors;

  // Every code of the type but its NaN is drawn, and scales that are powers of two.
  NarrowRows(Tensor& wide, Stored stored, u64 seed, Place place) {
    const auto& size = wide.size();  // no structured binding: older clang keeps these out of a lambda
    const i64 batch = size[0], heads = size[1], rows = size[2], columns = size[3];
    std::vector<unsigned char> codes(static_cast<std::size_t>(batch * heads * rows * columns));
    std::vector<float> powers(static_cast<std::size_t>(batch * heads * rows));
    wide.each([&](i64 b, i64 h, i64 r, i64 d) {
      const i64 row = (b * heads + h) * rows + r, at = row * columns + d;
      int code = static_cast<int>(scramble(seed * 1000003 + static_cast<u64>(at)) % 256);
      if (stored == Stored::e4m3 && (code & 127) == 127) code--;
      const double x = stored == Stored::int8 ? (code < 128 ? code : code - 256) : e4m3_value(code);
      const double scale = std::ldexp(1, static_cast<int>(scramble(seed + static_cast<u64>(row)) % 4) - 9);
      codes[static_cast<std::size_t>(at)] = static_cast<unsigned char>(code);
      powers[static_cast<std::size_t>(row)] = static_cast<float>(scale);
      wide.put(b, h, r, d, x * scale);
    });
    bytes = Array<unsigned char>(codes, place), scales = Array<float>(powers, place);
    numbers = {bytes.data(), heads * rows * columns, rows * columns, columns, 1};
    factors = {scales.data(), heads * rows, rows, 1, 0};
  }
};

inline Forward in_8_bits(const Instance& x, Stored stored, const NarrowRows& k, const NarrowRows& v,
                         int byte_tables = -1) {
  Forward f = x.forward_args();
  f.byte_tables = byte_tables;
  f.stored = stored, f.k = k.numbers, f.v = v.numbers, f.k_scales = k.factors, f.v_scales = v.factors;
  return f;
}

// Whether few queries multiply int8 as integers (decode/integers.h).
inline bool in_integers(const Kernels* kernels, const Case& c, Stored stored) {
  const bool vectors = kernels->name[0] == 'a';  // AVX
  return vectors && stored == Stored::int8 && c.dtype == DType::bf16 && c.queries <= kFewQueries;
}

// They have the bits of the numbers that they stand for, but for integers: a scale that is a power of two rounds
// nothing.
inline void test_eight_bits(DType dtype) {
  const i64 queries[] = {1, 2, 8, 9, 70}, keys[] = {1, 40, 130, 600, 1200};
  const int widths[] = {1, 16, 31, 33, 64, 100, 128, 200};
  int turn = 0;
  for (const Stored stored : {Stored::int8, Stored::e4m3}) {
    for (int width : widths) {
      const i64 heads = turn % 3 == 0 ? 8 : 2;
      Case c = few(dtype, queries[turn % 5], keys[turn % 4 + turn % 2], heads, 2, width, widths[turn % 8]);
      c.batch = 2, c.seed = static_cast<u64>(turn) + 1, c.statistics = turn % 2 == 0, c.sinks = turn % 3 == 1;
      if (turn % 4 == 1) c.mask = {band(-1, 0)};
      if (turn % 4 == 2) c.mask = {dense(0, 0.6)}, c.score = {softcap(5)};
      turn++;
      Instance wide(c, Place::end), narrow(c, Place::end);
      const NarrowRows k(wide.k, stored, c.seed, Place::end), v(wide.v, stored, c.seed + 77, Place::end);
      const Naive truth(wide, dtype == DType::bf16);
      for (const Kernels* kernels : instruction_sets()) {
        const std::string what = std::string("8 bits, ") + kernels->name + ", " + c.text();
        for (const auto& [dots, tables] : {std::pair{-1, -1}, {0, -1}, {0, 0}}) {
          for (auto& [name, tensor] : wide.results()) tensor->clear();
          for (auto& [name, tensor] : narrow.results()) tensor->clear();
          Forward f = wide.forward_args(), g = in_8_bits(narrow, stored, k, v, tables);
          f.dots = g.dots = dots, g.threads = 3;
          if (!kernels->forward(f) || !kernels->forward(g)) fail("out of memory");
          expect_near(narrow.out, truth.out, truth.out_room, "out of " + what);
          expect_near(narrow.lse, truth.lse, truth.lse_room, "lse of " + what);
          if (c.statistics) compare_statistics(narrow, truth, what);
          if (in_integers(kernels, c, stored)) continue;
          const auto one = wide.results(), other = narrow.results();
          for (std::size_t i = 0; i < one.size(); i++)
            expect_same(other[i].second->values(), one[i].second->values(), one[i].first + (" of " + what));
        }
      }
    }
  }
}

// Every instruction set, with the tables of bytes that the processor has and without them.
inline std::vector<std::pair<const Kernels*, int>> with_and_without_tables() {
  std::vector<std::pair<const Kernels*, int>> found;
  for (const Kernels* kernels : instruction_sets())
    for (int byte_tables : {-1, 0}) found.emplace_back(kernels, byte_tables);
  return found;
}

// A row has the bits that it has alone, and is exact where one number of its queries hides the others, which alone
// count. What is not finite reaches its own outputs.
inline void test_int8_rows(DType dtype) {
  constexpr int width = 72, large = 7;
  Case c = few(dtype, 5, 300, 4, 2, width, 40);
  for (const auto& each : with_and_without_tables()) {  // no structured binding: see NarrowRows
    const auto kernels = each.first;
    const int tables = each.second;
    const std::string name = kernels->name;
    Instance x(c, Place::end);
    NarrowRows k(x.k, Stored::int8, 3, Place::end), v(x.v, Stored::int8, 4, Place::end);
    for (i64 row = 0; row < 2 * c.keys; row++) k.bytes.data()[row * width + large] = 0;
    x.k.each([&](i64 b, i64 h, i64 r, i64 d) {
      if (d == large) x.k.put(b, h, r, d, 0);
    });
    x.q.put(0, 1, 2, large, 4096);
    x.q.put(0, 2, 3, large, -3000);
    const Forward f = in_8_bits(x, Stored::int8, k, v, tables);
    if (!kernels->forward(f)) fail("out of memory");
    const Naive truth(x, dtype == DType::bf16);
    expect_near(x.out, truth.out, truth.out_room, "out of int8, " + name);
    expect_near(x.lse, truth.lse, truth.lse_room, "lse of int8, " + name);

    Case one = c;
    one.queries = 1;
    Instance alone(one, Place::end);
    for (i64 row = 0; row < c.queries; row++) {
      alone.q.each([&](i64 b, i64 h, i64 r, i64 d) { alone.q.put(b, h, r, d, x.q.get(b, h, row, d)); });
      if (!kernels->forward(in_8_bits(alone, Stored::int8, k, v, tables))) fail("out of memory");
      alone.out.each([&](i64 b, i64 h, i64 r, i64 d) {
        expect(alone.out.get(b, h, r, d) == x.out.get(b, h, row, d), "a row of int8 alone, " + name);
      });
    }

    const auto before = x.out.values();
    x.q.put(0, 3, 1, 0, INFINITY);
    if (!kernels->forward(f)) fail("out of memory");
    std::size_t at = 0;
    x.out.each([&](i64 b, i64 h, i64 r, i64 d) {
      const double now = x.out.get(b, h, r, d);
      if (h == 3 && r == 1) expect(std::isnan(now), "an infinite query beside int8, " + name);
      if (h != 3 || r != 1) expect(now == before[at], "a row beside one that is not finite, " + name);
      at++;
    });
    for (const float odd : {NAN, INFINITY}) {
      v.scales.data()[c.keys + 11] = odd;  // of the second key head
      if (!kernels->forward(f)) fail("out of memory");
      x.out.each([&](i64 b, i64 h, i64 r, i64 d) {
        expect(std::isfinite(x.out.get(b, h, r, d)) == (h < 2), "a scale that is not finite, " + name);
      });
    }
  }
}

// A NaN in a row, or as its scale, is one of the outputs that it reaches.
inline void test_eight_bits_nan() {
  for (const auto& each : with_and_without_tables()) {  // no structured binding: see NarrowRows
    const auto kernels = each.first;
    const int tables = each.second;
    for (i64 queries : {1, 20}) {
      Case c = few(DType::bf16, queries, 30, 2, 1, 40, 40);
      Instance x(c, Place::end);
      NarrowRows k(x.k, Stored::e4m3, 1, Place::end), v(x.v, Stored::e4m3, 2, Place::end);
      const Forward f = in_8_bits(x, Stored::e4m3, k, v, tables);
      v.bytes.data()[3 * 40 + 7] = 0xff;
      if (!kernels->forward(f)) fail("out of memory");
      x.out.each([&](i64 b, i64 h, i64 r, i64 d) {
        expect(std::isnan(x.out.get(b, h, r, d)) == (d == 7), std::string("a NaN value, ") + kernels->name);
      });
      k.scales.data()[5] = NAN;
      if (!kernels->forward(f)) fail("out of memory");
      x.out.each([&](i64 b, i64 h, i64 r, i64 d) {
        expect(std::isnan(x.out.get(b, h, r, d)), std::string("a NaN scale, ") + kernels->name);
      });
    }
  }
}

}  // namespace tilewise::test
