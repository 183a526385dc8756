// Elementary functions on vectors: exp2 for the softmax, log for the logsumexp, tanh for the softcap.
#pragma once

#include "simd.h"

namespace tilewise::TILEWISE_ISA {

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr i32 exponent_bias = 127;
  static constexpr i32 one = 0x3f800000;
  static constexpr i32 mantissa_mask = 0x007fffff;
  static constexpr i32 sqrt_half = 0x3f3504f3;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23
};
template <>
struct FloatFormat<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr i64 exponent_bias = 1023;
  static constexpr i64 one = 0x3ff0000000000000;
  static constexpr i64 mantissa_mask = 0x000fffffffffffff;
  static constexpr i64 sqrt_half = 0x3fe6a09e667f3bcd;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
};

// 2^r - 1 = r * poly(r) on [-1/2, 1/2]: minimax fits whose constant term is exactly zero, so that
// exp2(0) = 1 to the bit. Relative errors: degree 3 1e-4, degree 4 3e-6, degree 5 1.7e-7, degree 6 8e-8.
template <int kDegree>
TW_INLINE Vec<float> exp2_minus_one(Vec<float> r) {
  Vec<float> p;
  if constexpr (kDegree == 3) {
    p = set(5.500893295e-02f);
    p = p * r + 2.422109693e-01f;
    p = p * r + 6.932829022e-01f;
  } else if constexpr (kDegree == 4) {
    p = set(9.582852945e-03f);
    p = p * r + 5.590642616e-02f;
    p = p * r + 2.402409911e-01f;
    p = p * r + 6.931241751e-01f;
  } else if constexpr (kDegree == 5) {
    p = set(1.326472731e-03f);
    p = p * r + 9.671512991e-03f;
    p = p * r + 5.550733581e-02f;
    p = p * r + 2.402224243e-01f;
    p = p * r + 6.931470037e-01f;
  } else {
    p = set(1.535336196e-04f);
    p = p * r + 1.339887502e-03f;
    p = p * r + 9.618436918e-03f;
    p = p * r + 5.550332367e-02f;
    p = p * r + 2.402264774e-01f;
    p = p * r + 6.931471825e-01f;
  }
  return p * r;
}
// The Taylor series: ln(2)^n / n!; the first term left out is below 5e-18.
template <int>
TW_INLINE Vec<double> exp2_minus_one(Vec<double> r) {
  constexpr double ln2 = 0.693147180559945309417;
  Vec<double> p = set(0.0);
  double term[14];
  term[0] = 1;
  TW_UNROLL(16)
  for (int n = 1; n < 14; n++) term[n] = term[n - 1] * ln2 / n;
  TW_UNROLL(16)
  for (int n = 13; n > 0; n--) p = p * r + term[n];
  return p * r;
}

// 2^x for x up to the largest exponent; exactly 0 from the smallest one down (so for -inf); NaN for NaN.
template <int kDegree, class T>
TW_INLINE Vec<T> exp2(Vec<T> x, T) {
  using F = FloatFormat<T>;
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    // vscalefps underflows as it should, and takes 2^-inf to be 0.
    const __m512 whole = _mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec<T> power = exp2_minus_one<kDegree>(x - (Vec<T>)whole) + static_cast<T>(1);
    return (Vec<T>)_mm512_maskz_scalef_ps(0xffff, (__m512)power, whole);
  }
#endif
  x = vmax(set(static_cast<T>(-F::exponent_bias)), x);
  const Vec<T> shifted = x + F::round_magic;
  const Vec<T> r = x - (shifted - F::round_magic);
  const Vec<T> p = exp2_minus_one<kDegree>(r) + static_cast<T>(1);
  return (Vec<T>)((Vec<UInt<T>>)p + ((Vec<UInt<T>>)shifted << F::mantissa_bits));
}

// Natural logarithm of a positive normal number, by the series of atanh; NaN for NaN.
template <class T>
TW_INLINE Vec<T> log(Vec<T> x, T) {
  using F = FloatFormat<T>;
  using I = SInt<T>;
  using U = UInt<T>;
  const Vec<U> bits = (Vec<U>)x;
  const Vec<I> exponent = (Vec<I>)(bits - static_cast<U>(F::sqrt_half)) >> F::mantissa_bits;
  const Vec<T> m = (Vec<T>)(bits - ((Vec<U>)exponent << F::mantissa_bits));  // in [sqrt(1/2), sqrt(2))
  const Vec<T> s = (m - static_cast<T>(1)) / (m + static_cast<T>(1)), z = s * s;
  constexpr int terms = sizeof(T) == 4 ? 6 : 13;
  Vec<T> series = set(static_cast<T>(0));
  TW_UNROLL(16)
  for (int n = terms; n > 0; n--) series = series * z + static_cast<T>(1.0 / (2 * n + 1));
  const Vec<T> log_m = s * 2 + s * 2 * (series * z);
  const Vec<T> e = __builtin_convertvector(exponent, Vec<T>);
  const Vec<T> result = log_m + e * static_cast<T>(0.693147180559945309417);
  return x != x ? x : result;
}

// tanh(x) = -m / (m + 2) with m = exp(-2|x|) - 1: relative accuracy near zero, no overflow far out. `slope` gets
// the derivative 4 e / (1 + e)^2, e = exp(-2|x|), which 1 - tanh^2 would lose to cancellation.
template <class T>
TW_INLINE Vec<T> tanh(Vec<T> x, Vec<T>& slope, T) {
  using F = FloatFormat<T>;
  using I = SInt<T>;
  const Vec<I> sign = (Vec<I>)x & (static_cast<I>(1) << (8 * sizeof(T) - 1));
  const Vec<T> magnitude = (Vec<T>)((Vec<I>)x ^ sign);
  constexpr T two_log2e = static_cast<T>(2.88539008177792681472);
  const Vec<T> y = vmax(set(static_cast<T>(-100)), magnitude * -two_log2e);
  const Vec<T> shifted = y + F::round_magic;
  const Vec<T> r = y - (shifted - F::round_magic);
  using U = UInt<T>;
  const Vec<T> power = (Vec<T>)(static_cast<U>(F::one) + ((Vec<U>)shifted << F::mantissa_bits));
  const Vec<T> part = exp2_minus_one<6>(r) * power;
  const Vec<T> m = part + (power - static_cast<T>(1)), e = part + power;
  const Vec<T> whole = m + static_cast<T>(2);
  slope = static_cast<T>(4) * e / (whole * whole);
  const Vec<T> t = -m / whole;
  return x != x ? x : (Vec<T>)((Vec<I>)t ^ sign);
}

}  // namespace tilewise::TILEWISE_ISA
