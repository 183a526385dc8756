// Rows of logits become losses, and in place their own gradients. A row is read twice while it is in the cache; plain
// code goes over it some six times, in float32.
#pragma once

#include "base/elementary.h"
#include "base/schedule.h"
#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class CrossEntropyKernel {
  using Acc = typename Mode::Acc;
  static constexpr int lanes = kLanes<Acc>;
  static constexpr Acc log2e = static_cast<Acc>(1.44269504088896340736);
  // Sums of so many words are in the computing type, the sum of these sums in double: one long chain would lose digits.
  static constexpr i64 kPiece = 64 * lanes;

 public:
  explicit CrossEntropyKernel(const CrossEntropy& f)
      : f_(f), cap_(static_cast<Acc>(f.softcap)), per_cap_(f.softcap > 0 ? static_cast<Acc>(1 / f.softcap) : Acc{}) {}

  bool run() {
    constexpr i64 rows_of_task = 4;
    return for_tasks(f_.threads, (f_.rows + rows_of_task - 1) / rows_of_task, 64, [&](i64 task, void*) {
      for (i64 row = task * rows_of_task; row < min(f_.rows, (task + 1) * rows_of_task); row++) {
        if (f_.softcap > 0)
          visit<true>(row);
        else
          visit<false>(row);
      }
    });
  }

 private:
  template <bool kCapped>
  void visit(i64 row) const {
    auto* z = Mode::at(f_.logits, row * f_.stride);
    if (f_.losses) close<kCapped>(row, z);
    if (f_.scales) differentiate<kCapped>(row, z);
  }

  // `count` logits, zeros behind them; `slope` gets the derivative of the softcap.
  template <bool kCapped, class T>
  Vec<Acc> read(const T* z, i64 count, Vec<Acc>& slope) const {
    const Vec<Acc> x = widen(z, count);
    if constexpr (kCapped) return tanh(x * per_cap_, slope, Acc{}) * cap_;
    return x;
  }

  // The loss and the lse of a row of all words.
  template <bool kCapped, class T>
  void close(i64 row, const T* z) const {
    constexpr Acc infinity = static_cast<Acc>(__builtin_inf());
    const i64 columns = f_.columns, target = f_.targets[row];
    Vec<Acc> slope, tops = set(-infinity);
    for (i64 j = 0; j < columns; j += lanes) {
      Vec<Acc> x = read<kCapped>(z + j, columns - j, slope);
      if (columns - j < lanes) x = keep_first(x, columns - j, -infinity);
      tops = vmax(tops, x);
    }
    Acc top = -infinity;
    for (int i = 0; i < lanes; i++) top = tops[i] > top ? tops[i] : top;
    if (top == -infinity) top = 0;
    double sum = 0, total = 0;
    for (i64 first = 0; first < columns; first += kPiece) {
      const i64 end = min(columns, first + kPiece);
      Vec<Acc> sums{}, totals{};
      for (i64 j = first; j < end; j += lanes) {
        const Vec<Acc> x = read<kCapped>(z + j, columns - j, slope);
        Vec<Acc> e = exp2<6>((x - top) * log2e, Acc{});
        e = x != x ? x : e;
        if (columns - j < lanes) e = keep_first(e, columns - j, Acc{});
        sums += e;
        totals += x;
      }
      for (int i = 0; i < lanes; i++) sum += static_cast<double>(sums[i]), total += static_cast<double>(totals[i]);
    }
    const double lse = static_cast<double>(top) + log(set(sum), double{})[0];
    static_cast<Acc*>(f_.lse)[row] = static_cast<Acc>(lse);
    double loss = 0;
    if (target != f_.ignore_index) {
      const bool known = target >= 0 && target < columns;
      const double at = known ? static_cast<double>(read<kCapped>(z + target, 1, slope)[0]) : __builtin_nan("");
      loss = lse - (1 - f_.smoothing) * at + f_.z_loss * lse * lse;
      if (f_.smoothing > 0) loss -= f_.smoothing * (total / static_cast<double>(columns));
    }
    static_cast<Acc*>(f_.losses)[row] = static_cast<Acc>(loss);
  }

  // scale times d loss / d z, z before the softcap: with p = exp(z - lse) and the smoothing e,
  // (1 + 2 z_loss lse) p - e / V, and 1 - e less at the target.
  template <bool kCapped, class T>
  void differentiate(i64 row, T* z) const {
    const i64 columns = f_.columns, target = f_.targets[row];
    if (target == f_.ignore_index) {
      std::memset(static_cast<void*>(z), 0, static_cast<std::size_t>(columns) * sizeof(T));
      return;
    }
    const double scale = static_cast<double>(static_cast<const Acc*>(f_.scales)[row]);
    const Acc lse = static_cast<const Acc*>(f_.lse)[row];
    const Acc factor = static_cast<Acc>(scale * (1 + 2 * f_.z_loss * static_cast<double>(lse)));
    const Acc even = static_cast<Acc>(scale * f_.smoothing / static_cast<double>(f_.words));
    const i64 at = target - f_.first;
    const bool here = at >= 0 && at < columns;
    const T own = here ? z[at] : T{};
    const auto write = [&](T* to, const T* from, i64 count, Acc less) {
      Vec<Acc> slope;
      const Vec<Acc> x = read<kCapped>(from, count, slope);
      Vec<Acc> ds = exp2<6>((x - lse) * log2e, Acc{}) * factor - even - less;
      ds = x != x ? x : ds;
      if constexpr (kCapped) ds *= slope;
      narrow(to, count, ds);
    };
    for (i64 j = 0; j < columns; j += lanes) write(z + j, z + j, columns - j, Acc{});
    if (here) write(z + at, &own, 1, static_cast<Acc>(scale * (1 - f_.smoothing)));
  }

  static Vec<Acc> keep_first(Vec<Acc> x, i64 count, Acc rest) {
    for (i64 i = count; i < lanes; i++) x[i] = rest;
    return x;
  }

  const CrossEntropy& f_;
  Acc cap_, per_cap_;
};

}  // namespace tilewise::TILEWISE_ISA
