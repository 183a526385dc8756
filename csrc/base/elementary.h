// Elementary functions on vectors: exp2 for the softmax, log for the logsumexp, tanh for the softcap.
#pragma once

#include "base/simd.h"

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

// 2^x for x below the largest exponent; NaN for NaN. Results below the normal range are 0 (in a session, on x86), so
// that of -inf is.
template <int kDegree, class T>
TW_INLINE Vec<T> exp2(Vec<T> x, T) {
  using F = FloatFormat<T>;
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    const Vec<T> part = (Vec<T>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vec<T>)_mm512_scalef_ps((__m512)(exp2_minus_one<kDegree>(part) + static_cast<T>(1)), (__m512)(x - part));
  }
#endif
  // 2^r times 2^k, by its bits; 0 for the smallest k.
  constexpr T magic = F::round_magic + static_cast<T>(F::exponent_bias);
  x = vmax(set(static_cast<T>(-F::exponent_bias)), x);
  const Vec<T> shifted = x + magic;
  const Vec<T> p = exp2_minus_one<kDegree>(x - (shifted - magic)) + static_cast<T>(1);
  return rounded(p * (Vec<T>)((Vec<UInt<T>>)shifted << F::mantissa_bits), T{});
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

TW_INLINE Vec<float> even_polynomial(const float (&c)[6], Vec<float> square) {
  Vec<float> p = set(c[5]);
  TW_UNROLL(5)
  for (int n = 4; n >= 0; n--) p = p * square + c[n];
  return p;
}
// tanh(x) = x * poly(x^2) near zero, where x^2 is below kTanhNear and a softcap has most of its scores: a minimax fit,
// good to 1.3e-8.
constexpr float kTanhNear = 0.47265625f;
constexpr float kTanhRatio[] = {
    1.0f, -3.333321132e-01f, 1.332961179e-01f, -5.359461318e-02f, 2.019105641e-02f, -5.232240961e-03f};
TW_INLINE Vec<float> tanh_near(Vec<float> x, Vec<float> square) { return x * even_polynomial(kTanhRatio, square); }
// Elsewhere (1 - e) / (1 + e) with e = exp(-2|x|). `slope` gets the derivative 4 e / (1 + e)^2, which 1 - tanh^2 would
// lose to cancellation.
TW_INLINE Vec<float> tanh_far(Vec<float> x, Vec<float>& slope) {
  const Vec<i32> sign = (Vec<i32>)x & INT32_MIN;
  const Vec<float> e = exp2<6>((Vec<float>)((Vec<i32>)x ^ sign) * -2.88539008177792681472f, float{});
  const Vec<float> whole = e + 1.0f;
  slope = 4.0f * e / (whole * whole);
  return (Vec<float>)((Vec<i32>)((1.0f - e) / whole) | sign);
}

// What a lane gets depends on its x alone; the time, on whether some lane is far from zero.
TW_INLINE Vec<float> tanh(Vec<float> x, Vec<float>& slope, float) {
  const Vec<float> square = x * x;
  Vec<float> t = tanh_near(x, square);
  slope = 1.0f - t * t;
  const u64 far = bits_not_below(square, kTanhNear);
  if (__builtin_expect(far != 0, 0)) {
    Vec<float> far_slope;
    t = select_bits<float>(far, tanh_far(x, far_slope), t);
    slope = select_bits<float>(far, far_slope, slope);
  }
  return t;
}
// With e = exp(-2|x|) and m = e - 1: -m / (m + 2) near zero, where it is accurate relative to its size; further out
// 1 - 2 e / (e + 1), where only the last step rounds a number near 1.
TW_INLINE Vec<double> tanh(Vec<double> x, Vec<double>& slope, double) {
  using F = FloatFormat<double>;
  const Vec<i64> sign = (Vec<i64>)x & INT64_MIN;
  const Vec<double> magnitude = (Vec<double>)((Vec<i64>)x ^ sign);
  const Vec<double> y = vmax(set(-100.0), magnitude * -2.88539008177792681472);
  const Vec<double> shifted = y + F::round_magic;
  const Vec<double> r = y - (shifted - F::round_magic);
  const Vec<double> power = (Vec<double>)(static_cast<u64>(F::one) + ((Vec<u64>)shifted << F::mantissa_bits));
  const Vec<double> part = exp2_minus_one<6>(r) * power;
  const Vec<double> m = part + (power - 1.0), e = part + power;
  const Vec<double> whole = m + 2.0;
  slope = 4.0 * e / (whole * whole);
  const Vec<double> t = magnitude < 0.8 ? -m / whole : 1.0 - (e + e) / whole;
  return x != x ? x : (Vec<double>)((Vec<i64>)t ^ sign);
}

// Of several vectors in place, with one branch for all.
template <int kV>
TW_INLINE void tanh_of_all(Vec<float> (&x)[kV]) {
  Vec<float> near[kV];
  u64 far[kV], some = 0;
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) {
    const Vec<float> square = x[v] * x[v];
    near[v] = tanh_near(x[v], square);
    some |= far[v] = bits_not_below(square, kTanhNear);
  }
  if (__builtin_expect(some != 0, 0)) {
    Vec<float> slope;
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) near[v] = select_bits<float>(far[v], tanh_far(x[v], slope), near[v]);
  }
  TW_UNROLL(4)
  for (int v = 0; v < kV; v++) x[v] = near[v];
}
template <int kV>
TW_INLINE void tanh_of_all(Vec<double> (&x)[kV]) {
  Vec<double> slope;
  for (int v = 0; v < kV; v++) x[v] = tanh(x[v], slope, double{});
}

// cap * tanh(scale * x / cap) of products x. Near zero it is x times a polynomial of (scale * x / cap)^2, whose
// coefficients have the scale in them: x is not scaled by itself, nor the result by the cap.
template <class T>
struct Softcap;
template <>
struct Softcap<float> {
  float ratio[6], part, cap, inverse;

  Softcap(double scale, double limit)
      : part(static_cast<float>(__builtin_fmin(__builtin_fmax(scale / limit, -3e38), 3e38))),
        cap(static_cast<float>(limit)),
        inverse(static_cast<float>(1 / limit)) {
    for (int n = 0; n < 6; n++) ratio[n] = static_cast<float>(kTanhRatio[n] * scale);
  }

  // Of several vectors in place, with one branch for all.
  template <int kV>
  [[gnu::always_inline]] void operator()(Vec<float> (&x)[kV]) const {
    Vec<float> z[kV], y[kV], most{};
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      y[v] = x[v] * part;
      const Vec<float> square = y[v] * y[v];
      z[v] = x[v] * even_polynomial(ratio, square);
      most = vmax(square, most);  // of NaN z is NaN
    }
    if (__builtin_expect(bits_not_below(most, kTanhNear) != 0, 0)) {
      Vec<float> slope;
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++)
        z[v] = select_bits<float>(bits_not_below(y[v] * y[v], kTanhNear), tanh_far(y[v], slope) * cap, z[v]);
    }
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) x[v] = rounded(z[v], float{});
  }
  // The same to the bit, with the derivative by scale * x.
  [[gnu::always_inline]] Vec<float> with_slope(Vec<float> x, Vec<float>& slope) const {
    const Vec<float> y = x * part, square = y * y;
    Vec<float> z = x * even_polynomial(ratio, square);
    const Vec<float> t = z * inverse;
    slope = 1.0f - t * t;
    const u64 far = bits_not_below(square, kTanhNear);
    if (__builtin_expect(far != 0, 0)) {
      Vec<float> far_slope;
      z = select_bits<float>(far, tanh_far(y, far_slope) * cap, z);
      slope = select_bits<float>(far, far_slope, slope);
    }
    return z;
  }
};
template <>
struct Softcap<double> {
  double scale, cap, inverse;
  Softcap(double factor, double limit) : scale(factor), cap(limit), inverse(1 / limit) {}
  template <int kV>
  [[gnu::always_inline]] void operator()(Vec<double> (&x)[kV]) const {
    Vec<double> slope;
    for (int v = 0; v < kV; v++) x[v] = with_slope(x[v], slope);
  }
  [[gnu::always_inline]] Vec<double> with_slope(Vec<double> x, Vec<double>& slope) const {
    return tanh(rounded(x * scale, double{}) * inverse, slope, double{}) * cap;
  }
};

}  // namespace tilewise::TILEWISE_ISA
