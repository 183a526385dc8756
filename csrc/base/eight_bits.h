// Numbers in 8 bits, of rows that each have a scale. Every one of them is exact in every wider type.
#pragma once

#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

using u8 = std::uint8_t;
typedef std::int8_t Vec8 __attribute__((vector_size(kVectorBytes / 4)));

TW_INLINE Vec8 load8(const u8* p, i64 count) {
  Vec8 v{};
  if (count >= kLanes<float>) {
    std::memcpy(&v, p, sizeof v);
  } else if (count > 0) {
#if TILEWISE_VECTOR_BYTES == 64
    v = (Vec8)_mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), p);
#else
    std::memcpy(&v, p, static_cast<std::size_t>(count));
#endif
  }
  return v;
}

// Not by __builtin_convertvector: GCC 12 does that number by number.
TW_INLINE Vec<i32> extended(Vec8 x) {
#if TILEWISE_VECTOR_BYTES == 64
  return (Vec<i32>)_mm512_cvtepi8_epi32((__m128i)x);
#elif TILEWISE_VECTOR_BYTES == 32
  i64 bytes;
  std::memcpy(&bytes, &x, sizeof bytes);
  return (Vec<i32>)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes));
#else
  return __builtin_convertvector(x, Vec<i32>);
#endif
}

template <Stored kStored>
TW_INLINE Vec<float> number_of(Vec8 x) {
  if constexpr (kStored == Stored::int8) {
    return __builtin_convertvector(extended(x), Vec<float>);
  } else {
    // The bits of e4m3 are those of a float16 that is 256 times smaller, but for its NaN.
    const Vec<i32> bits = extended(x), nan = ((bits & 0x7f) == 0x7f) & 0x7e00;
    return widen_half(__builtin_convertvector((Vec<u32>)(((bits << 7) & 0xbf80) | nan), Vec16)) * 256.0f;
  }
}

// The codes of two vectors of numbers.
#if TILEWISE_VECTOR_BYTES == 64
using Codes = __m256i;
TW_INLINE Codes first_codes(const u8* p, i64 count) {
  if (count >= 32) return _mm256_loadu_si256(reinterpret_cast<const Codes*>(p));
  return _mm256_maskz_loadu_epi8(count <= 0 ? 0 : (1u << count) - 1, p);
}
#elif TILEWISE_VECTOR_BYTES == 32
using Codes = __m128i;
TW_INLINE Codes first_codes(const u8* p, i64 count) {
  Codes x{};
  if (count >= 16)
    std::memcpy(&x, p, 16);
  else if (count > 0)
    std::memcpy(&x, p, static_cast<std::size_t>(count));
  return x;
}
#endif

// Two vectors of e4m3 at once: half of what they cost one by one, for the float16 are made in words.
#if TILEWISE_VECTOR_BYTES == 64
TW_INLINE void e4m3_pair(Codes x, Vec<float>* to) {
  const __m512i bits = _mm512_cvtepi8_epi16(x), seven = _mm512_set1_epi16(0x7f);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, seven), seven);
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(bits, 7), _mm512_set1_epi16(-0x4080));
  const __m512i half = _mm512_mask_mov_epi16(shifted, nan, _mm512_set1_epi16(0x7e00));
  to[0] = (Vec<float>)_mm512_cvtph_ps(_mm512_castsi512_si256(half)) * 256.0f;
  to[1] = (Vec<float>)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)) * 256.0f;
}
#elif TILEWISE_VECTOR_BYTES == 32
TW_INLINE void e4m3_pair(Codes x, Vec<float>* to) {
  const __m256i bits = _mm256_cvtepi8_epi16(x), seven = _mm256_set1_epi16(0x7f);
  const __m256i nan =
      _mm256_and_si256(_mm256_cmpeq_epi16(_mm256_and_si256(bits, seven), seven), _mm256_set1_epi16(0x7e00));
  const __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(-0x4080)), nan);
  to[0] = (Vec<float>)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * 256.0f;
  to[1] = (Vec<float>)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * 256.0f;
}
#endif

// A row times its scale, rounded.
template <class E, class C>
TW_NOINLINE static void widen_scaled(Stored stored, const u8* from, C scale, int width, E* to) {
  constexpr int lanes = kLanes<float>;
  for (int d = 0; d < width; d += lanes) {
    const Vec8 bytes = load8(from + d, width - d);
    const Vec<float> x = stored == Stored::int8 ? number_of<Stored::int8>(bytes) : number_of<Stored::e4m3>(bytes);
    if constexpr (std::is_same_v<C, double>)
      for (int i = 0; i < lanes && d + i < width; i++) to[d + i] = x[i] * scale;
    else
      narrow(to + d, width - d, x * scale);
  }
}

// The scales of the rows n0 .. n1 - 1.
template <class C>
static void row_scales(const Problem& p, const View& scales, const Sequence& seq, i64 kv_head, i64 n0, i64 n1, C* to) {
  while (n0 < n1) {
    const KeyRun run = key_run(p, scales, seq, kv_head, n0, n1);
    const float* from = static_cast<const float*>(scales.data) + run.at;
    n0 += run.count;
    for (C* const end = to + run.count; to < end; from += scales.row) *to++ = *from;
  }
}

}  // namespace tilewise::TILEWISE_ISA
