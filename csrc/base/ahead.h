// Memory that the next tile reads, brought nearer while this one is computed. Where tiles stand side by side the
// processor sees for itself what comes next; where tiles between them are empty it does not.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

class Ahead {
 public:
  // `rows` rows of `bytes` bytes each, `stride` bytes apart.
  void add(const void* at, i64 stride, i64 rows, i64 bytes) {
    if (rows <= 0 || bytes <= 0 || count_ == kSpans) return;
    if (stride == bytes) bytes *= rows, rows = 1;
    const char* first = static_cast<const char*>(at);
    const i64 lines = (bytes + kLine - 1) / kLine;
    spans_[count_++] = {first, stride, rows, lines};
    lines_ += rows * lines;
    burst_ = lines_ / kSteps + 1;
  }
  bool any() const { return count_ > 0; }

  // A share of it; the products of a tile take at least kSteps steps.
  TW_NOINLINE void step() {
    for (i64 left = burst_; left > 0 && span_ < count_;) {
      const Span& x = spans_[span_];
      const char* from = x.at + row_ * x.stride + line_ * kLine;
      const i64 lines = min(left, x.lines - line_);
      for (i64 i = 0; i < lines; i++) __builtin_prefetch(from + i * kLine, 0, 2);
      left -= lines;
      line_ += lines;
      if (line_ < x.lines) return;
      line_ = 0;
      if (++row_ < x.rows) continue;
      row_ = 0;
      span_++;
    }
  }

 private:
  static constexpr int kSpans = 10;
  static constexpr i64 kLine = 64, kSteps = 32;
  struct Span {
    const char* at;
    i64 stride, rows, lines;
  };
  Span spans_[kSpans];
  int count_ = 0, span_ = 0;
  i64 row_ = 0, line_ = 0, lines_ = 0, burst_ = 0;
};

}  // namespace tilewise::TILEWISE_ISA
