// Runs a case on every instruction set of this machine and compares it with the naive implementation.
#pragma once

#include <memory>

#include "naive.h"
#include "report.h"

namespace tilewise::test {

inline std::string only_isa;  // the one instruction set to test; all of the machine's where it is empty

inline std::vector<const Kernels*> instruction_sets() {
  int count;
  const Kernels* const* all = available(count);
  std::vector<const Kernels*> chosen;
  for (int i = 0; i < count; i++)
    if (only_isa.empty() || only_isa == all[i]->name) chosen.push_back(all[i]);
  return chosen;
}
// Whether some of its kernels round probabilities to bfloat16.
inline bool paired(const Kernels& kernels) {
  return kernels.bf16_flops != nullptr || std::string(kernels.name) == "avx512_amx";
}

// Within `slack` times the room; infinities and NaN stand in the same places.
inline void expect_near(const Numbers& got, const Numbers& truth, const Numbers& room, const std::string& what) {
  constexpr double slack = 1;
  for (std::size_t i = 0; i < got.size(); i++) {
    const double error =
        got[i] == truth[i] || (std::isnan(got[i]) && std::isnan(truth[i])) ? 0 : std::fabs(got[i] - truth[i]);
    if (error / room[i] > report.worst && error > 0) {
      report.worst = error / room[i];
      report.worst_case = what;
    }
    if (error <= slack * room[i]) continue;
    fail(what + "[" + std::to_string(i) + "]: got " + number(got[i]) + ", should be " + number(truth[i]) +
         ", allowed error " + number(slack * room[i]));
    return;
  }
}

inline void expect_near(const Tensor& got, const Numbers& truth, const Numbers& room, const std::string& what) {
  expect_near(got.values(), truth, room, what);
}

inline void expect_same(const Numbers& got, const Numbers& other, const std::string& what) {
  for (std::size_t i = 0; i < got.size(); i++) {
    if (got[i] == other[i] || (std::isnan(got[i]) && std::isnan(other[i]))) continue;
    return fail(what + "[" + std::to_string(i) + "]: " + number(got[i]) + " and " + number(other[i]) +
                " should be the same");
  }
}

inline void compare_statistics(const Instance& x, const Naive& truth, const std::string& what) {
  expect_near(x.max_logit, truth.max_logit, truth.logit_room, "max_logit of " + what);
  expect_near(x.entropy, truth.entropy, truth.entropy_room, "entropy of " + what);
  Numbers room = truth.entropy_room;
  for (double& one : room) one *= 2;  // in base-2 units
  // Less what the row subtracted, which may be less than the largest logit.
  Numbers mean = truth.row_mean;
  const Numbers row_max = x.row_max.values();
  for (std::size_t i = 0; i < mean.size(); i++) {
    const double largest = std::max(truth.row_max[i] * truth.units, truth.row_sink[i]);
    const double taken = std::max(row_max[i] * truth.units, truth.row_sink[i]);
    if (taken < largest) mean[i] += (largest - taken) / std::log(2.0);
  }
  expect_near(x.row_mean, mean, room, "row_mean of " + what);
  for (std::size_t i = 0; i < truth.tops.size(); i++) {
    const i64 key = x.top_key.data()[i];
    const std::vector<bool>& tops = truth.tops[i];
    const bool right = tops.empty()
                           ? key == -1
                           : key >= 0 && key < static_cast<i64>(tops.size()) && tops[static_cast<std::size_t>(key)];
    expect(right, "top_key of " + what + "[" + std::to_string(i) + "]: got " + std::to_string(key));
  }
}

// What a row subtracts from its scores is the largest of them, or less by `reach` at most (in natural units); the row
// sum goes with it.
inline void compare_rows(const Instance& x, const Naive& truth, double reach, const std::string& what) {
  const Numbers row_max = x.row_max.values(), row_sum = x.row_sum.values();
  Numbers subtracted = row_max, lse = row_max;
  for (std::size_t i = 0; i < row_max.size(); i++) {
    const double least = truth.row_max[i] - reach / truth.units;
    if (row_max[i] > least && row_max[i] < truth.row_max[i]) subtracted[i] = truth.row_max[i];
    lse[i] = row_sum[i] == 0 ? -INFINITY : row_max[i] * truth.units + std::log(row_sum[i]);
  }
  expect_near(subtracted, truth.row_max, truth.row_room, "row_max of " + what);
  expect_near(lse, truth.keys_lse, truth.lse_room, "row_max and row_sum of " + what);
}

// `reach`: see compare_rows.
inline void compare(const Instance& x, const Naive& truth, double reach, const std::string& what) {
  expect_near(x.out, truth.out, truth.out_room, "out of " + what);
  expect_near(x.lse, truth.lse, truth.lse_room, "lse of " + what);
  compare_rows(x, truth, reach, what);
  expect_near(x.delta, truth.delta, truth.delta_room, "delta of " + what);
  expect_near(x.grad_q, truth.grad_q, truth.grad_q_room, "grad_q of " + what);
  expect_near(x.grad_k, truth.grad_k, truth.grad_k_room, "grad_k of " + what);
  expect_near(x.grad_v, truth.grad_v, truth.grad_v_room, "grad_v of " + what);
  if (x.c.statistics) compare_statistics(x, truth, what);
  for (std::size_t i = 0; i < x.bias.size(); i++)
    if (x.bias[i].view.data)
      expect_near(x.grad_bias[i], truth.grad_bias[i], truth.grad_bias_room[i], "grad_bias of " + what);
}

inline int every = 1;  // of so many cases one is run

inline void check(const Case& c) {
  static int count = 0;
  if (count++ % every != 0) return;
  Instance end(c, Place::end), start(c, Place::start);
  std::unique_ptr<Naive> truth[2];
  for (const Kernels* kernels : instruction_sets()) {
    const std::string what = std::string(kernels->name) + ", " + c.text();
    const bool pairs = paired(*kernels) && c.dtype == DType::bf16;
    if (!truth[pairs]) truth[pairs] = std::make_unique<Naive>(end, pairs);
    if (!end.run(*kernels, 1) || !start.run(*kernels, 3)) {
      fail("out of memory: " + what);
      continue;
    }
    const bool keeps_references =
        std::string(kernels->name) == "avx512_amx" && (c.dtype == DType::bf16 || c.dtype == DType::f16);
    compare(end, *truth[pairs], keeps_references ? 8 * std::log(2.0) : 0, what);
    const auto one = end.results(), other = start.results();
    for (std::size_t i = 0; i < one.size(); i++) {
      expect_same(one[i].second->values(), other[i].second->values(),
                  std::string(one[i].first) + ", 1 and 3 threads, of " + what);
      expect(one[i].second->gaps_untouched() && other[i].second->gaps_untouched(),
             std::string(one[i].first) + " was written between its elements: " + what);
    }
  }
}

}  // namespace tilewise::test
