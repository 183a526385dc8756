// What few queries carry from block to block of their keys.
#pragma once

#include "passes/close_rows.h"

namespace tilewise::TILEWISE_ISA {

// What blocks of keys leave of the rows of a task.
template <class C>
struct RowState {
  RowNumbers<C> numbers;
  C* out;    // [rows][stride], not yet divided by the row sum
  i64* top;  // for the top key: the first one that has numbers.best
  std::size_t bytes;
  RowState(void* base, i64 rows, i64 stride, bool statistics, bool top_key) {
    const i64 width = round_up(rows, kLanes<C>);
    Carver carve(base);
    for (C** array : {&numbers.row_max, &numbers.row_sum}) *array = carve.take<C>(width);
    numbers.row_moment = statistics ? carve.take<C>(width) : nullptr;
    numbers.best = statistics ? carve.take<C>(width) : nullptr;
    top = top_key ? carve.take<i64>(width) : nullptr;
    out = carve.take<C>(rows * stride);
    bytes = carve.used();
  }

  void open(i64 rows, i64 stride) const {
    const C none = -static_cast<C>(__builtin_inf());
    for (i64 i = 0; i < round_up(rows, kLanes<C>); i++) {
      numbers.row_max[i] = none;
      numbers.row_sum[i] = 0;
      if (numbers.row_moment != nullptr) numbers.row_moment[i] = 0, numbers.best[i] = none;
    }
    for (i64 i = 0; top != nullptr && i < rows; i++) top[i] = -1;
    std::memset(out, 0, static_cast<std::size_t>(rows * stride) * sizeof(C));
  }
};

// One row of the output: its sums times the factor that closing has found.
template <class Mode>
TW_INLINE void write_row(const Forward& f, const ClosedRows<typename Mode::Acc>& closed, int r,
                         const typename Mode::Acc* sums, i64 b, i64 h, i64 row) {
  using Acc = typename Mode::Acc;
  const bool live = closed.live >> r & 1;
  const Vec<Acc> factor = set(closed.factor[r]);
  auto* out = Mode::at(const_cast<void*>(f.out.data), view_at(f.out, b, h, row));
  for (i64 d = 0; d < f.value_dim; d += kLanes<Acc>)
    narrow(const_cast<typename Mode::Elem*>(out) + d, f.value_dim - d, live ? load(sums + d) * factor : Vec<Acc>{});
}

}  // namespace tilewise::TILEWISE_ISA
