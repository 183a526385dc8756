// Keys and values of the next block, brought nearer while this one is computed. Rows that lie apart are fetched in
// turn: a processor that reads line after line of one page waits for each page anew (notes/performance-log.md).
#pragma once

#include "base/processor.h"
#include "base/simd.h"
#include "base/tile_sizes.h"

namespace tilewise::TILEWISE_ISA {

class RowsAhead {
 public:
  void clear() { left_ = 0, burst_ = 1, spread(0, 1); }

  // `count` rows of keys and as many of values, found through their pointers.
  template <class E>
  void aim(const E* const* keys, const E* const* values, int count, int key_elements, int value_elements) {
    rows_[0] = reinterpret_cast<const char* const*>(keys), rows_[1] = reinterpret_cast<const char* const*>(values);
    bytes_[0] = key_elements * static_cast<int>(sizeof(E)), bytes_[1] = value_elements * static_cast<int>(sizeof(E));
    count_ = left_ = count;
    // Values that are a part of the keys, as latent ones are, come with them: to ask for a line twice took 3 to 9 %.
    const auto inside = [&](int j) {
      const char *key = rows_[0][j], *value = rows_[1][j];
      return key <= value && value + bytes_[1] <= key + bytes_[0];
    };
    tensors_ = count > 0 && inside(0) && inside(count - 1) ? 1 : 2;
    first_ = at_ = 0;
    // Rows of one page in their order, those of several pages in turn.
    const i64 apart = count > 1 ? reinterpret_cast<const char*>(keys[1]) - reinterpret_cast<const char*>(keys[0]) : 0;
    stripe_ = apart > 0 ? static_cast<int>(max(kSubKeys, kPage / apart)) : kSubKeys;
    if (apart > 0 && apart <= kShort && has_line_streams()) stripe_ = 1;
    burst_ = max(1, kBurst / max(1, bytes_[0] + (tensors_ == 2 ? bytes_[1] : 0)));
    spread(0, 1);
  }
  int left() const { return left_; }

  // From now on every step fetches its share of `rows` rows over so many steps. Some lines at a time: while they are on
  // their way, products wait for lines of the second-level cache, and one by one they would always be on their way.
  void spread(int rows, int steps) {
    rows_due_ = rows, steps_ = steps > 0 ? steps : 1, due_ = 0;
    enough_ = steps_ * burst_;
  }
  inline __attribute__((always_inline)) void step() {
    if (rows_due_ == 0 || (due_ += rows_due_) < enough_) return;
    for (; due_ >= steps_; due_ -= steps_) row();
  }
  void all() {
    while (left_ > 0) row();
  }

 private:
  static constexpr i64 kPage = 4096, kShort = 128;
  static constexpr int kBurst = 512;  // bytes

  // One row of keys and the one of values beside it; the next ones are a stripe of rows further.
  void row() {
    if (left_ == 0) return;
    left_--;
    for (int i = 0; i < tensors_; i++) {
      const char* from = rows_[i][at_];
      for (int byte = 0; byte < bytes_[i]; byte += 64) __builtin_prefetch(from + byte, 0, 2);
    }
    at_ += stripe_;
    if (at_ >= count_) at_ = ++first_;
  }

  const char* const* rows_[2];
  int bytes_[2], tensors_;
  int count_, left_, stripe_, first_, at_, rows_due_, steps_, due_, enough_, burst_ = 1;
};

}  // namespace tilewise::TILEWISE_ISA
