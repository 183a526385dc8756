// Rows of int8 beside queries in bfloat16, multiplied as integers. (float16 asks for more than 16 bits of
// probabilities.)
//
// Why: to widen an int8 number to bfloat16 or float32 takes more instructions than its products. To 16 bits it is one
// instruction for a vector, and a product of 16-bit integers handles as many numbers as one of bfloat16.
//
// A row of queries, and a row of probabilities, is a factor times integers of 16 bits. Their sums are exact, in any
// order. What 16 bits leave of a row of queries is a second row of integers; it is multiplied where it is large enough
// to count.
#pragma once

#include "base/eight_bits.h"
#include "decode/products.h"

namespace tilewise::TILEWISE_ISA {

#if TILEWISE_VECTOR_BYTES >= 32
struct IntegerDot {
  using Word = i32;
  using Acc = i32;
  TW_INLINE Vec<i32> broadcast(i32 a) { return set(a); }
  TW_INLINE Vec<i32> multiply_add(Vec<i32> acc, Vec<i32> a, Vec<i32> b) {
#if defined(__AVX512VNNI__)
    return (Vec<i32>)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif TILEWISE_VECTOR_BYTES == 64
    return acc + (Vec<i32>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return acc + (Vec<i32>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  }
};

// Words are pairs of 16-bit integers.
struct IntegerMode : PlainMode<Bf16, float> {
  using Word = i32;
  using Dot = IntegerDot;
  static constexpr int per_word = 2;
  static int words(int depth) { return (depth + 1) / 2; }
};

template <>
struct RowVectors<IntegerMode> {
  using Elem = Bf16;
  using Key = u8;
  using Acc = float;
  static constexpr int unit = 1, step = 2 * kLanes<float>, sums = 2, together = 1;

  TW_INLINE void of_key(const u8* p, i64 count, Vec<i32>* to) { to[0] = extended_words(first_codes(p, count)); }
  // Two rows, neighbours in one word. Each half of a longer vector has its own columns: see in_order.
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<i32>* to) {
    const Codes a = first_codes(rows[j] + column, count), b = first_codes(rows[j + 1] + column, count);
#if TILEWISE_VECTOR_BYTES == 64
    to[0] = extended_words(_mm256_unpacklo_epi8(a, b));
    to[1] = extended_words(_mm256_unpackhi_epi8(a, b));
#else
    to[0] = extended_words(_mm_unpacklo_epi8(a, b));
    to[1] = extended_words(_mm_unpackhi_epi8(a, b));
#endif
  }
  TW_INLINE void in_order(Vec<float>* sums) {
#if TILEWISE_VECTOR_BYTES == 64
    const __m512 low = (__m512)sums[0], high = (__m512)sums[1];
    sums[0] = (Vec<float>)_mm512_shuffle_f32x4(low, high, 0x44);
    sums[1] = (Vec<float>)_mm512_shuffle_f32x4(low, high, 0xee);
#else
    (void)sums;
#endif
  }

  // ---- queries: integers, what they leave, and two words about both

  static constexpr i64 about = kLanes<i32>;  // words behind the integers
  static constexpr float second_unit = 0x1p-14f;
  static i64 second(i64 stride) { return (stride - about) / 2; }
  TW_INLINE float factor(const i32* row, i64 stride) { return __builtin_bit_cast(float, row[stride - about]); }
  TW_INLINE bool has_second(const i32* row, i64 stride) { return row[stride - about + 1] != 0; }

  static void pack(const Bf16* from, i64 row, i64 col, int rows, int depth, i64 stride, i32* to) {
    for (int i = 0; i < rows; i++, from += row, to += stride) pack_row(from, col, depth, stride, to);
  }

  // ---- probabilities

  // p[r][j] * scales[j], for `count` keys, as integers in the first half of each row, and their factor in its last
  // word. A NaN among the probabilities is in the sum of its row too, and so in its output.
  static void weights(float* p, int rows, int count, const float* scales) {
    constexpr int lanes = kLanes<float>;
    alignas(kVectorBytes) float tops[kTileQueries] = {}, factors[kTileQueries];
    Vec<float> odd{};
    for (int j = 0; j < count; j += lanes) odd += load(scales + j) * 0.0f;
    const bool finite = fold_vector<Sum, float>(odd) == 0;
    each_fold<Largest>(rows, tops, [&](int r) {
      Vec<float> top{};
      for (int j = 0; j < count; j += lanes) top = vmax(absolute(load(p + r * kRoomKeys + j) * load(scales + j)), top);
      return top;
    });
    for (int r = 0; r < rows; r += lanes) {
      const Vec<float> limit = vmax(load(tops + r), set(kLeast));
      store(tops + r, 32767.0f / limit);
      store(factors + r, finite ? limit * (1 / 32767.0f) : set(static_cast<float>(__builtin_nan(""))));
    }
    for (int r = 0; r < rows; r++) {
      float* const row = p + r * kRoomKeys;
      const Vec<float> scale = set(tops[r]);
      for (int j = 0; j < count; j += lanes)
        store_words(reinterpret_cast<u16*>(row) + j, load(row + j) * load(scales + j) * scale);
      row[kRoomKeys - 1] = factors[r];
    }
  }
  TW_INLINE float weight_factor(const i32* p) {
    float factor;
    std::memcpy(&factor, p + kRoomKeys - 1, sizeof factor);
    return factor;
  }

 private:
  static constexpr float kLeast = 0x1p-96f;  // below it a factor would leave the range of float
  // What is left of queries counts where it is more than this part of them, by the sums of absolute values.
  static constexpr float kCounts = 0x1p-18f;

  TW_INLINE Vec<i32> extended_words(Codes x) {
#if TILEWISE_VECTOR_BYTES == 64
    return (Vec<i32>)_mm512_cvtepi8_epi16(x);
#else
    return (Vec<i32>)_mm256_cvtepi8_epi16(x);
#endif
  }
  TW_INLINE Vec<float> absolute(Vec<float> x) { return (Vec<float>)((Vec<u32>)x & 0x7fffffffu); }
  // Rounded to 16-bit integers.
  TW_INLINE void store_words(u16* to, Vec<float> x) {
#if TILEWISE_VECTOR_BYTES == 64
    const Vec<u32> integers = (Vec<u32>)_mm512_cvtps_epi32((__m512)x);
#else
    const Vec<u32> integers = (Vec<u32>)_mm256_cvtps_epi32((__m256)x);
#endif
    store16(to, kLanes<float>, __builtin_convertvector(integers, Vec16));
  }
  TW_INLINE Vec<float> nearest(Vec<float> x) {  // of numbers up to 2^22
    const Vec<float> far = set(0x1.8p23f);
    return (x + far) - far;
  }

  TW_NOINLINE static void pack_row(const Bf16* from, i64 col, int depth, i64 stride, i32* to) {
    constexpr int lanes = kLanes<float>;
    const auto at = [&](int d) { return widen_strided<float>(from + d * col, col, depth - d); };
    Vec<float> top{}, odd{};
    for (int d = 0; d < depth; d += lanes) top = vmax(top, absolute(at(d))), odd += at(d) * 0.0f;
    const bool finite = fold_vector<Sum, float>(odd) == 0;
    const float most = fold_vector<Largest, float>(top), limit = most > kLeast ? most : kLeast;
    // A power of two, so that bfloat16 numbers down to 2^-8 of the largest one are integers as they are. The sum of
    // `depth` products of 16 and 8 bits fits into 32 bits.
    const int bits = (depth <= 512 ? 14 : 13) - static_cast<int>(__builtin_bit_cast(u32, limit) >> 23) + 127;
    const Vec<float> scale = set(__builtin_bit_cast(float, static_cast<u32>(127 + bits) << 23));
    u16 *const first = reinterpret_cast<u16*>(to), *const behind = reinterpret_cast<u16*>(to + second(stride));
    Vec<float> all{}, left{};
    for (int d = 0; d < 2 * second(stride); d += lanes) {
      const Vec<float> x = finite && d < depth ? at(d) * scale : Vec<float>{}, integers = nearest(x);
      const Vec<float> remainder = nearest((x - integers) / second_unit);
      all += absolute(x), left += absolute(remainder) * second_unit;
      store_words(first + d, integers);
      store_words(behind + d, remainder);
    }
    i32* const words = to + stride - about;
    const float factor = __builtin_bit_cast(float, static_cast<u32>(127 - bits) << 23);
    words[0] = __builtin_bit_cast(i32, finite ? factor : static_cast<float>(__builtin_nan("")));
    words[1] = fold_vector<Sum, float>(left) > fold_vector<Sum, float>(all) * kCounts;
  }
};
#endif

}  // namespace tilewise::TILEWISE_ISA
