// Integers of expressions beside floats: truths and integers of other widths than the floats, conversions, and division
// rounded down.
#pragma once

#include <type_traits>

#include "expressions/functions.h"
#include "expressions/program.h"

namespace tilewise::TILEWISE_ISA {

template <class T>
using SameSize = std::conditional_t<sizeof(T) == 4, i32, i64>;

// Vectors of integers next to vectors of C: of the same number of lanes, or twice as wide and two for one.
template <class I, class Truth>
TW_INLINE void store_truth(Truth* to, Vec<I> mask) {
  if constexpr (sizeof(I) == sizeof(Truth)) {
    store(to, mask);
  } else {
    const HalfInts half = __builtin_convertvector(mask, HalfInts);
    std::memcpy(to, &half, sizeof half);
  }
}
TW_INLINE Vec<i64> truth_as(const i32* from, i64) {
  HalfInts half;
  std::memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Vec<i64>);
}
TW_INLINE Vec<i32> truth_as(const i32* from, i32) { return load(from); }
TW_INLINE Vec<i64> truth_as(const i64* from, i64) { return load(from); }

TW_INLINE void store_converted(float* to, Vec<i32> x) { store(to, __builtin_convertvector(x, Vec<float>)); }
TW_INLINE void store_converted(double* to, Vec<i64> x) { store(to, __builtin_convertvector(x, Vec<double>)); }
TW_INLINE void store_converted(float* to, Vec<i64> x) {
  const HalfFloats half = __builtin_convertvector(x, HalfFloats);
  std::memcpy(to, &half, sizeof half);
}
TW_INLINE Vec<i32> to_integers(const float* from, i32) { return __builtin_convertvector(load(from), Vec<i32>); }
TW_INLINE Vec<i64> to_integers(const double* from, i64) { return __builtin_convertvector(load(from), Vec<i64>); }
TW_INLINE Vec<i64> to_integers(const float* from, i64) {
  HalfFloats half;
  std::memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Vec<i64>);
}

// Integer division rounded down. Of 32-bit numbers by way of double, whose quotient rounds to a whole number only where
// it is one. What is divided by 0 has any value.
TW_INLINE Vec<double> floors(const i32* a, const i32* b) {
  HalfInts x, y;
  std::memcpy(&x, a, sizeof x);
  std::memcpy(&y, b, sizeof y);
  const Vec<double> q = __builtin_convertvector(x, Vec<double>) / __builtin_convertvector(y, Vec<double>);
  return round_to<Toward::down>(q, double{});
}
TW_INLINE Vec<i32> floor_divide(Vec<i32> a, Vec<i32> b) {
  b = b == 0 ? set<i32>(1) : b;
  const i32 *p = reinterpret_cast<const i32*>(&a), *q = reinterpret_cast<const i32*>(&b);
  constexpr int half = kLanes<i32> / 2;
  HalfInts parts[2];
  parts[0] = __builtin_convertvector(floors(p, q), HalfInts);
  parts[1] = __builtin_convertvector(floors(p + half, q + half), HalfInts);
  Vec<i32> r;
  std::memcpy(&r, parts, sizeof r);
  return r;
}
TW_INLINE Vec<i64> floor_divide(Vec<i64> a, Vec<i64> b) {
  for (int i = 0; i < kLanes<i64>; i++) {
    const i64 x = a[i], y = b[i];
    if (y == 0 || y == -1) {
      a[i] = static_cast<i64>(-static_cast<u64>(x));  // also of the least number, whose quotient does not fit
      continue;
    }
    const i64 q = x / y;
    a[i] = q - (x % y != 0 && (x < 0) != (y < 0));
  }
  return a;
}

// ---- what operations do with vectors: integers wrap where they leave their type

template <class C>
concept Integer = std::is_integral_v<C>;
template <class C>
struct WrappingOf {
  using type = C;
};
template <Integer I>
struct WrappingOf<I> {
  using type = std::make_unsigned_t<I>;
};
template <class C>
using Wrapping = Vec<typename WrappingOf<C>::type>;

template <class C>
TW_INLINE Vec<C> plus(Vec<C> a, Vec<C> b, C) {
  return (Vec<C>)((Wrapping<C>)a + (Wrapping<C>)b);
}
template <class C>
TW_INLINE Vec<C> minus(Vec<C> a, Vec<C> b, C) {
  return (Vec<C>)((Wrapping<C>)a - (Wrapping<C>)b);
}
template <class C>
TW_INLINE Vec<C> times(Vec<C> a, Vec<C> b, C) {
  if constexpr (Integer<C>) {
    return (Vec<C>)((Wrapping<C>)a * (Wrapping<C>)b);
  } else {
    return rounded(a * b, C{});
  }
}
template <class C>
TW_INLINE Vec<C> floor_quotient(Vec<C> a, Vec<C> b, C) {
  if constexpr (Integer<C>) {
    return floor_divide(a, b);
  } else {
    return each_lane<C>(a, b, [](C x, C y) { return floor_divided<C>(x, y); });
  }
}
template <class C>
TW_INLINE Vec<C> floor_remainder(Vec<C> a, Vec<C> b, C) {
  if constexpr (Integer<C>) {
    return minus(a, times(floor_divide(a, b), b, C{}), C{});
  } else {
    return each_lane<C>(a, b, [](C x, C y) { return remainder_of(x, y); });
  }
}
template <Integer I>
TW_INLINE Vec<I> opposite(Vec<I> a, I) {
  return minus(Vec<I>{}, a, I{});
}
template <Integer I>
TW_INLINE Vec<I> magnitude(Vec<I> a, I) {
  return a < 0 ? opposite(a, I{}) : a;
}
template <Integer I>
TW_INLINE Vec<I> sign_of(Vec<I> a, I) {
  return (Vec<I>)(a < 0) - (Vec<I>)(a > 0);
}
// By what is no number of bits there is, any value.
template <Integer I>
constexpr I kTopBit = 8 * sizeof(I) - 1;
template <Integer I>
TW_INLINE Vec<I> shifted_left(Vec<I> a, Vec<I> b, I) {
  return (Vec<I>)((Wrapping<I>)a << (Wrapping<I>)(b & kTopBit<I>));
}
template <Integer I>
TW_INLINE Vec<I> shifted_right(Vec<I> a, Vec<I> b, I) {
  return a >> ((Wrapping<I>)b > (Wrapping<I>)set(kTopBit<I>) ? set(kTopBit<I>) : b);
}

// The vector code of each operation.
template <ExprOp kOp>
struct Code;
#define TILEWISE_CODE(op, name, arity, takes, gives, code, whole, real)       \
  template <>                                                                 \
  struct Code<ExprOp::op> {                                                   \
    template <class C>                                                        \
    TW_INLINE auto of([[maybe_unused]] Vec<C> a, [[maybe_unused]] Vec<C> b) { \
      return code;                                                            \
    }                                                                         \
  };
TILEWISE_OPERATIONS(TILEWISE_CODE)
#undef TILEWISE_CODE

}  // namespace tilewise::TILEWISE_ISA
