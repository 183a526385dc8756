// Rows in 8 bits, without their scales: as rows of a wider type; or widened in registers, as pairs of bfloat16 or as
// float32.
#pragma once

#include "base/eight_bits.h"
#include "decode/integers.h"

namespace tilewise::TILEWISE_ISA {

#if TILEWISE_VECTOR_BYTES == 64
// The upper halves of two vectors: numbers that are exact in bfloat16.
TW_INLINE Vec<i32> upper_halves(Vec<float> a, Vec<float> b) {
  alignas(64) static constexpr u16 odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                              33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (Vec<i32>)_mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(odd), (__m512i)b);
}
TW_INLINE u64 first_bits(i64 count) { return count >= 64 ? ~u64{0} : count <= 0 ? 0 : (u64{1} << count) - 1; }
#endif

#if defined(__AVX512VBMI__)
// Each e4m3 number without a sign, byte by byte: as bfloat16, or as float16.
template <class E>
struct E4m3Bytes {
  static constexpr bool half = std::is_same_v<E, Half>;
  static constexpr u32 bias = half ? 8 : 120, place = half ? 10 : 7, nan = half ? 0x7e00 : 0x7fc0;
  alignas(64) u8 low[128] = {}, high[128] = {};
  constexpr E4m3Bytes() {
    for (u32 code = 0; code < 128; code++) {
      u32 exponent = code >> 3, fraction = code & 7;
      if (exponent == 0 && fraction != 0) {  // below the normal range there, in it here
        for (exponent = 1; (fraction & 8) == 0; exponent--) fraction <<= 1;
        fraction &= 7;
      }
      const u32 bits = code == 0 ? 0 : code == 127 ? nan : (exponent + bias) << place | fraction << (place - 3);
      low[code] = static_cast<u8>(bits), high[code] = static_cast<u8>(bits >> 8);
    }
  }
};

// Of each 16 bytes the first 8, and the others, as numbers in 16 bits.
template <class E = Bf16>
TW_INLINE void e4m3_words(__m512i x, Vec<i32>* to) {
  alignas(64) static constexpr E4m3Bytes<E> bytes;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(bytes.low), x, _mm512_load_si512(bytes.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(bytes.high), x, _mm512_load_si512(bytes.high + 64));
  const __m512i all = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(-128), 0xf8);  // high | (x & the signs)
  to[0] = (Vec<i32>)_mm512_unpacklo_epi8(low, all);
  to[1] = (Vec<i32>)_mm512_unpackhi_epi8(low, all);
}
template <class E = Bf16>
TW_INLINE void e4m3_row(const u8* p, u64 some, Vec<i32>* to) {
  alignas(64) static constexpr i64 order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  e4m3_words<E>(_mm512_permutexvar_epi64(_mm512_load_si512(order), _mm512_maskz_loadu_epi8(some, p)), to);
}
// Four vectors of float32, from words whose even places are to be the first vector, and their odd ones the second. Why
// by way of bfloat16: from there to float32 it is a shift or a mask, where float16 takes a conversion and a product.
TW_INLINE void floats_of_words(const Vec<i32>* words, Vec<float>* to) {
  for (int i = 0; i < 2; i++) {
    to[2 * i] = (Vec<float>)((Vec<u32>)words[i] << 16);
    to[2 * i + 1] = (Vec<float>)((Vec<u32>)words[i] & 0xffff0000u);
  }
}
// In the order of the codes.
TW_INLINE void e4m3_floats(__m512i codes, Vec<float>* to) {
  alignas(64) static constexpr u8 order[64] = {0,  16, 1,  17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51,  //
                                               4,  20, 5,  21, 6,  22, 7,  23, 36, 52, 37, 53, 38, 54, 39, 55,  //
                                               8,  24, 9,  25, 10, 26, 11, 27, 40, 56, 41, 57, 42, 58, 43, 59,  //
                                               12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63};
  Vec<i32> words[2];
  e4m3_words(_mm512_permutexvar_epi8(_mm512_load_si512(order), codes), words);
  floats_of_words(words, to);
}
#endif

// ---- rows of a wider type

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
#if defined(__AVX512VBMI__)
  if constexpr (kStored == Stored::e4m3 && sizeof(E) == 2) {
    for (; d < width; d += 64) {
      Vec<i32> words[2];
      const u64 some = first_bits(width - d);
      e4m3_row<E>(from + d, some, words);
      _mm512_mask_storeu_epi16(to + d, static_cast<__mmask32>(some), (__m512i)words[0]);
      _mm512_mask_storeu_epi16(to + d + 32, static_cast<__mmask32>(some >> 32), (__m512i)words[1]);
    }
    return;
  }
  if constexpr (kStored == Stored::e4m3 && std::is_same_v<E, float>) {
    for (; d + 64 <= width; d += 64) {
      Vec<float> x[4];
      e4m3_floats(_mm512_loadu_si512(from + d), x);
      for (int i = 0; i < 4; i++) store(to + d + i * lanes, x[i]);
    }
  }
#endif
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<E, Bf16>)
    for (; d + 2 * lanes <= width; d += 2 * lanes)
      store(reinterpret_cast<i32*>(to + d), upper_halves(number_of<kStored>(load8(from + d, lanes)),
                                                         number_of<kStored>(load8(from + d + lanes, lanes))));
#endif
  for (; d < width; d += lanes) store_exact(to + d, width - d, number_of<kStored>(load8(from + d, width - d)));
}

// One after the other.
template <class E>
TW_NOINLINE static void widen_rows(Stored stored, const u8* const* rows, int count, int width, E* to) {
  if (stored == Stored::int8)
    for (int j = 0; j < count; j++, to += width) widen_row<Stored::int8>(rows[j], width, to);
  else
    for (int j = 0; j < count; j++, to += width) widen_row<Stored::e4m3>(rows[j], width, to);
}

// ---- in registers

#if TILEWISE_VECTOR_BYTES >= 32
// Products in float32: a key is widened once for 8 rows, and nothing is written.
template <class E, Stored kStored>
struct NarrowWords : PlainMode<E, float> {};

template <class E, Stored kStored>
struct RowVectors<NarrowWords<E, kStored>> {
  using Elem = E;
  using Key = u8;
  using Acc = float;
  // Keys lie as those in 16 bits do, even places and odd ones for bfloat16: so the bits of a sum are the same.
  static constexpr bool pairs = kStored == Stored::e4m3, turned = pairs && std::is_same_v<E, Bf16>;
#if defined(__AVX512VBMI__)
  static constexpr bool tables = pairs;  // 64 codes at once: of one key, or 32 of two rows of values
#else
  static constexpr bool tables = false;
#endif
  static constexpr int unit = tables ? 4 : pairs ? 2 : 1, step = unit * kLanes<float>;
  static constexpr int sums = pairs ? 2 : 1, together = tables ? 2 : 1;

  TW_INLINE void of_key(const u8* p, i64 count, Vec<float>* to) {
#if defined(__AVX512VBMI__)
    if constexpr (turned) {
      Vec<i32> words[2];
      e4m3_row(p, first_bits(count), words);
      return floats_of_words(words, to);
    }
    if constexpr (tables) return e4m3_floats(_mm512_maskz_loadu_epi8(first_bits(count), p), to);
#endif
    if constexpr (pairs)
      e4m3_pair(turned ? even_places_first(first_codes(p, count)) : first_codes(p, count), to);
    else
      to[0] = number_of<kStored>(load8(p, count));
  }
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<float>* to) {
    if constexpr (pairs)
      e4m3_pair(first_codes(rows[j] + column, count), to);
    else
      to[0] = number_of<kStored>(load8(rows[j] + column, count));
  }
#if defined(__AVX512VBMI__)
  template <class Rows>
  TW_INLINE void of_two_values(const Rows& rows, int j, i64 column, i64 count, Vec<float>* to, Vec<float>* next) {
    const Codes first = first_codes(rows[j] + column, count), second = first_codes(rows[j + 1] + column, count);
    Vec<float> x[4];
    e4m3_floats(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), x);
    to[0] = x[0], to[1] = x[1], next[0] = x[2], next[1] = x[3];
  }
#endif
  TW_INLINE void in_order(Vec<float>*) {}
  static void weights(float*, int) {}
  static void pack(const E* from, i64 row, i64 col, int rows, int depth, i64 stride, float* to) {
    if constexpr (turned)
      RowVectors<PlainMode<E, float>>::pack(from, row, col, rows, depth, stride, to);
    else
      pack_rows(from, row, col, rows, depth, stride, to);
  }

 private:
  TW_INLINE Codes even_places_first(Codes x) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
#if TILEWISE_VECTOR_BYTES == 64
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order)), 0xd8);
#else
    return _mm_shuffle_epi8(x, order);
#endif
  }
};
#endif

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
// e4m3 beside bfloat16.
struct NarrowPairs : PairMode {};

template <>
struct RowVectors<NarrowPairs> : RowVectors<PairMode> {
  using Key = u8;
  static constexpr int unit = 2, step = 64, sums = 2;

  TW_INLINE void of_key(const u8* p, i64 count, Vec<i32>* to) { e4m3_row(p, first_bits(count), to); }
  // Two rows, neighbours in one word.
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<i32>* to) {
    alignas(64) static constexpr u8 order[64] = {0,  64, 1,  65, 2,  66, 3,  67, 16, 80, 17, 81, 18, 82, 19, 83,  //
                                                 4,  68, 5,  69, 6,  70, 7,  71, 20, 84, 21, 85, 22, 86, 23, 87,  //
                                                 8,  72, 9,  73, 10, 74, 11, 75, 24, 88, 25, 89, 26, 90, 27, 91,  //
                                                 12, 76, 13, 77, 14, 78, 15, 79, 28, 92, 29, 93, 30, 94, 31, 95};
    const __m512i first = _mm512_castsi256_si512(first_codes(rows[j] + column, count));
    const __m512i second = _mm512_castsi256_si512(first_codes(rows[j + 1] + column, count));
    return e4m3_words(_mm512_permutex2var_epi8(first, _mm512_load_si512(order), second), to);
  }
  TW_INLINE void in_order(Vec<float>*) {}
};
#endif

}  // namespace tilewise::TILEWISE_ISA
