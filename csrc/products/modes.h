// How each storage type is computed: what the matrix product's words are and how operands become words.
#pragma once

#include "products/gemm.h"
#include "base/schedule.h"
#include "base/elementary.h"
#include "base/pack.h"

namespace tilewise::TILEWISE_ISA {

// Rows of words that the matrix product reads; where possible the operand's own memory.
template <class Word>
struct Words {
  const Word* data;
  i64 stride;
  // In pieces only (products/pieces.h): words from a piece to the next, and the rows that have a number that is not
  // finite, or null where none has.
  i64 apart = 0;
  const unsigned char* odd = nullptr;

  // Without the first `rows` rows; those behind them begin at `from`, or `rows` strides on.
  Words behind(i64 rows, const Word* from) const {
    return {from, stride, apart, odd == nullptr ? nullptr : odd + rows};
  }
  Words behind(i64 rows) const { return behind(rows, data + rows * stride); }
};

// Keys begin .. end - 1 and their values, as the products read them; `b`, `kv_head`: whose they are.
template <class Word>
struct PackedKeys {
  i64 b = -1, kv_head = -1, begin = -1, end = -1;
  Words<Word> keys{}, values{};
};

// Stored as E, computed in C: float and double as they are, the 16-bit types widened block by block.
template <class E, class C>
struct PlainMode {
  using Elem = E;
  using Acc = C;
  using Word = C;
  using Dot = PlainDot<C>;
  using Product = Gemm<Dot>;
  using Session = tilewise::TILEWISE_ISA::Session;
  static constexpr int per_word = 1;
  static constexpr bool paired = false;
  static constexpr int exp2_degree = sizeof(E) == 2 ? 4 : 6;
  static constexpr int tile_queries = kTileQueries;
  static constexpr int query_tiles = 8;  // that share a block of keys, packed or at least near
  static constexpr int grad_tiles = 1;   // of queries, that the backward pass takes at once
  static constexpr int pieces = 1;       // see products/pieces.h
  static constexpr bool coarse = false;  // the backward pass rounds P and dS to 8 bits of mantissa

  TW_INLINE Vec<C> power(Vec<C> x) { return exp2<exp2_degree>(x, C{}); }
  // What a row subtracts from its scores, from a block of keys on whose largest score is `peak`.
  TW_INLINE Vec<C> reference(Vec<C> before, Vec<C> peak, C) { return vmax(peak, before); }
  static int block_keys(int, int) { return kBlockKeys; }  // of the forward pass
  static constexpr i64 packed_keys = kBlockKeys;          // in one go
  static constexpr bool keeps_references = false;         // see TileMode

  static int words(int depth) { return depth; }
  static const E* at(const void* data, i64 offset) { return static_cast<const E*>(data) + offset; }
  static E* at(void* data, i64 offset) { return static_cast<E*>(data) + offset; }

  static Words<Word> along_depth(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    if constexpr (sizeof(E) == sizeof(C))
      if (col == 1) return {p, row};
    pack_rows(p, row, col, rows, depth, depth, room);
    return {room, depth};
  }
  // For products that contract over the rows themselves: the same words serve. They need rows_room().
  static Words<Word> along_rows(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    return along_depth(p, row, col, rows, depth, room);
  }
  static i64 rows_room(i64 rows, int depth) { return rows * depth; }
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows * words.stride; }
  static void unpack(const C* from, int width, int rows, int depth, const C* factor, u64 live, E* to, i64 row) {
    unpack_transposed(from, width, rows, depth, factor, live, to, row);
  }
  static void transposed(const E* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    pack_transposed(p, row, col, rows, depth, width, to);
  }
  // Rows padded to whole vectors, as the right-hand side of a product over the rows.
  static Words<Word> padded(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = round_up(depth, kLanes<C>);
    if constexpr (sizeof(E) == sizeof(C))
      if (col == 1 && stride == depth) return {p, row};
    pack_rows(p, row, col, rows, depth, stride, room);
    return {room, stride};
  }
};

#if defined(TW_PAIRS)
// bfloat16 multiplied in pairs and summed in float by the dot-product instruction.
struct PairMode {
  using Elem = Bf16;
  using Acc = float;
  using Word = i32;
  using Dot = PairDot;
  using Product = Gemm<Dot>;
  using Session = tilewise::TILEWISE_ISA::Session;
  static constexpr int per_word = 2;
  static constexpr bool paired = true;
  static constexpr int step = 2;  // rows of P and dS that are written at once
  static constexpr int exp2_degree = 3;
  static constexpr int tile_queries = kTileQueries;
  static constexpr int query_tiles = 8;
  static constexpr int grad_tiles = 1;
  static constexpr int pieces = 1;
  static constexpr bool coarse = true;

  TW_INLINE Vec<float> power(Vec<float> x) { return exp2<exp2_degree>(x, float{}); }
  TW_INLINE Vec<float> reference(Vec<float> before, Vec<float> peak, float) { return vmax(peak, before); }
  static int block_keys(int, int) { return kBlockKeys; }
  static constexpr i64 packed_keys = kBlockKeys;
  static constexpr bool keeps_references = false;
  // Two float vectors as bfloat16: the neighbours along the rows in one word each.
  TW_INLINE Vec<i32> pair(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr u16 order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Vec<i32>)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)both);
#else
    const bfloat16x8_t a = vcvtq_low_bf16_f32((float32x4_t)first), b = vcvtq_low_bf16_f32((float32x4_t)second);
    return (Vec<i32>)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
  }
  // A float vector as bfloat16: the neighbours along its lanes in one word each.
  TW_INLINE void store_pairs(Word* to, Vec<float> v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    const bfloat16x4_t words = vcvt_bf16_f32((float32x4_t)v);
    std::memcpy(to, &words, sizeof words);
#endif
  }

  static int words(int depth) { return (depth + 1) / 2; }
  static const Bf16* at(const void* data, i64 offset) { return static_cast<const Bf16*>(data) + offset; }
  static Bf16* at(void* data, i64 offset) { return static_cast<Bf16*>(data) + offset; }

  static const u16* bits(const Bf16* p) { return reinterpret_cast<const u16*>(p); }
  static Words<Word> along_depth(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(p) % 4 == 0 && row % 2 == 0 && depth % 2 == 0;
    if (col == 1 && aligned) return {reinterpret_cast<const Word*>(p), row / 2};
    pack_rows_pairs(bits(p), row, col, rows, depth, words(depth), room);
    return {room, words(depth)};
  }
  static Words<Word> along_rows(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    interleave_rows(bits(p), row, col, rows, depth, depth, room);
    return {room, depth};
  }
  static i64 rows_room(i64 rows, int depth) { return (rows + 1) / 2 * depth; }
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows / 2 * words.stride; }
  static void unpack(const float* from, int width, int rows, int depth, const float* factor, u64 live, Bf16* to,
                     i64 row) {
    unpack_transposed(from, width, rows, depth, factor, live, to, row);
  }
  static void transposed(const Bf16* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    pack_transposed_pairs(bits(p), row, col, rows, depth, width, to);
  }
  static Words<Word> padded(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = round_up(depth, kLanes<float>);
    interleave_rows(bits(p), row, col, rows, depth, stride, room);
    return {room, stride};
  }
};

#endif

// The room of so many rows of an operand, in words: of keys, and of queries, which are transposed.
template <class Mode>
i64 key_room(i64 rows, int depth) {
  if constexpr (Mode::pieces == 1) return rows * Mode::words(depth);
  if constexpr (Mode::pieces > 1) return Mode::key_room(rows, depth);
}
template <class Mode>
i64 query_room(i64 queries, int depth) {
  if constexpr (Mode::pieces == 1) return queries * Mode::words(depth);
  if constexpr (Mode::pieces > 1) return Mode::query_room(queries, depth);
}

#if defined(TW_PAIRS)
using Bf16Mode = PairMode;
#else
using Bf16Mode = PlainMode<Bf16, float>;
#endif

template <template <class> class Kernel, class OfBf16 = Bf16Mode, class Arguments>
static bool run(const Arguments& arguments) {
  switch (arguments.dtype) {
    case DType::f32:
      return Kernel<PlainMode<float, float>>(arguments).run();
    case DType::f64:
      return Kernel<PlainMode<double, double>>(arguments).run();
    case DType::bf16:
      return Kernel<OfBf16>(arguments).run();
    case DType::f16:
      return Kernel<PlainMode<Half, float>>(arguments).run();
  }
  return true;
}

}  // namespace tilewise::TILEWISE_ISA
