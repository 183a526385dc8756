// Rows of a table that lie anywhere: copied to one place, or added to. What an operation of torch does row by row waits
// for each row; here the memory of later rows is on its way.
#pragma once

#include "base/schedule.h"
#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class GatheredRowsKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  static constexpr int lanes = kLanes<Acc>;
  static constexpr i64 kLine = 64, kAhead = 8;  // bytes; rows

 public:
  explicit GatheredRowsKernel(const GatheredRows& f) : f_(f) {}

  bool run() const { return f_.add ? add() : copy(); }

 private:
  bool copy() const {
    constexpr i64 rows = 64;  // of a task
    const auto bytes = static_cast<i64>(sizeof(Elem)) * f_.width;
    return for_tasks(f_.threads, (f_.count + rows - 1) / rows, 64, [&](i64 task, void*) {
      const i64 begin = task * rows, end = min(f_.count, begin + rows);
      for (i64 i = begin; i < end; i++) {
        if (i + kAhead < end) fetch<0>(Mode::at(f_.table, f_.places[i + kAhead] * f_.stride), bytes);
        std::memcpy(Mode::at(f_.rows, i * f_.width), Mode::at(f_.table, f_.places[i] * f_.stride),
                    static_cast<std::size_t>(bytes));
      }
    });
  }

  // Several rows may go to one place, so a task has all rows: some channels of them, in their order.
  bool add() const {
    constexpr i64 channels = 64;  // of a task
    return for_tasks(f_.threads, (f_.width + channels - 1) / channels, 64, [&](i64 task, void*) {
      const i64 first = task * channels, width = min(channels, f_.width - first);
      Acc* table = static_cast<Acc*>(f_.table) + first;
      const Elem* rows = Mode::at(f_.rows, first);
      for (i64 i = 0; i < f_.count; i++) {
        if (i + kAhead < f_.count)
          fetch<1>(table + f_.places[i + kAhead] * f_.stride, width * static_cast<i64>(sizeof(Acc)));
        Acc* to = table + f_.places[i] * f_.stride;
        const Elem* from = rows + i * f_.width;
        for (i64 d = 0; d < width; d += lanes)
          store_first(to + d, width - d, widen(to + d, width - d) + widen(from + d, width - d));
      }
    });
  }

  template <int kWrite>
  static void fetch(const void* at, i64 bytes) {
    for (i64 byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(static_cast<const char*>(at) + byte, kWrite, 3);
  }

  const GatheredRows& f_;
};

}  // namespace tilewise::TILEWISE_ISA
