// The last pass over scores: whatever makes them, they are stored, and the largest of each query found, in one go.
#pragma once

#include "base/tile_sizes.h"

namespace tilewise::TILEWISE_ISA {

// A finite bias is not let below this, so that the score stays finite in base-2 units.
template <class C>
constexpr C kLowestBias = static_cast<C>(sizeof(C) == 4 ? -2.3e38 : -1.2e308);

// Scores of some keys, element (j, i) at s[j * width + i]; `peak` receives the largest of each query, of those that it
// holds already too.
template <class C>
struct Leaving {
  C *s, *peak;
  int width, rows, count;
};

// f(j, i, x) makes the vectors x of key j from query i on. Lanes without a query hold no score. Taken by value: what is
// stored might lie over anything that is not in a register.
template <int kV, bool kLow, class C, class F>
TW_INLINE bool leave_columns(const Leaving<C> to, int column, const F f) {
  using U = UInt<C>;
  constexpr int lanes = kLanes<C>;
  // As unsigned integers numbers from the bound down to the lowest follow one another, and -inf comes next.
  const U bound = __builtin_bit_cast(U, kLowestBias<C>),
          span = __builtin_bit_cast(U, -static_cast<C>(__builtin_inf())) - bound;
  Vec<C> top[kV];
  Vec<U> low[kV];
  u64 there[kV];
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) {
    const int i = column + v * lanes;
    top[v] = load(to.peak + i), low[v] = set<U>(span);
    there[v] = i + lanes <= to.rows ? ~u64{0} : i < to.rows ? (u64{1} << (to.rows - i)) - 1 : 0;
  }
  const bool all = column + kV * lanes <= to.rows;
  for (int j = 0; j < to.count; j++) {
    Vec<C> x[kV];
    f(j, column, x);
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      if (!all) x[v] = keep_where<C>(there[v], x[v]);
      store(to.s + static_cast<i64>(j) * to.width + column + v * lanes, x[v]);
      top[v] = vmax(x[v], top[v]);
      if constexpr (kLow) {
        const Vec<U> depth = (Vec<U>)x[v] - bound;
        low[v] = depth < low[v] ? depth : low[v];
      }
    }
  }
  u64 some = 0;
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) {
    store(to.peak + column + v * lanes, top[v]);
    some |= bits_of_mask<SInt<C>>((Vec<SInt<C>>)(low[v] < span));
  }
  return some != 0;
}

// True if a score is below kLowestBias, -inf aside, where that is asked for.
template <bool kLow, class C, class F>
static bool leave(const Leaving<C> to, const F f) {
  constexpr int lanes = kLanes<C>;
  bool low = false;
  int i = 0;
  for (; i + 4 * lanes <= to.width; i += 4 * lanes) low |= leave_columns<4, kLow>(to, i, f);
  for (; i < to.width; i += lanes) low |= leave_columns<1, kLow>(to, i, f);
  return low;
}

}  // namespace tilewise::TILEWISE_ISA
