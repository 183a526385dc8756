// Where rows of keys and values lie: found through one pointer each, at equal distances, or without a gap. The products
// call fetch beside each load.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

template <class E>
struct RowPointers {
  const E* const* rows;
  const E* operator[](int j) const { return rows[j]; }
  RowPointers from(int j) const { return {rows + j}; }
  void fetch(int, i64) const {}
};
template <class E>
struct EvenRows {
  const E* first;
  i64 apart;
  const E* operator[](int j) const { return first + j * apart; }
  EvenRows from(int j) const { return {first + j * apart, apart}; }
  void fetch(int, i64) const {}
};
// Each load fetches a later one. What lies behind the last row is fetched for nothing.
template <class E>
struct Stream {
  const E* first;
  i64 width;
  // From memory 1 and 2 KB took up to a quarter longer; from the caches 32 KB and more took 5 % longer.
  static constexpr std::uintptr_t kAhead = 8192;  // bytes
  const E* operator[](int j) const { return first + j * width; }
  Stream from(int j) const { return {first + j * width, width}; }
  inline __attribute__((always_inline)) void fetch(int j, i64 column) const {
    const auto at = reinterpret_cast<std::uintptr_t>(first + j * width + column);
    __builtin_prefetch(reinterpret_cast<const void*>(at + kAhead), 0, 2);
  }
};

// In place of RowsAhead, where nothing is fetched: to ask takes a tenth of the time of one row's sums.
struct NothingAhead {
  void step() const {}
};

}  // namespace tilewise::TILEWISE_ISA
