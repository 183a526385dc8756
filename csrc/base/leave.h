// The last pass over scores: whatever makes them, they are stored, and the largest of each query found, in one go.
#pragma once

#include "base/tile_sizes.h"

namespace tilewise::TILEWISE_ISA {

// Scores of some keys, element (j, i) at s[j * width + i]; `peak` receives the largest of each query, of those that it
// holds already too.
template <class C>
struct Leaving {
  C *s, *peak;
  int width, rows, count;
};

// f(j, i, x) makes the vectors x of key j from query i on. Lanes without a query hold no score. Taken by value: what is
// stored might lie over anything that is not in a register.
template <int kV, class C, class F>
TW_INLINE void leave_columns(const Leaving<C> to, int column, const F f) {
  constexpr int lanes = kLanes<C>;
  Vec<C> top[kV];
  u64 there[kV];
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) {
    const int i = column + v * lanes;
    top[v] = load(to.peak + i);
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
    }
  }
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) store(to.peak + column + v * lanes, top[v]);
}

template <class C, class F>
static void leave(const Leaving<C> to, const F f) {
  constexpr int lanes = kLanes<C>;
  int i = 0;
  for (; i + 4 * lanes <= to.width; i += 4 * lanes) leave_columns<4>(to, i, f);
  if (i + 2 * lanes <= to.width) leave_columns<2>(to, i, f), i += 2 * lanes;  // all of a tile of 32 queries
  if (i < to.width) leave_columns<1>(to, i, f);
}

}  // namespace tilewise::TILEWISE_ISA
