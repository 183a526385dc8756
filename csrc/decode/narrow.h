// Rows in 8 bits as rows of a wider type, without their scales.
#pragma once

#include "base/eight_bits.h"
#if defined(TILEWISE_X86)
#include "base/processor.h"
#endif

namespace tilewise::TILEWISE_ISA {

// Numbers that the narrower type holds exactly.
TW_INLINE void store_exact(float* p, i64 count, Vec<float> x) { store_first(p, count, x); }
TW_INLINE void store_exact(double* p, i64 count, Vec<float> x) {
  for (i64 i = 0; i < count && i < kLanes<float>; i++) p[i] = x[i];
}
TW_INLINE void store_exact(Half* p, i64 count, Vec<float> x) { narrow(p, count, x); }
TW_INLINE void store_exact(Bf16* p, i64 count, Vec<float> x) {
  store16(&p->bits, count, __builtin_convertvector((Vec<u32>)x >> 16, Vec16));
}

template <Stored kStored, class E>
TW_INLINE void widen_row(const u8* from, int width, E* to) {
  constexpr int lanes = kLanes<float>;
  int d = 0;
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(E) == 2 && !std::is_same_v<E, Half>) {
    alignas(64) static constexpr u16 upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    for (; d + 2 * lanes <= width; d += 2 * lanes) {
      const __m512i a = (__m512i)number_of<kStored>(load8(from + d, lanes));
      const __m512i b = (__m512i)number_of<kStored>(load8(from + d + lanes, lanes));
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, _mm512_load_si512(upper), b));
    }
  }
#endif
  for (; d < width; d += lanes) store_exact(to + d, width - d, number_of<kStored>(load8(from + d, width - d)));
}

#if TILEWISE_VECTOR_BYTES == 64
// The bfloat16 of each e4m3 number without a sign, byte by byte.
struct E4m3Bytes {
  alignas(64) u8 low[128] = {}, high[128] = {};
  constexpr E4m3Bytes() {
    for (u32 code = 0; code < 128; code++) {
      u32 exponent = code >> 3, fraction = code & 7;
      if (exponent == 0 && fraction != 0) {  // below the normal range there, in it here
        for (exponent = 1; (fraction & 8) == 0; exponent--) fraction <<= 1;
        fraction &= 7;
      }
      const u32 bits = code == 0 ? 0 : code == 127 ? 0x7fc0 : (exponent + 120) << 7 | fraction << 4;
      low[code] = static_cast<u8>(bits), high[code] = static_cast<u8>(bits >> 8);
    }
  }
};

// By tables of bytes, half of the instructions that number_of takes.
__attribute__((target("avx512vbmi"))) TW_NOINLINE static void widen_e4m3_by_tables(const u8* const* rows, int count,
                                                                                   int width, Bf16* to) {
  alignas(64) static constexpr E4m3Bytes bytes;
  alignas(64) static constexpr i64 order[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // so that what is unpacked is in order
  const __m512i low[2] = {_mm512_load_si512(bytes.low), _mm512_load_si512(bytes.low + 64)};
  const __m512i high[2] = {_mm512_load_si512(bytes.high), _mm512_load_si512(bytes.high + 64)};
  const __m512i places = _mm512_load_si512(order), sign = _mm512_set1_epi8(-128);
  for (int j = 0; j < count; j++, to += width) {
    for (int d = 0; d < width; d += 64) {
      const u64 some = width - d >= 64 ? ~u64{0} : (u64{1} << (width - d)) - 1;
      const __m512i x = _mm512_permutexvar_epi64(places, _mm512_maskz_loadu_epi8(some, rows[j] + d));
      const __m512i a = _mm512_permutex2var_epi8(low[0], x, low[1]);
      const __m512i h = _mm512_permutex2var_epi8(high[0], x, high[1]);
      const __m512i b = _mm512_ternarylogic_epi64(h, x, sign, 0xf8);  // h | (x & sign)
      _mm512_mask_storeu_epi16(to + d, static_cast<__mmask32>(some), _mm512_unpacklo_epi8(a, b));
      _mm512_mask_storeu_epi16(to + d + 32, static_cast<__mmask32>(some >> 32), _mm512_unpackhi_epi8(a, b));
    }
  }
}
#endif

// Rows of `width` numbers one after the other, without their scales.
template <class E>
TW_NOINLINE static void widen_rows(Stored stored, const u8* const* rows, int count, int width, E* to) {
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<E, Bf16>)
    if (stored == Stored::e4m3 && has_byte_tables()) return widen_e4m3_by_tables(rows, count, width, to);
#endif
  if (stored == Stored::int8)
    for (int j = 0; j < count; j++, to += width) widen_row<Stored::int8>(rows[j], width, to);
  else
    for (int j = 0; j < count; j++, to += width) widen_row<Stored::e4m3>(rows[j], width, to);
}

}  // namespace tilewise::TILEWISE_ISA
