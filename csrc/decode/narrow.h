// Rows in 8 bits, without their scales: as rows of a wider type, or widened in registers where products take pairs of
// bfloat16 and bytes come from tables.
#pragma once

#include "base/eight_bits.h"
#include "decode/products.h"

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

// Of each 16 bytes the first 8, and the others, as bfloat16.
TW_INLINE void e4m3_words(__m512i x, Vec<i32>* to) {
  alignas(64) static constexpr E4m3Bytes bytes;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(bytes.low), x, _mm512_load_si512(bytes.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(bytes.high), x, _mm512_load_si512(bytes.high + 64));
  const __m512i all = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(-128), 0xf8);  // high | (x & the signs)
  to[0] = (Vec<i32>)_mm512_unpacklo_epi8(low, all);
  to[1] = (Vec<i32>)_mm512_unpackhi_epi8(low, all);
}
TW_INLINE void e4m3_row(const u8* p, u64 some, Vec<i32>* to) {
  alignas(64) static constexpr i64 order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  e4m3_words(_mm512_permutexvar_epi64(_mm512_load_si512(order), _mm512_maskz_loadu_epi8(some, p)), to);
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
  if constexpr (std::is_same_v<E, Bf16>) {
#if defined(__AVX512VBMI__)
    if constexpr (kStored == Stored::e4m3) {
      for (; d < width; d += 64) {
        Vec<i32> words[2];
        const u64 some = first_bits(width - d);
        e4m3_row(from + d, some, words);
        _mm512_mask_storeu_epi16(to + d, static_cast<__mmask32>(some), (__m512i)words[0]);
        _mm512_mask_storeu_epi16(to + d + 32, static_cast<__mmask32>(some >> 32), (__m512i)words[1]);
      }
      return;
    }
#endif
#if TILEWISE_VECTOR_BYTES == 64
    for (; d + 2 * lanes <= width; d += 2 * lanes)
      store(reinterpret_cast<i32*>(to + d), upper_halves(number_of<kStored>(load8(from + d, lanes)),
                                                         number_of<kStored>(load8(from + d + lanes, lanes))));
#endif
  }
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

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
template <Stored kStored>
struct NarrowPairs : PairMode {};

template <Stored kStored>
struct RowVectors<NarrowPairs<kStored>> : RowVectors<PairMode> {
  using Key = u8;

  // Two rows, neighbours in one word.
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<i32>* to) {
    const u8 *a = rows[j] + column, *b = rows[j + 1] + column;
    if constexpr (kStored == Stored::e4m3) {
      alignas(64) static constexpr u8 order[64] = {0,  64, 1,  65, 2,  66, 3,  67, 16, 80, 17, 81, 18, 82, 19, 83,  //
                                                   4,  68, 5,  69, 6,  70, 7,  71, 20, 84, 21, 85, 22, 86, 23, 87,  //
                                                   8,  72, 9,  73, 10, 74, 11, 75, 24, 88, 25, 89, 26, 90, 27, 91,  //
                                                   12, 76, 13, 77, 14, 78, 15, 79, 28, 92, 29, 93, 30, 94, 31, 95};
      const __mmask32 some = static_cast<__mmask32>(first_bits(count));
      const __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(some, a));
      const __m512i second = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(some, b));
      return e4m3_words(_mm512_permutex2var_epi8(first, _mm512_load_si512(order), second), to);
    }
    TW_UNROLL(2)
    for (int i = 0; i < 32; i += 16) {
      const Vec<float> first = number_of<kStored>(load8(a + i, count - i));
      const Vec<float> second = number_of<kStored>(load8(b + i, count - i));
      to[i / 16] = (Vec<i32>)((Vec<u32>)first >> 16 | (Vec<u32>)second);
    }
  }
  TW_INLINE void in_order(Vec<float>*) {}
};

// Sums are those of FewRows. For scores 16 keys lie in the lanes, turned four bytes at a time, and pairs of a query are
// broadcast: nothing has to be summed over lanes, which takes as long as the products of 8 rows of width 128.
template <Stored kStored>
class NarrowProducts {
  using Sums = FewRows<NarrowPairs<kStored>>;
  static constexpr int kGroups = 2, kRows = 8;  // of 16 keys; of queries, multiplied side by side

 public:
  using Vectors = typename Sums::Vectors;
  static constexpr i64 alone = 0;

  struct Room {
    i32* turned;  // [fours of a row][kGroups][16]
    Room(Carver& carve, i64, int depth) : turned(carve.take<i32>((depth + 3) / 4 * kGroups * kSubKeys)) {}
    void open(const i32*, i64, int, int) const {}
    void close() const {}
  };

  static void dots(const Room& room, const i32* q, i64 q_stride, int row0, int rows, const u8* const* keys, int count,
                   int depth, float* s, i64 stride, RowsAhead& ahead) {
    constexpr int kKeys = kGroups * kSubKeys;
    const int fours = (depth + 3) / 4;
    ahead.spread((ahead.left() + 1) / 2, (count + kKeys - 1) / kKeys * ((rows + kRows - 1) / kRows) * fours);
    q += row0 * q_stride;
    for (int j = 0; j < count; j += kKeys) {
      const bool both = j + kSubKeys < count;
      turn(keys + j, depth, room.turned);
      if (both) turn(keys + j + kSubKeys, depth, room.turned + kSubKeys);
      if (both)
        dot_rows<2>(room.turned, q, q_stride, rows, fours, s + j, stride, ahead);
      else
        dot_rows<1>(room.turned, q, q_stride, rows, fours, s + j, stride, ahead);
    }
  }
  static void sums(const Room&, const i32* p, int rows, const u8* const* values, int keys, int width, float* out,
                   i64 out_stride, const float* alpha, RowsAhead& ahead) {
    Sums::sums({}, p, rows, values, keys, width, out, out_stride, alpha, ahead);
  }

 private:
  TW_NOINLINE static void turn(const u8* const* keys, int depth, i32* to) {
    for (int d = 0; d < depth; d += 64) {
      const u64 some = first_bits(depth - d);
      Vec<i32> r[16];
      TW_UNROLL(16)
      for (int i = 0; i < 16; i++) r[i] = (Vec<i32>)_mm512_maskz_loadu_epi8(some, keys[i] + d);
      transpose<i32>(r);
      TW_UNROLL(16)
      for (int i = 0; i < 16; i++)
        if (d + 4 * i < depth) store(to + (d / 4 + i) * kGroups * kSubKeys, r[i]);
    }
  }

  // Four numbers of each of 16 keys as two words; those of int8 times 2^24.
  TW_INLINE void words_of_four(Vec<i32> x, Vec<i32>* to) {
    if constexpr (kStored == Stored::e4m3) {
      const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      return e4m3_words(_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order)), to);
    }
    const auto number = [](Vec<u32> top) { return (Vec<u32>)__builtin_convertvector((Vec<i32>)top, Vec<float>); };
    const Vec<u32> w = (Vec<u32>)x, top = set(0xff000000u);
    to[0] = (Vec<i32>)(number(w << 24) >> 16 | number(w << 16 & top));
    to[1] = (Vec<i32>)(number(w << 8 & top) >> 16 | number(w & top));
  }

  template <int kG>
  TW_NOINLINE static void dot_rows(const i32* turned, const i32* q, i64 q_stride, int rows, int fours, float* s,
                                   i64 stride, RowsAhead& ahead) {
    int r = 0;
    const auto of_rows = [&](auto count) {
      constexpr int kR = decltype(count)::value;
      for (; r + kR <= rows; r += kR)
        dot_block<kR, kG>(turned, q + r * q_stride, q_stride, fours, s + r * stride, stride, ahead);
    };
    of_rows(Int<kRows>{});
    of_rows(Int<4>{});
    of_rows(Int<2>{});
    of_rows(Int<1>{});
  }

  template <int kR, int kG>
  TW_INLINE void dot_block(const i32* turned, const i32* q, i64 q_stride, int fours, float* s, i64 stride,
                           RowsAhead& ahead) {
    constexpr float unit = kStored == Stored::int8 ? 0x1p-24f : 1.0f;
    Vec<float> acc[kR * kG] = {};
    for (int d = 0; d < fours; d++, turned += kGroups * kSubKeys) {
      ahead.step();
      Vec<i32> key[kG][2];
      TW_UNROLL(2)
      for (int g = 0; g < kG; g++) words_of_four(load(turned + g * kSubKeys), key[g]);
      TW_UNROLL(2)
      for (int u = 0; u < 2; u++) {
        TW_UNROLL(8)
        for (int r = 0; r < kR; r++) {
          const Vec<i32> pair = PairDot::broadcast(q[r * q_stride + 2 * d + u]);
          TW_UNROLL(2)
          for (int g = 0; g < kG; g++) acc[r * kG + g] = PairDot::multiply_add(acc[r * kG + g], pair, key[g][u]);
        }
      }
    }
    TW_UNROLL(8)
    for (int r = 0; r < kR; r++)
      for (int g = 0; g < kG; g++) store(s + r * stride + g * kSubKeys, acc[r * kG + g] * unit);
  }
};
#endif

}  // namespace tilewise::TILEWISE_ISA
