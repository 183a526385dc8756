// Vectors of one instruction set, through compiler vector extensions; intrinsics only where those are slow.
// Included once per instruction set, which defines TILEWISE_ISA (a namespace) and TILEWISE_VECTOR_BYTES.
// Nothing here may come from a standard-library template: the linker would keep one instance for all
// instruction sets, perhaps one that this machine cannot run.
#pragma once

#include <cstring>
#include <utility>

#include "base/args.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of "uninitialized" operands inside its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(TILEWISE_X86)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif
// Whether an instruction multiplies bfloat16 in pairs and adds both products to a float.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TW_PAIRS 1
#endif

#define TW_INLINE static inline __attribute__((always_inline))
#define TW_NOINLINE __attribute__((noinline))
#define TW_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TW_UNROLL(n) TW_PRAGMA(unroll n)
#else
#define TW_UNROLL(n) TW_PRAGMA(GCC unroll n)
#endif

namespace tilewise::TILEWISE_ISA {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;

constexpr int kVectorBytes = TILEWISE_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T loose __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The integer types as wide as a computing type.
template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using sint = i32;
  using uint = u32;
};
template <>
struct IntOf<double> {
  using sint = i64;
  using uint = u64;
};
template <class T>
using SInt = typename IntOf<T>::sint;
template <class T>
using UInt = typename IntOf<T>::uint;  // where the sum may wrap, as it does for NaN

struct Bf16 {
  u16 bits;
};
struct Half {
  u16 bits;
};

TW_INLINE i64 min(i64 a, i64 b) { return a < b ? a : b; }
TW_INLINE i64 max(i64 a, i64 b) { return a > b ? a : b; }
TW_INLINE i64 round_up(i64 a, i64 b) { return (a + b - 1) / b * b; }

template <class T>
TW_INLINE Vec<T> set(T x) {
  return x - Vec<T>{};
}
template <class T>
TW_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::loose*>(p);
}
template <class T>
TW_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T>::loose*>(p) = v;
}

// a * b + c with one rounding where the instruction set has it, also when the compiler is told not to optimise.
TW_INLINE Vec<float> fused(Vec<float> a, Vec<float> b, Vec<float> c) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
TW_INLINE Vec<double> fused(Vec<double> a, Vec<double> b, Vec<double> c) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// a > b ? a : b, so that a NaN in `a` is dropped and one in `b` is kept.
TW_INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
TW_INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return a > b ? a : b; }

template <class T>
TW_INLINE Vec<T> magnitude(Vec<T> x, T) {
  return (Vec<T>)((Vec<UInt<T>>)x & ~UInt<T>{0} >> 1);
}

// Keeps the compiler from fusing a product into a later sum: x is rounded here.
template <class T>
TW_INLINE Vec<T> rounded(Vec<T> x, T) {
#if defined(TILEWISE_X86) && TILEWISE_VECTOR_BYTES == 64
  __asm__("" : "+v"(x));
#elif defined(TILEWISE_X86)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

template <class T>
TW_INLINE Vec<T> lane_numbers() {
  Vec<T> v;
  TW_UNROLL(16)
  for (int i = 0; i < kLanes<T>; i++) v[i] = static_cast<T>(i);
  return v;
}

// All ones in the lanes whose bit is set.
template <class T>
TW_INLINE Vec<SInt<T>> lanes_from_bits(u64 bits) {
  using I = SInt<T>;
  Vec<I> lane = set<I>(1) << lane_numbers<I>();
  return (set<I>(static_cast<I>(bits)) & lane) != 0;
}
template <class T>
TW_INLINE Vec<T> keep_where(u64 bits, Vec<T> v) {
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)v);
#endif
  return lanes_from_bits<T>(bits) ? v : Vec<T>{};
}
template <class T>
TW_INLINE Vec<T> select_bits(u64 bits, Vec<T> yes, Vec<T> no) {
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_mask_blend_ps(static_cast<__mmask16>(bits), (__m512)no, (__m512)yes);
#endif
  return lanes_from_bits<T>(bits) ? yes : no;
}

// One bit per lane of a mask (all ones or zeros) of integers I.
template <class I>
TW_INLINE u64 bits_of_mask(Vec<I> mask) {
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(I) == 4) return _mm512_movepi32_mask((__m512i)mask);
  return _mm512_movepi64_mask((__m512i)mask);
#elif TILEWISE_VECTOR_BYTES == 32
  if constexpr (sizeof(I) == 4) return static_cast<u32>(_mm256_movemask_ps((__m256)mask));
  return static_cast<u32>(_mm256_movemask_pd((__m256d)mask));
#elif defined(TILEWISE_X86)
  if constexpr (sizeof(I) == 4) return static_cast<u32>(_mm_movemask_ps((__m128)mask));
  return static_cast<u32>(_mm_movemask_pd((__m128d)mask));
#else
  u64 bits = 0;
  for (int i = 0; i < kLanes<I>; i++) bits |= u64{mask[i] != 0} << i;
  return bits;
#endif
}
// One bit per lane: not below the bound, so of NaN too.
TW_INLINE u64 bits_not_below(Vec<float> x, float bound) {
#if TILEWISE_VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_NLT_UQ);
#else
  return bits_of_mask<i32>(~(x < set(bound)));
#endif
}

// The first `count` elements, zeros behind them; never reads past them.
template <class T>
TW_INLINE Vec<T> load_first(const T* p, i64 count) {
  if (count >= kLanes<T>) return load(p);
  Vec<T> v{};
  if (count <= 0) return v;
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
#endif
  std::memcpy(&v, p, static_cast<std::size_t>(count) * sizeof(T));
  return v;
}
template <class T>
TW_INLINE void store_first(T* p, i64 count, Vec<T> v) {
  if (count >= kLanes<T>) {
    store(p, v);
  } else if (count > 0) {
    std::memcpy(p, &v, static_cast<std::size_t>(count) * sizeof(T));
  }
}

// ---- storage types to and from the computing type

typedef u16 Vec16 __attribute__((vector_size(kVectorBytes / 2)));

TW_INLINE Vec16 load16(const u16* p, i64 count) {
  Vec16 v{};
  if (count >= kLanes<float>) {
    std::memcpy(&v, p, sizeof v);
  } else if (count > 0) {
#if TILEWISE_VECTOR_BYTES == 64
    v = (Vec16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
#else
    std::memcpy(&v, p, static_cast<std::size_t>(count) * 2);
#endif
  }
  return v;
}
TW_INLINE void store16(u16* p, i64 count, Vec16 v) {
  if (count >= kLanes<float>) {
    std::memcpy(p, &v, sizeof v);
  } else if (count > 0) {
    std::memcpy(p, &v, static_cast<std::size_t>(count) * 2);
  }
}

TW_INLINE Vec<float> widen(const float* p, i64 count) { return load_first(p, count); }
TW_INLINE Vec<double> widen(const double* p, i64 count) { return load_first(p, count); }
TW_INLINE Vec<float> widen(const Bf16* p, i64 count) {
  return (Vec<float>)(__builtin_convertvector(load16(&p->bits, count), Vec<u32>) << 16);
}
TW_INLINE Vec<float> widen_half(Vec16 h) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif TILEWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_cvtph_ps((__m128i)h);
#else
  Vec<u32> x = __builtin_convertvector(h, Vec<u32>);
  Vec<float> magnitude = (Vec<float>)((x & 0x7fff) << 13) * 0x1p112f;
  Vec<u32> special = (Vec<u32>)((x & 0x7c00) == 0x7c00) & 0x7f800000u;
  return (Vec<float>)((Vec<u32>)magnitude | special | ((x & 0x8000) << 16));
#endif
}
TW_INLINE Vec<float> widen(const Half* p, i64 count) { return widen_half(load16(&p->bits, count)); }

TW_INLINE void narrow(float* p, i64 count, Vec<float> v) { store_first(p, count, v); }
TW_INLINE void narrow(double* p, i64 count, Vec<double> v) { store_first(p, count, v); }
TW_INLINE void narrow(Bf16* p, i64 count, Vec<float> v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  store16(&p->bits, count, (Vec16)vcvt_bf16_f32((float32x4_t)v));
#else
  Vec<u32> x = (Vec<u32>)v;
  Vec<u32> rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  Vec<u32> quiet = (x >> 16) | 0x40;
  store16(&p->bits, count, __builtin_convertvector((Vec<u32>)(v != v ? quiet : rounded), Vec16));
#endif
}
#if TILEWISE_VECTOR_BYTES == 16
// Round to nearest even: below the normal range by adding the magic number that aligns the last kept bit.
TW_INLINE u16 half_bits(float value) {
  u32 x;
  std::memcpy(&x, &value, 4);
  const u32 sign = (x >> 16) & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return static_cast<u16>(sign | 0x7e00);
  if (x >= 0x477ff000) return static_cast<u16>(sign | 0x7c00);
  if (x < 0x38800000) {
    float magnitude;
    std::memcpy(&magnitude, &x, 4);
    magnitude += 0.5f;
    u32 y;
    std::memcpy(&y, &magnitude, 4);
    return static_cast<u16>(sign | (y - 0x3f000000));
  }
  return static_cast<u16>(sign | ((x + 0xfff + ((x >> 13) & 1) - 0x38000000) >> 13));
}
#endif
TW_INLINE void narrow(Half* p, i64 count, Vec<float> v) {
#if TILEWISE_VECTOR_BYTES == 64
  store16(&p->bits, count, (Vec16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif TILEWISE_VECTOR_BYTES == 32
  store16(&p->bits, count, (Vec16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (i64 i = 0; i < count && i < kLanes<float>; i++) p[i].bits = half_bits(v[i]);
#endif
}

TW_INLINE float widen_one(const float* p) { return *p; }
TW_INLINE double widen_one(const double* p) { return *p; }
TW_INLINE float widen_one(const Bf16* p) { return widen(p, 1)[0]; }
TW_INLINE float widen_one(const Half* p) { return widen(p, 1)[0]; }

// ---- transposition of kLanes x kLanes words held in registers

template <int kStep, bool kHigh, class V, int... I>
TW_INLINE V exchange(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  if constexpr (kHigh)
    return __builtin_shufflevector(a, b, ((I & kStep) ? n + I : I + kStep)...);
  else
    return __builtin_shufflevector(a, b, ((I & kStep) ? n + I - kStep : I)...);
}
template <class T, int kStep = 1>
TW_INLINE void transpose(Vec<T>* r) {
  constexpr int n = kLanes<T>;
  if constexpr (kStep < n) {
    using Order = std::make_integer_sequence<int, n>;
    TW_UNROLL(16)
    for (int i = 0; i < n; i++) {
      if (i & kStep) continue;
      Vec<T> a = r[i], b = r[i + kStep];
      r[i] = exchange<kStep, false>(a, b, Order{});
      r[i + kStep] = exchange<kStep, true>(a, b, Order{});
    }
    transpose<T, kStep * 2>(r);
  }
}

// ---- 32 x 32 -> 64 bit products, for the random numbers

TW_INLINE void multiply_wide(Vec<u32> a, u32 b, Vec<u32>& high, Vec<u32>& low) {
#if TILEWISE_VECTOR_BYTES == 64
  const __m512i x = (__m512i)a, y = _mm512_set1_epi32(static_cast<int>(b));
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  high = (Vec<u32>)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = (Vec<u32>)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif TILEWISE_VECTOR_BYTES == 32
  const __m256i x = (__m256i)a, y = _mm256_set1_epi32(static_cast<int>(b));
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  high = (Vec<u32>)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = (Vec<u32>)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  TW_UNROLL(4)
  for (int i = 0; i < kLanes<u32>; i++) {
    const u64 product = u64{a[i]} * b;
    high[i] = static_cast<u32>(product >> 32);
    low[i] = static_cast<u32>(product);
  }
#endif
}

// One bit per lane: a >= bound.
TW_INLINE u64 bits_at_least(Vec<u32> a, u32 bound) {
#if TILEWISE_VECTOR_BYTES == 64
  return _mm512_cmpge_epu32_mask((__m512i)a, _mm512_set1_epi32(static_cast<int>(bound)));
#elif TILEWISE_VECTOR_BYTES == 32
  const Vec<i32> yes = a >= set<u32>(bound);
  return static_cast<u32>(_mm256_movemask_ps((__m256)yes));
#else
  u64 bits = 0;
  for (int i = 0; i < kLanes<u32>; i++) bits |= u64{a[i] >= bound} << i;
  return bits;
#endif
}

}  // namespace tilewise::TILEWISE_ISA
