// Functions of expressions on vectors, good to about two units of the last place, with special values as in torch.
// What is rare (pow, remainders, sin and cos of large numbers) is taken from the C library, lane by lane.
#pragma once

#include "base/elementary.h"

namespace tilewise::TILEWISE_ISA {

template <class T>
constexpr u64 kAllLanes = (u64{1} << kLanes<T>)-1;

template <class C, class F>
TW_INLINE Vec<C> each_lane(Vec<C> x, const F& f) {
  TW_UNROLL(16)
  for (int i = 0; i < kLanes<C>; i++) x[i] = f(x[i]);
  return x;
}
template <class C, class F>
TW_INLINE Vec<C> each_lane(Vec<C> x, Vec<C> y, const F& f) {
  for (int i = 0; i < kLanes<C>; i++) x[i] = f(x[i], y[i]);
  return x;
}

// ---- rounding and square roots

enum class Toward { nearest, down, up, zero };
template <Toward kWay>
TW_INLINE Vec<float> round_to(Vec<float> x, float) {
  [[maybe_unused]] constexpr int way = static_cast<int>(kWay) | 8;  // 8: no exceptions
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_roundscale_ps((__m512)x, way);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_round_ps((__m256)x, way);
#else
  if constexpr (kWay == Toward::nearest) return each_lane<float>(x, [](float y) { return __builtin_rintf(y); });
  if constexpr (kWay == Toward::down) return each_lane<float>(x, [](float y) { return __builtin_floorf(y); });
  if constexpr (kWay == Toward::up) return each_lane<float>(x, [](float y) { return __builtin_ceilf(y); });
  return each_lane<float>(x, [](float y) { return __builtin_truncf(y); });
#endif
}
template <Toward kWay>
TW_INLINE Vec<double> round_to(Vec<double> x, double) {
  [[maybe_unused]] constexpr int way = static_cast<int>(kWay) | 8;
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<double>)_mm512_roundscale_pd((__m512d)x, way);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<double>)_mm256_round_pd((__m256d)x, way);
#else
  if constexpr (kWay == Toward::nearest) return each_lane<double>(x, [](double y) { return __builtin_rint(y); });
  if constexpr (kWay == Toward::down) return each_lane<double>(x, [](double y) { return __builtin_floor(y); });
  if constexpr (kWay == Toward::up) return each_lane<double>(x, [](double y) { return __builtin_ceil(y); });
  return each_lane<double>(x, [](double y) { return __builtin_trunc(y); });
#endif
}

TW_INLINE Vec<float> square_root(Vec<float> x) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_sqrt_ps((__m512)x);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_sqrt_ps((__m256)x);
#else
  return each_lane<float>(x, [](float y) { return __builtin_sqrtf(y); });
#endif
}
TW_INLINE Vec<double> square_root(Vec<double> x) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<double>)_mm512_sqrt_pd((__m512d)x);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<double>)_mm256_sqrt_pd((__m256d)x);
#else
  return each_lane<double>(x, [](double y) { return __builtin_sqrt(y); });
#endif
}

// ---- minima, maxima, signs

template <class C>
TW_INLINE Vec<C> least(Vec<C> a, Vec<C> b, C) {
  const Vec<C> r = a < b ? a : b;
  return a != a ? a : r;
}
template <class C>
TW_INLINE Vec<C> largest(Vec<C> a, Vec<C> b, C) {
  const Vec<C> r = a > b ? a : b;
  return a != a ? a : r;
}
template <class C>
constexpr SInt<C> kSignBit = static_cast<SInt<C>>(UInt<C>{1} << (8 * sizeof(C) - 1));
template <class C>
TW_INLINE Vec<C> opposite(Vec<C> x, C) {
  return (Vec<C>)((Vec<SInt<C>>)x ^ kSignBit<C>);
}
template <class C>
TW_INLINE Vec<C> sign_of(Vec<C> x, C) {
  const Vec<C> one = set(static_cast<C>(1)), none{};
  return (x > none ? one : none) - (x < none ? one : none);
}

// ---- exponentials

// p * 2^k for whole numbers k (as floats) of up to twice the exponents there are: in two steps, so that results below
// the normal numbers come out too where there is no session.
template <class C>
TW_INLINE Vec<C> times_power(Vec<C> p, Vec<C> k, C) {
  using F = FloatFormat<C>;
  using U = UInt<C>;
  // The magic number leaves whole numbers in the low bits, with the exponent's bias added.
  const Vec<C> half = round_to<Toward::down>(k * static_cast<C>(0.5), C{}), rest = k - half;
  const C magic = F::round_magic + static_cast<C>(F::exponent_bias);
  const Vec<C> first = (Vec<C>)((Vec<U>)(half + magic) << F::mantissa_bits);
  const Vec<C> second = (Vec<C>)((Vec<U>)(rest + magic) << F::mantissa_bits);
  return rounded(p * first, C{}) * second;
}

template <class C>
struct ExpLimits;  // beyond them exp2 is 0 or infinite
template <>
struct ExpLimits<float> {
  static constexpr float low = -152, high = 130, ln2_high = 0.693145751953125f, ln2_low = 1.428606765330187045e-6f;
};
template <>
struct ExpLimits<double> {
  static constexpr double low = -1077, high = 1026, ln2_high = 6.93147180369123816490e-01,
                          ln2_low = 1.90821492927058770002e-10;
};

template <class C>
TW_INLINE Vec<C> exp2_full(Vec<C> x, C) {
  using L = ExpLimits<C>;
  // Of a > b ? a : b the second survives where it is NaN.
  const Vec<C> low = set(L::low), high = set(L::high);
  x = low > x ? low : x;
  x = high < x ? high : x;
  const Vec<C> k = round_to<Toward::nearest>(x, C{});
  const Vec<C> p = exp2_minus_one<6>(x - k) + static_cast<C>(1);
  const Vec<C> r = times_power(p, k, C{});
  return x != x ? x : r;
}

template <class C>
TW_INLINE Vec<C> exp_full(Vec<C> x, C) {
  using L = ExpLimits<C>;
  constexpr C log2e = static_cast<C>(1.44269504088896340736);
  const Vec<C> low = set(L::low * static_cast<C>(0.7)), high = set(L::high * static_cast<C>(0.7));
  x = low > x ? low : x;
  x = high < x ? high : x;
  const Vec<C> k = round_to<Toward::nearest>(x * log2e, C{});
  const Vec<C> r = (x - k * L::ln2_high) - k * L::ln2_low;
  const Vec<C> p = exp2_minus_one<6>(r * log2e) + static_cast<C>(1);
  const Vec<C> e = times_power(p, k, C{});
  return x != x ? x : e;
}

template <class C>
TW_INLINE Vec<C> sigmoid(Vec<C> x, C) {
  return static_cast<C>(1) / (static_cast<C>(1) + exp_full(opposite(x, C{}), C{}));
}

template <class C>
TW_INLINE Vec<C> tanh_of(Vec<C> x, C) {
  Vec<C> slope;
  return tanh(x, slope, C{});
}

// ---- logarithms

// x = 2^k * (1 + f), 1 + f from sqrt(1/2) to sqrt(2); log(1 + f) = f - (half_square - rest), half_square = f^2 / 2
// (after fdlibm's e_log.c).
template <class C>
TW_INLINE void split_log(Vec<C> x, Vec<C>& k, Vec<C>& f, Vec<C>& rest, Vec<C>& half_square) {
  using F = FloatFormat<C>;
  using I = SInt<C>;
  using U = UInt<C>;
  // Below the normal numbers: made larger first.
  constexpr C tiny = static_cast<C>(sizeof(C) == 4 ? 1.17549435e-38 : 2.2250738585072014e-308);
  constexpr C larger = static_cast<C>(sizeof(C) == 4 ? 16777216.0 : 18014398509481984.0);
  const Vec<I> small = x < tiny;
  x = small ? x * larger : x;
  const Vec<C> zero{};
  const Vec<C> off = small ? set(static_cast<C>(sizeof(C) == 4 ? 24 : 54)) : zero;
  const Vec<U> bits = (Vec<U>)x;
  const Vec<I> exponent = (Vec<I>)(bits - static_cast<U>(F::sqrt_half)) >> F::mantissa_bits;
  f = (Vec<C>)(bits - ((Vec<U>)exponent << F::mantissa_bits)) - static_cast<C>(1);
  k = __builtin_convertvector(exponent, Vec<C>) - off;
  const Vec<C> s = f / (f + static_cast<C>(2)), z = s * s;
  constexpr int terms = sizeof(C) == 4 ? 6 : 13;
  Vec<C> series = set(static_cast<C>(0));
  TW_UNROLL(16)
  for (int n = terms; n > 0; n--) series = series * z + static_cast<C>(2.0 / (2 * n + 1));
  half_square = f * f * static_cast<C>(0.5);
  rest = s * (half_square + series * z);
}
template <class C>
TW_INLINE Vec<C> log_specials(Vec<C> x, Vec<C> result) {
  const C infinity = static_cast<C>(__builtin_inf());
  result = x == infinity ? x : result;
  result = x == 0 ? set(-infinity) : result;
  result = x < 0 ? set(static_cast<C>(__builtin_nan(""))) : result;
  return x != x ? x : result;
}
template <class C>
TW_INLINE Vec<C> log_full(Vec<C> x, C) {
  using L = ExpLimits<C>;
  Vec<C> k, f, rest, half_square;
  split_log<C>(x, k, f, rest, half_square);
  return log_specials<C>(x, k * L::ln2_high - ((half_square - (rest + k * L::ln2_low)) - f));
}
template <class C>
TW_INLINE Vec<C> log2_full(Vec<C> x, C) {
  constexpr C log2e = static_cast<C>(1.44269504088896340736);
  Vec<C> k, f, rest, half_square;
  split_log<C>(x, k, f, rest, half_square);
  return log_specials<C>(x, k + (f - (half_square - rest)) * log2e);
}

// ---- circles

// sin (or cos) by the remainder of pi / 2, which is taken off in double in three parts (fdlibm's e_rem_pio2.c).
TW_INLINE void quarter(Vec<double> x, Vec<double>& r, Vec<double>& k) {
  k = round_to<Toward::nearest>(x * 6.36619772367581382433e-01, double{});
  r = ((x - k * 1.57079632673412561417e+00) - k * 6.07710050630396597660e-11) - k * 2.02226624879595063154e-21;
}
template <bool kCosine>
TW_INLINE Vec<double> circle(Vec<double> r, Vec<double> k) {
  const Vec<double> z = r * r;
  Vec<double> s = set(1.58969099521155010221e-10);
  s = s * z - 2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z - 1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z - 1.66666666666666324348e-01;
  s = r + r * z * s;
  Vec<double> c = set(-1.13596475577881948265e-11);
  c = c * z + 2.08757232129817482790e-09;
  c = c * z - 2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z - 1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  const Vec<double> half = z * 0.5, w = 1.0 - half;
  c = w + (((1.0 - w) - half) + z * z * c);
  // k modulo 4 says which of the two, and its sign; cos(x) is sin one quarter on.
  const Vec<double> turn = kCosine ? k + 1.0 : k;
  const Vec<double> pair = round_to<Toward::down>(turn * 0.5, double{});
  const Vec<double> value = turn - pair * 2.0 != 0 ? c : s;
  const Vec<i64> flip = pair - round_to<Toward::down>(pair * 0.5, double{}) * 2.0 != 0;
  return flip ? opposite(value, double{}) : value;
}
template <bool kCosine>
TW_INLINE Vec<double> circle_of(Vec<double> x) {
  Vec<double> r, k;
  quarter(x, r, k);
  return circle<kCosine>(r, k);
}

typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));
typedef i32 HalfInts __attribute__((vector_size(kVectorBytes / 2)));

TW_INLINE Vec<double> widened(const float* p) {
  HalfFloats half;
  std::memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, Vec<double>);
}

template <bool kCosine>
TW_INLINE Vec<double> sin_or_cos(Vec<double> x) {
  if (bits_of_mask<i64>(magnitude(x, double{}) < 1e5) == kAllLanes<double>) return circle_of<kCosine>(x);
  return each_lane<double>(x, [](double y) { return kCosine ? __builtin_cos(y) : __builtin_sin(y); });
}
template <bool kCosine>
TW_INLINE Vec<float> sin_or_cos(Vec<float> x) {
  if (bits_of_mask<i32>(magnitude(x, float{}) < 1e5f) != kAllLanes<float>)
    return each_lane<float>(x, [](float y) { return kCosine ? __builtin_cosf(y) : __builtin_sinf(y); });
  const float* p = reinterpret_cast<const float*>(&x);
  constexpr int half = kLanes<float> / 2;
  const HalfFloats low = __builtin_convertvector(circle_of<kCosine>(widened(p)), HalfFloats);
  const HalfFloats high = __builtin_convertvector(circle_of<kCosine>(widened(p + half)), HalfFloats);
  Vec<float> r;
  std::memcpy(&r, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&r) + sizeof low, &high, sizeof high);
  return r;
}

// ---- lane by lane, as torch does it

TW_INLINE float remainder_of(float a, float b) {
  const float r = __builtin_fmodf(a, b);
  return r != 0 && (b < 0) != (r < 0) ? r + b : r;
}
TW_INLINE double remainder_of(double a, double b) {
  const double r = __builtin_fmod(a, b);
  return r != 0 && (b < 0) != (r < 0) ? r + b : r;
}
template <class C>
TW_INLINE C floor_divided(C a, C b) {
  if (b == 0) return a / b;
  const C r = static_cast<C>(sizeof(C) == 4 ? __builtin_fmodf(static_cast<float>(a), static_cast<float>(b))
                                            : __builtin_fmod(static_cast<double>(a), static_cast<double>(b)));
  C q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1;
  if (q == 0) return static_cast<C>(__builtin_copysign(0.0, static_cast<double>(a / b)));
  const C whole = static_cast<C>(__builtin_floor(static_cast<double>(q)));
  return q - whole > static_cast<C>(0.5) ? whole + 1 : whole;
}
TW_INLINE float power_of(float a, float b) { return __builtin_powf(a, b); }
TW_INLINE double power_of(double a, double b) { return __builtin_pow(a, b); }

}  // namespace tilewise::TILEWISE_ISA
