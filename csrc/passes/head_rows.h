// Rows of queries or keys on their way into attention: normalised over their channels, then turned by their positions.
// Plain code reads and writes all of them some ten times, and rows in 16 bits as float32 copies. Here a row is read
// once and written once; what is in between stays in the first cache.
#pragma once

#include "base/schedule.h"
#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class HeadRowsKernel {
  using Acc = typename Mode::Acc;
  static constexpr int lanes = kLanes<Acc>;
  // Rows of a task, whose sums for the weights' gradients are in the computing type; the sums of tasks are in double.
  // Part of the rounding contract: no thread changes it.
  static constexpr i64 kRows = 64;

 public:
  explicit HeadRowsKernel(const HeadRows& f)
      : f_(f), padded_(round_up(f.width, lanes)), blocks_((f.rows + kRows - 1) / kRows) {}

  bool run() {
    const i64 tasks = f_.batch * f_.heads * blocks_;
    Acc* sums = nullptr;
    if (f_.grad_weight != nullptr) {
      sums = static_cast<Acc*>(std::malloc(static_cast<std::size_t>(max(1, tasks * 2 * padded_)) * sizeof(Acc)));
      if (sums == nullptr) return false;
    }
    Carver count(nullptr);
    Room measured(count, padded_);
    const bool done = for_tasks(f_.threads, tasks, count.used(), [&](i64 task, void* memory) {
      Carver carve(memory);
      Room room(carve, padded_);
      const i64 block = task % blocks_, h = task / blocks_ % f_.heads, b = task / (blocks_ * f_.heads);
      room.of_weight = sums == nullptr ? nullptr : sums + task * 2 * padded_;
      if (sums != nullptr) std::memset(room.of_weight, 0, static_cast<std::size_t>(2 * padded_) * sizeof(Acc));
      for (i64 m = block * kRows; m < min(f_.rows, (block + 1) * kRows); m++) visit(b, h, m, room);
    });
    for (i64 task = 0; sums != nullptr && task < tasks; task++) {
      const i64 head = task / blocks_ % f_.heads * f_.weight_head;
      for (i64 i = 0; i < f_.width; i++) {
        f_.grad_weight[head + i] += static_cast<double>(sums[task * 2 * padded_ + i]);
        f_.grad_bias[head + i] += static_cast<double>(sums[(task * 2 + 1) * padded_ + i]);
      }
    }
    std::free(sums);
    return done;
  }

 private:
  struct Room {
    Room(Carver& carve, i64 padded) : normal(carve.take<Acc>(padded)), row(carve.take<Acc>(padded)) {}
    Acc *normal, *row;         // the row after the norm, before its weights; the row on its way. Zeros behind the width
    Acc* of_weight = nullptr;  // sums of the task for the gradients of weight and bias
  };

  void visit(i64 b, i64 h, i64 m, Room& room) const {
    const Acc factor = open(Mode::at(f_.x.data, view_at(f_.x, b, h, m)), room.normal);
    auto* to = Mode::at(const_cast<void*>(f_.out.data), view_at(f_.out, b, h, m));
    if (f_.grad.data == nullptr) {
      for (i64 i = 0; i < f_.width; i += lanes) store(room.row + i, weighted(load(room.normal + i), h, i));
      turn<false>(b, m, room.row);
    } else {
      const auto* grad = Mode::at(f_.grad.data, view_at(f_.grad, b, h, m));
      for (i64 i = 0; i < f_.width; i += lanes) store(room.row + i, widen(grad + i, f_.width - i));
      turn<true>(b, m, room.row);
      differentiate(h, factor, room);
    }
    for (i64 i = 0; i < f_.width; i += lanes) narrow(to + i, f_.width - i, load(room.row + i));
  }

  // Writes the row after the norm, (x - mean) * factor, and returns the factor.
  template <class T>
  Acc open(const T* x, Acc* normal) const {
    Vec<Acc> sums{};
    for (i64 i = 0; i < f_.width; i += lanes) {
      const Vec<Acc> each = widen(x + i, f_.width - i);
      store(normal + i, each);
      sums += f_.centred ? each : each * each;
    }
    double total = added(sums);
    if (f_.centred) {
      const Acc mean = static_cast<Acc>(total / static_cast<double>(f_.width));
      sums = Vec<Acc>{};
      for (i64 i = 0; i < f_.width; i += lanes) {
        const Vec<Acc> each = inside(load(normal + i) - mean, i);
        store(normal + i, each);
        sums += each * each;
      }
      total = added(sums);
    }
    const Acc factor = static_cast<Acc>(1 / __builtin_sqrt(total / static_cast<double>(f_.width) + f_.eps));
    for (i64 i = 0; i < f_.width; i += lanes) store(normal + i, load(normal + i) * factor);
    return factor;
  }

  Vec<Acc> weighted(Vec<Acc> x, i64 h, i64 i) const {
    const i64 at = h * f_.weight_head + i;
    if (f_.weight != nullptr) x *= load_first(static_cast<const Acc*>(f_.weight) + at, f_.width - i);
    if (f_.bias != nullptr) x += load_first(static_cast<const Acc*>(f_.bias) + at, f_.width - i);
    return x;
  }

  // The gradient g by the weighted row becomes that by x. With n the row after the norm and w the weight,
  // dx = factor * (g w - mean(g w) - n * mean(g w n)); the first mean is there where the norm takes one away.
  void differentiate(i64 h, Acc factor, Room& room) const {
    Vec<Acc> along{}, plain{};
    for (i64 i = 0; i < f_.width; i += lanes) {
      const Vec<Acc> normal = load(room.normal + i);
      Vec<Acc> g = load(room.row + i);
      if (room.of_weight != nullptr) {
        store(room.of_weight + i, load(room.of_weight + i) + g * normal);
        store(room.of_weight + padded_ + i, load(room.of_weight + padded_ + i) + g);
      }
      if (f_.weight != nullptr)
        g *= load_first(static_cast<const Acc*>(f_.weight) + h * f_.weight_head + i, f_.width - i);
      store(room.row + i, g);
      along += g * normal;
      plain += g;
    }
    const double width = static_cast<double>(f_.width);
    const Acc tilt = static_cast<Acc>(added(along) / width);
    const Acc shift = f_.centred ? static_cast<Acc>(added(plain) / width) : Acc{};
    for (i64 i = 0; i < f_.width; i += lanes)
      store(room.row + i, (load(room.row + i) - shift - load(room.normal + i) * tilt) * factor);
  }

  // Pairs of channels turned by their angles; `kBack`: the other way.
  template <bool kBack>
  void turn(i64 b, i64 m, Acc* row) const {
    const i64 at = b * f_.angle_batch + m * f_.angle_row;
    const Acc* cosines = static_cast<const Acc*>(f_.cos) + at;
    const Acc* sines = static_cast<const Acc*>(f_.sin) + at;
    if (f_.interleaved) {
      // A channel with an even number takes its neighbour's share away, one with an odd number adds it.
      Vec<Acc> sign;
      for (int i = 0; i < lanes; i++) sign[i] = (i % 2 == 0) == kBack ? Acc{1} : Acc{-1};
      for (i64 i = 0; i < f_.rotated; i += lanes) {
        const i64 count = f_.rotated - i;
        const Vec<Acc> x = load(row + i), other = neighbours(x, std::make_integer_sequence<int, lanes>{});
        store_first(row + i, count, x * load_first(cosines + i, count) + sign * load_first(sines + i, count) * other);
      }
      return;
    }
    const i64 half = f_.rotated / 2;
    for (i64 i = 0; i < half; i += lanes) {
      const i64 count = half - i;
      const Vec<Acc> one = load_first(row + i, count), two = load_first(row + half + i, count);
      const Vec<Acc> c = load_first(cosines + i, count), s = load_first(sines + i, count);
      store_first(row + i, count, kBack ? one * c + two * s : one * c - two * s);
      store_first(row + half + i, count, kBack ? two * c - one * s : two * c + one * s);
    }
  }

  template <int... I>
  static Vec<Acc> neighbours(Vec<Acc> x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I ^ 1)...);
  }

  // The sum of the lanes, halves first: one after the other would take as long as all else of a row.
  template <int kStep = lanes / 2>
  static double added(Vec<Acc> x) {
    if constexpr (kStep > 0) return added<kStep / 2>(x + behind<kStep>(x, std::make_integer_sequence<int, lanes>{}));
    return static_cast<double>(x[0]);
  }
  template <int kStep, int... I>
  static Vec<Acc> behind(Vec<Acc> x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, ((I + kStep) % lanes)...);
  }

  // Zeros behind the width.
  Vec<Acc> inside(Vec<Acc> x, i64 first) const {
    for (i64 i = f_.width - first; i < lanes; i++) x[i] = 0;
    return x;
  }

  const HeadRows& f_;
  i64 padded_, blocks_;
};

}  // namespace tilewise::TILEWISE_ISA
