// The end of a forward pass: from what the blocks of keys have left of each row to its factor, its lse and its
// statistics.
#pragma once

#include "base/elementary.h"
#include "base/leave.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

constexpr double kLog2e = 1.44269504088896340736;
constexpr double kLn2 = 0.693147180559945309417;
// A smaller scale is not left to the exponential: its factor could round to 0, and 0 times the -inf of a hidden pair is
// NaN.
constexpr double kLeastScale = 1e-30;
// 2^x is 0 from here down in every type. Stands for lower ones, -inf too, where x is multiplied by such a 0.
template <class C>
constexpr C kFar = static_cast<C>(-2000);

// The units in which a pass keeps scores: natural ones behind a score chain, which applies the scale itself; else those
// of q.k, and the scale is part of both factors. Row maxima are kept in the same units. A probability is then
// 2^((s - max) * to_base2): the difference of close scores is exact, so equal scores have equal probabilities, and the
// factor's rounding is relative to that difference instead of to the score.
template <class C>
struct ScoreUnits {
  bool chain;
  C to_natural, to_base2;
  explicit ScoreUnits(const Problem& p)
      : chain(p.score_length > 0 || !(p.scale > kLeastScale)),
        to_natural(chain ? 1 : static_cast<C>(p.scale)),
        to_base2(static_cast<C>(chain ? kLog2e : p.scale * kLog2e)) {}
};

// What is known of some rows, one element each, in whole vectors; no more than kTileQueries.
template <class C>
struct RowNumbers {
  C* row_max;  // in the units of the scores
  C* row_sum;
  C* row_moment;  // for statistics only: the sum of 2^t * t, t the score less the maximum in base-2 units
  C* best;        // for statistics only: NaN once a score was; else the largest, or less than row_max
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
  ClosedRows(const RowNumbers<C>& rows, int width, const C* sinks, double dropout, const ScoreUnits<C>& units) {
    const C keep_scale = static_cast<C>(1 / (1 - dropout));
    for (int i = 0; i < width; i += kLanes<C>) {
      // Rounded: GCC 16 fused this product into the sum for lse where no statistics are taken, and gave lse other bits.
      const Vec<C> before = rounded(load(rows.row_max + i) * units.to_natural, C{});
      Vec<C> sum = load(rows.row_sum + i), top = before, alpha = set(static_cast<C>(1)), sink{};
      live |= bits_of_mask<SInt<C>>((Vec<SInt<C>>)(sum != 0)) << i;
      if (sinks != nullptr) {
        sink = load(sinks + i);
        top = vmax(sink, before);
        const Vec<C> safe = top == -kInfinity ? Vec<C>{} : top;
        alpha = exp2<5>((before - safe) * log2e, C{});
        sum = sum * alpha + exp2<5>((sink - safe) * log2e, C{});
      }
      if (rows.row_moment != nullptr) statistics(rows, i, before, sinks == nullptr ? nullptr : &sink, sum, top, units);
      store(lse_ + i, sum == 0 ? set(-kInfinity) : top + log(sum, C{}));
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
  static constexpr C kInfinity = static_cast<C>(__builtin_inf()), log2e = static_cast<C>(kLog2e);

  // With t the logits less the larger of row maximum and sink, in base-2 units: entropy = log(sum of 2^t) - ln(2) *
  // mean of t. `before`: the row maximum in natural units; `sum` and `now`: the row sum and maximum with the sink.
  void statistics(const RowNumbers<C>& rows, int i, Vec<C> before, const Vec<C>* sink, Vec<C> sum, Vec<C> now,
                  const ScoreUnits<C>& units) {
    const C ln2 = static_cast<C>(kLn2);
    const Vec<C> safe = now == -kInfinity ? Vec<C>{} : now;
    const Vec<C> change = (before - safe) * log2e, moved = vmax(set(kFar<C>), change);
    Vec<C> moment = (load(rows.row_moment + i) + moved * load(rows.row_sum + i)) * exp2<5>(change, C{});
    if (sink != nullptr) {
      const Vec<C> share = (*sink - safe) * log2e;
      moment += exp2<5>(share, C{}) * vmax(set(kFar<C>), share);
    }
    const Vec<C> average = sum == 0 ? Vec<C>{} : moment / sum;
    store(mean_ + i, average);
    store(entropy_ + i, sum == 0 ? Vec<C>{} : log(sum, C{}) - average * ln2);
    const Vec<C> best = load(rows.best + i) * units.to_natural;
    store(max_logit_ + i, best != best ? best : vmax(best, before));
  }

  alignas(kVectorBytes) C lse_[kTileQueries], mean_[kTileQueries], entropy_[kTileQueries], max_logit_[kTileQueries];
};

}  // namespace tilewise::TILEWISE_ISA
