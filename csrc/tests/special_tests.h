// Tests of particular values: NaN where nothing may be read, extreme scores, every 16-bit number, packed sequences.
#pragma once

#include "variant_tests.h"

namespace tilewise::test {

// Keys beyond the bounding lengths hold NaN and are never read.
inline void test_poisoned_padding(DType dtype) {
  for (const std::vector<i64>& length : {std::vector<i64>{0, 130}, {1, 129}, {64, 65}, {100, 191}, {192, 13}}) {
    Case c = make(dtype, 66, 192, 8, 8);
    c.batch = 2, c.poison = true, c.mask = {lengths(length)};
    check(c);
    c.mask = {lengths(length), band(-1, 0), kAnd}, c.dropout = 0.2;
    check(c);
    c.mask = {documents(2), lengths(length), kAnd}, c.score = {bias(3)}, c.k = Layout::odd_columns,
    c.v = Layout::odd_rows;
    check(c);
  }
}

// Row statistics and the gradient of the entropy, beside everything that may stand in their way.
inline void test_statistics(DType dtype) {
  for (i64 keys : {1, 17, 130, 420}) {
    Case c = make(dtype, 66, keys);
    c.statistics = true;
    check(c);
    c.sinks = true, c.mask = {band(-1, 0)}, c.batch = 2;
    check(c);
    c.dropout = 0.4, c.score = {softcap(3), bias(1)}, c.mask = {lengths(), band(40, 9), kAnd};
    check(c);
    c.mask = {below(0)};
    check(c);
  }
  Case c = make(dtype, 66, 130);
  c.statistics = true, c.amplitude = dtype == DType::f16 ? 30 : 60, c.scale = 2;
  check(c);
  c = make(dtype, 1, 1);
  c.statistics = true, c.query_lengths = {0, 70, 1}, c.key_lengths = {5, 200, 0}, c.mask = {band(-1, 0)};
  check(c);
}

inline void test_extreme_scores(DType dtype) {
  Case c = make(dtype, 66, 130);
  c.amplitude = dtype == DType::f16 ? 30 : 60, c.scale = 2;
  check(c);
  c = make(dtype, 34, 70);
  ScoreSpec lowest = bias(0);  // every key as low as can be: still their average
  lowest.amplitude = 0, c.scale = 0, c.grad_lse = false;
  for (double constant : {-1e9, -1e10, -1e20, -1e30, -3.4e38, dtype == DType::f64 ? -1.7e308 : -1e38, 1e30}) {
    lowest.constant = constant, c.score = {lowest};
    for (const Kernels* kernels : instruction_sets()) {
      Instance x(c, Place::end);
      x.run(*kernels, 1);
      const Numbers v = x.v.values(), out = x.out.values();
      for (int d = 0; d < c.value_dim; d++) {
        double mean = 0;
        for (i64 n = 0; n < c.keys; n++)
          mean += v[static_cast<std::size_t>(n * c.value_dim + d)] / static_cast<double>(c.keys);
        expect(std::fabs(out[static_cast<std::size_t>(d)] - mean) < 4e-3,
               "every bias " + number(constant) + ": " + kernels->name + " gives " +
                   number(out[static_cast<std::size_t>(d)]) + " for " + number(mean));
      }
      const double lse = x.lse.get(0, 0, 0, 0);
      expect(std::fabs(lse / constant - 1) < 1e-6,
             "lse of every bias " + number(constant) + ": " + kernels->name + " gives " + number(lse));
      for (auto& [name, tensor] : x.results())
        for (double value : tensor->values())
          expect(!std::isnan(value), std::string(name) + " has no NaN where every bias is low: " + kernels->name);
    }
  }
  lowest.constant = -INFINITY;  // every row dead
  c.score = {lowest};
  check(c);
}

inline void test_nan_spreads(DType dtype) {
  Case c = make(dtype, 40, 70);
  for (const Kernels* kernels : instruction_sets()) {
    Instance x(c, Place::end);
    x.q.put(0, 1, 7, 3, NAN);
    x.run(*kernels, 1);
    for (i64 m = 0; m < c.queries; m++) {
      const bool wrong = std::isnan(x.out.get(0, 1, m, 2)) != (m == 7) || std::isnan(x.lse.get(0, 1, 0, m)) != (m == 7);
      expect(!wrong && !std::isnan(x.out.get(0, 0, m, 2)),
             std::string("a NaN query spoils its row alone: ") + kernels->name);
    }
    Instance y(c, Place::end);
    y.k.put(0, 0, 69, 15, NAN);
    y.run(*kernels, 1);
    for (double out : y.out.values())
      expect(std::isnan(out), std::string("an attended NaN key spoils every row: ") + kernels->name);
  }
}

inline void test_varlen(DType dtype) {
  const std::vector<std::pair<std::vector<i64>, std::vector<i64>>> packs = {{{5, 0, 66, 1}, {7, 3, 130, 0}},
                                                                            {{64, 65}, {64, 65}},
                                                                            {{1, 1, 1}, {260, 1, 33}},
                                                                            {{0, 0}, {0, 5}},
                                                                            {{200}, {193}},
                                                                            {{3, 130}, {150, 40}}};
  for (const auto& [queries, keys] : packs) {
    Case c = make(dtype, 0, 0, 8, 7);
    c.query_lengths = queries, c.key_lengths = keys;
    check(c);
    c.mask = {band(-1, 0)}, c.q = c.k = c.v = c.out = Layout::heads_inside;
    check(c);
    c.score = {alibi(), softcap(5), bias(0), bias(3), bias(15), bias(4)}, c.dropout = 0.3, c.sinks = true;
    c.mask = {band(50, 10), lengths(), kAnd, documents(2), dense(2), kOr, kAnd};
    check(c);
  }
}

// A sequence packed with others gives the same bits as alone.
inline void test_batch_mates(DType dtype) {
  Case pack = make(dtype, 0, 0, 24, 17);
  pack.query_lengths = {70, 1, 300, 0, 66}, pack.key_lengths = {129, 40, 700, 9, 66};
  pack.mask = {band(-1, 0)}, pack.score = {softcap(9)}, pack.out = Layout::plain;
  for (const Kernels* kernels : instruction_sets()) {
    Instance all(pack, Place::end);
    all.run(*kernels, 1);
    i64 query = 0, key = 0;
    for (std::size_t b = 0; b < pack.query_lengths.size(); b++) {
      Case one = pack;
      one.query_lengths = one.key_lengths = {};
      one.queries = pack.query_lengths[b], one.keys = pack.key_lengths[b];
      Instance alone(one, Place::end);
      const auto copy = [](Tensor& to, const Tensor& from, i64 first) {
        to.each([&](i64 x, i64 h, i64 r, i64 d) { to.put(x, h, r, d, from.get(0, h, first + r, d)); });
      };
      copy(alone.q, all.q, query), copy(alone.grad_out, all.grad_out, query);
      copy(alone.k, all.k, key), copy(alone.v, all.v, key);
      alone.grad_lse.each(
          [&](i64 x, i64 h, i64 r, i64 m) { alone.grad_lse.put(x, h, r, m, all.grad_lse.get(0, h, 0, query + m)); });
      alone.run(*kernels, 3);
      const auto same = [&](const Tensor& mine, const Tensor& packed, i64 first, const char* name) {
        mine.each([&](i64 x, i64 h, i64 r, i64 d) {
          expect(mine.get(x, h, r, d) == packed.get(0, h, first + r, d),
                 std::string(name) + " alone and packed, " + kernels->name);
        });
      };
      same(alone.out, all.out, query, "out"), same(alone.grad_q, all.grad_q, query, "grad_q");
      same(alone.grad_k, all.grad_k, key, "grad_k"), same(alone.grad_v, all.grad_v, key, "grad_v");
      query += one.queries, key += one.keys;
    }
  }
}

// With one key the result is its value to the bit; with two alike it is their mean, rounded to the storage type.
inline void test_every_value(DType dtype) {
  for (const Kernels* kernels : instruction_sets()) {
    for (i64 keys : {1, 2}) {
      Case c = make(dtype, 1, keys, 3, 512);
      c.batch = 128, c.heads = 1, c.scale = 0;
      Instance x(c, Place::end);
      x.v.each([&](i64 b, i64, i64 n, i64 d) {
        const u16 bits = static_cast<u16>(b * 512 + d + n);
        std::memcpy(static_cast<u16*>(const_cast<void*>(x.v.view.data)) + x.v.at(b, 0, n, d), &bits, 2);
      });
      if (!kernels->forward(x.forward_args())) fail("out of memory");
      x.out.each([&](i64 b, i64, i64, i64 d) {
        const double first = x.v.get(b, 0, 0, d), second = x.v.get(b, 0, keys - 1, d), got = x.out.get(b, 0, 0, d);
        const double mean = static_cast<float>((first + second) / 2);
        // Products of bfloat16 pairs take subnormal numbers for zero; sums of two may overflow.
        if (keys == 2 && !(std::fabs(first) + std::fabs(second) < 3e38)) return;
        if (dtype == DType::bf16 && std::fabs(mean) < 1e-37) return;
        double rounded;
        test::put(dtype, &rounded, 0, mean);
        rounded = test::get(dtype, &rounded, 0);
        expect(got == rounded || (std::isnan(got) && std::isnan(rounded)),
               std::string(kernels->name) + ": of " + number(first) + " and " + number(second) + " got " + number(got));
      });
    }
  }
}

}  // namespace tilewise::test
