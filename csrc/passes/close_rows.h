// The end of a forward pass: from what the blocks of keys have left of each row to its factor, its lse and its
// statistics.
#pragma once

#include "base/elementary.h"
#include "base/leave.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

constexpr double kLog2e = 1.44269504088896340736;
constexpr double kLn2 = 0.693147180559945309417;
// 2^x is 0 from here down in every type. Stands for lower ones, -inf too, where x is multiplied by such a 0.
template <class C>
constexpr C kFar = static_cast<C>(-2000);

// The factor from stored scores to base-2 units, and whether the score chain runs (it applies the scale itself).
template <class C>
struct ScoreUnits {
  bool chain;
  C to_base2;
  explicit ScoreUnits(const Problem& p)
      : chain(p.score_length > 0 || !(p.scale > 0)), to_base2(static_cast<C>(chain ? kLog2e : p.scale * kLog2e)) {}
};

// What is known of some rows, one element each, in whole vectors; no more than kTileQueries.
template <class C>
struct RowNumbers {
  C* row_max;  // base 2
  C* row_sum;
  C* deepest;     // see ScoreChain::Extras
  C* row_moment;  // for statistics only: the sum of exp2(score - row_max) * (score - row_max)
  C* best;        // for statistics only: the largest score as it was left, NaN once one was
};

// Whether a score takes the place of the best one so far: as torch's argmax has it, the first NaN is larger than all.
template <class C>
bool beats(C score, C best) {
  return score > best || (score != score && best == best);
}

template <class C>
class ClosedRows {
 public:
  alignas(kVectorBytes) C factor[kTileQueries];  // of the output
  u64 live = 0;                                  // rows that have something to divide by

  // `sinks`: of each row, in natural units, or null. Statistics are taken where row_moment is not null.
  ClosedRows(const RowNumbers<C>& rows, int width, const C* sinks, double dropout) {
    const C keep_scale = static_cast<C>(1 / (1 - dropout));
    for (int i = 0; i < width; i += kLanes<C>) {
      const Vec<C> before = load(rows.row_max + i);
      Vec<C> sum = load(rows.row_sum + i), top = before, alpha = set(static_cast<C>(1)), sink{};
      live |= bits_of_mask<SInt<C>>((Vec<SInt<C>>)(sum != 0)) << i;
      if (sinks != nullptr) {
        sink = load(sinks + i) * static_cast<C>(kLog2e);
        top = vmax(sink, before);
        const Vec<C> safe = top == -kInfinity ? Vec<C>{} : top;
        alpha = exp2<5>(before - safe, C{});
        sum = sum * alpha + exp2<5>(sink - safe, C{});
      }
      if (rows.row_moment != nullptr) statistics(rows, i, sinks == nullptr ? nullptr : &sink, sum, top);
      // Scores at the bound of biases stood for lower ones.
      const Vec<C> sum_log = top * static_cast<C>(kLn2) + log(sum, C{});
      const Vec<C> value = sum != sum ? sum : top < kLowestBias<C> ? load(rows.deepest + i) : sum_log;
      store(lse_ + i, sum == 0 ? set(-kInfinity) : value);
      store(factor + i, alpha * keep_scale / sum);
    }
  }

  // Rows `from` on, to the places of head h from `row` on.
  void write(const Forward& f, const RowNumbers<C>& rows, int from, int count, i64 b, i64 h, i64 row) const {
    const std::size_t size = static_cast<std::size_t>(count) * sizeof(C);
    std::memcpy(rows_at<C>(f.lse, b, h, row), lse_ + from, size);
    std::memcpy(rows_at<C>(f.row_max, b, h, row), rows.row_max + from, size);
    std::memcpy(rows_at<C>(f.row_sum, b, h, row), rows.row_sum + from, size);
    if (!f.entropy.data) return;
    std::memcpy(rows_at<C>(f.row_mean, b, h, row), mean_ + from, size);
    std::memcpy(rows_at<C>(f.entropy, b, h, row), entropy_ + from, size);
    std::memcpy(rows_at<C>(f.max_logit, b, h, row), max_logit_ + from, size);
  }

 private:
  static constexpr C kInfinity = static_cast<C>(__builtin_inf());

  // With t the logits less the largest of them, in base-2 units: entropy = log(sum of 2^t) - ln(2) * mean of t, of
  // which neither term is negative. `sum` and `now`: the row sum and maximum with the sink.
  void statistics(const RowNumbers<C>& rows, int i, const Vec<C>* sink, Vec<C> sum, Vec<C> now) {
    const C ln2 = static_cast<C>(kLn2);
    const Vec<C> before = load(rows.row_max + i);
    const Vec<C> safe = now == -kInfinity ? Vec<C>{} : now;
    const Vec<C> moved = vmax(set(kFar<C>), before - safe);
    Vec<C> moment = (load(rows.row_moment + i) + moved * load(rows.row_sum + i)) * exp2<5>(before - safe, C{});
    if (sink != nullptr) moment += exp2<5>(*sink - safe, C{}) * vmax(set(kFar<C>), *sink - safe);
    const Vec<C> average = sum == 0 ? Vec<C>{} : moment / sum;
    store(mean_ + i, average);
    store(entropy_ + i, sum == 0 ? Vec<C>{} : log(sum, C{}) - average * ln2);
    const Vec<C> deep = load(rows.deepest + i);
    const Vec<C> lowest = deep == -kInfinity ? before * ln2 : deep;
    const Vec<C> top = before < kLowestBias<C> ? lowest : before * ln2;
    const Vec<C> best = load(rows.best + i);
    store(max_logit_ + i, best != best ? best : before == -kInfinity ? before : top);
  }

  alignas(kVectorBytes) C lse_[kTileQueries], mean_[kTileQueries], entropy_[kTileQueries], max_logit_[kTileQueries];
};

}  // namespace tilewise::TILEWISE_ISA
