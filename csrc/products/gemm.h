// The one matrix product: C[rows][width] (+)= A[rows][depth] * B[depth][width], lanes along the width.
// A is read one word at a time and broadcast, so keys and values are used where they lie in memory.
#pragma once

#include "base/ahead.h"

namespace tilewise::TILEWISE_ISA {

// How a word of A meets a vector of B. Plain: a number times numbers.
template <class T>
struct PlainDot {
  using Word = T;
  using Acc = T;
  static constexpr int per_word = 1;
  TW_INLINE Vec<Word> broadcast(Word a) { return set(a); }
  TW_INLINE Vec<T> multiply_add(Vec<T> acc, Vec<Word> a, Vec<Word> b) { return fused(a, b, acc); }
};

#if defined(TW_PAIRS)
// A word is two neighbours along the contraction; one instruction multiplies and adds both, in float.
struct PairDot {
  using Word = i32;
  using Acc = float;
  static constexpr int per_word = 2;
#if defined(__AVX512BF16__)
  TW_INLINE Vec<Word> broadcast(Word a) { return (Vec<Word>)_mm512_set1_epi32(a); }
  TW_INLINE Vec<float> multiply_add(Vec<float> acc, Vec<Word> a, Vec<Word> b) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
#else
  // The instruction takes one word of its last operand for all lanes: nothing copies it into them.
  TW_INLINE bfloat16x4_t broadcast(Word a) {
    // Either form is one load of the word, where the other compiler moves it once more.
#if defined(__clang__)
    float one;
    std::memcpy(&one, &a, sizeof one);
    return (bfloat16x4_t)float32x2_t{one, 0};
#else
    return vcreate_bf16(static_cast<u32>(a));
#endif
  }
  TW_INLINE Vec<float> multiply_add(Vec<float> acc, bfloat16x4_t a, Vec<Word> b) {
    return (Vec<float>)vbfdotq_lane_f32((float32x4_t)acc, (bfloat16x8_t)b, a, 0);
  }
  TW_INLINE Vec<float> multiply_add(Vec<float> acc, Vec<Word> a, Vec<Word> b) {
    return (Vec<float>)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
#endif
};
#endif

// Columns (in vectors) and rows of the block of C held in registers.
#if TILEWISE_VECTOR_BYTES == 64
constexpr int kColumns = 4;
template <int kV>
constexpr int kRows = kV == 4   ? 4
                      : kV == 3 ? 6
                      : kV == 2 ? 8
                                : 16;
#elif TILEWISE_VECTOR_BYTES == 32
constexpr int kColumns = 2;
template <int kV>
constexpr int kRows = kV == 2 ? 6 : 8;
#elif defined(__aarch64__)
constexpr int kColumns = 4;
template <int kV>
constexpr int kRows = kV == 4   ? 4
                      : kV == 3 ? 6
                                : 8;
#else
constexpr int kColumns = 2;
template <int kV>
constexpr int kRows = kV == 2 ? 4 : 8;
#endif

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};

// Calls f(Int<vectors>, first column) for register-wide groups of columns.
template <class T, class F>
TW_INLINE void for_columns(int width, F&& f) {
  constexpr int lanes = kLanes<T>;
  int column = 0;
  for (; column + kColumns * lanes <= width; column += kColumns * lanes) f(Int<kColumns>{}, column);
  const int rest = (width - column) / lanes;
  if constexpr (kColumns > 3) {
    if (rest == 3) f(Int<3>{}, column);
    if (rest == 2) f(Int<2>{}, column);
  }
  if (rest == 1) f(Int<1>{}, column);
}

// Chains of additions are cut, as their error grows with their length. Sums over a block of keys or queries are short;
// they are cut only where products are rounded before they are added.
#if defined(__FMA__) || defined(__aarch64__)
constexpr int kChain = 1 << 20, kPiece = 64;
#else
constexpr int kChain = 32, kPiece = kChain;
#endif

// Inner products (scores, dP) are summed in pieces of kPiece terms: a softmax turns the error of a large score into a
// relative error of the output. Several vectors of queries read and write C once per piece, 1 % of the time at a depth
// of 128. One vector waits for the stream of keys, which pieces in C would interrupt (1.3x the time): there they meet
// in registers, in the same order. Where one vector has all queries of a sequence of few (kFewQueries), they are
// shorter.
constexpr int kShortPiece = 16;
// Rows of C whose pieces are in registers too.
#if TILEWISE_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kShortRows = 8;
#elif TILEWISE_VECTOR_BYTES == 32
constexpr int kShortRows = 6;
#else
constexpr int kShortRows = 4;
#endif

enum class AOrder { row_major, column_major };  // A[row * lda + k] or A[k * lda + row]
enum class Into { overwrite, add, rescale };    // C = AB, C + AB, C * alpha + AB (alpha per column)

template <class Dot>
struct Gemm {
  using Word = typename Dot::Word;
  using Acc = typename Dot::Acc;

  template <int kR, int kV, AOrder kOrder>
  TW_INLINE void sum(const Word* a, i64 lda, const Word* b, i64 ldb, int depth, Vec<Acc> (&acc)[kR][kV]) {
    constexpr int lanes = kLanes<Acc>;
    TW_UNROLL(2)
    for (int k = 0; k < depth; k++) {
      Vec<Word> row[kV];
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) row[v] = load(b + k * ldb + v * lanes);
      TW_UNROLL(16)
      for (int r = 0; r < kR; r++) {
        const auto x = Dot::broadcast(kOrder == AOrder::row_major ? a[r * lda + k] : a[k * lda + r]);
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) acc[r][v] = Dot::multiply_add(acc[r][v], x, row[v]);
      }
    }
  }

  // Inner products of numbers, as against sums over a block of keys or queries, and against pairs of bfloat16, whose
  // own rounding hides that of the additions.
  template <AOrder kOrder, Into kInto>
  static constexpr bool kInner = kOrder == AOrder::row_major && kInto == Into::overwrite && Dot::per_word == 1;

  // An entry of an inner product, added up in the order in which `run` does it.
  TW_INLINE Vec<Acc> inner(const Word* a, const Word* b, i64 stride, int words, bool few) {
    const int piece = Dot::per_word > 1 ? kChain : few ? kShortPiece : kPiece;
    Vec<Acc> sum{};
    for (int d = 0; d < words; d += piece) {
      Vec<Acc> part{};
      for (int x = d; x < words && x < d + piece; x++)
        part = Dot::multiply_add(part, load(a + x * stride), load(b + x * stride));
      sum += part;
    }
    return sum;
  }

  template <int kR, int kV, AOrder kOrder, Into kInto, bool kPeak, int kLongest = kChain>
  TW_INLINE void block(const Word* a, i64 lda, const Word* b, i64 ldb, int depth, Acc* c, i64 ldc, const Acc* alpha,
                       Vec<Acc>* peak) {
    constexpr int lanes = kLanes<Acc>;
    Vec<Acc> acc[kR][kV] = {};
    sum<kR, kV, kOrder>(a, lda, b, ldb, depth < kLongest ? depth : kLongest, acc);
    // The pieces of a long product meet here, before the entry of C, which may hold many blocks already.
    if constexpr (kLongest < 1 << 10) {
      const i64 step = kOrder == AOrder::row_major ? 1 : lda;
      for (int from = kLongest; from < depth; from += kLongest) {
        const int count = depth - from < kLongest ? depth - from : kLongest;
        Vec<Acc> piece[kR][kV] = {};
        sum<kR, kV, kOrder>(a + from * step, lda, b + from * ldb, ldb, count, piece);
        TW_UNROLL(16)
        for (int r = 0; r < kR; r++) {
          TW_UNROLL(4)
          for (int v = 0; v < kV; v++) acc[r][v] += piece[r][v];
        }
      }
    }
    TW_UNROLL(16)
    for (int r = 0; r < kR; r++) {
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) {
        Acc* to = c + r * ldc + v * lanes;
        // Adding last keeps the chains of additions short: the depth of one block, then the blocks.
        if constexpr (kInto == Into::add) acc[r][v] += load(to);
        if constexpr (kInto == Into::rescale) acc[r][v] += load(to) * load(alpha + v * lanes);
        store(to, acc[r][v]);
        if constexpr (kPeak) peak[v] = vmax(acc[r][v], peak[v]);
      }
    }
  }

  // Rows of C, the pieces of inner products being added in registers (one vector) or in C (several).
  template <int kR, int kV, AOrder kOrder, Into kInto, bool kPeak, bool kFew>
  TW_INLINE void rows_of(const Word* a, i64 lda, const Word* b, i64 ldb, int depth, Acc* c, i64 ldc, const Acc* alpha,
                         Vec<Acc>* peak) {
    if constexpr (!kInner<kOrder, kInto>) {
      block<kR, kV, kOrder, kInto, kPeak>(a, lda, b, ldb, depth, c, ldc, alpha, peak);
    } else if constexpr (kV == 1) {
      constexpr int kLongest = kFew ? kShortPiece : kPiece;
      block<kR, kV, kOrder, kInto, kPeak, kLongest>(a, lda, b, ldb, depth, c, ldc, alpha, peak);
    } else if (depth <= kPiece) {
      block<kR, kV, kOrder, kInto, kPeak>(a, lda, b, ldb, depth, c, ldc, alpha, peak);
    } else {
      block<kR, kV, kOrder, kInto, false>(a, lda, b, ldb, kPiece, c, ldc, alpha, peak);
      int k = kPiece;
      for (; k + kPiece < depth; k += kPiece)
        block<kR, kV, kOrder, Into::add, false>(a + k, lda, b + k * ldb, ldb, kPiece, c, ldc, alpha, peak);
      block<kR, kV, kOrder, Into::add, kPeak>(a + k, lda, b + k * ldb, ldb, depth - k, c, ldc, alpha, peak);
    }
  }

  template <int kV, AOrder kOrder, Into kInto, bool kPeak, bool kFew>
  TW_NOINLINE static void columns(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, Acc* c, i64 ldc,
                                  const Acc* alpha, Acc* peak_out, Ahead* ahead) {
    constexpr int lanes = kLanes<Acc>;
    constexpr int kMost = kV == 1 && kInner<kOrder, kInto> ? kShortRows : kRows<kV>;
    const i64 step = kOrder == AOrder::row_major ? lda : 1;
    Vec<Acc> peak[kV];
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) peak[v] = set(-static_cast<Acc>(__builtin_inf()));
    int r = 0;
    for (; r + kMost <= rows; r += kMost) {
      rows_of<kMost, kV, kOrder, kInto, kPeak, kFew>(a + r * step, lda, b, ldb, depth, c + r * ldc, ldc, alpha, peak);
      if (ahead != nullptr) ahead->step();
    }
    for (; r + 2 <= rows; r += 2)
      rows_of<2, kV, kOrder, kInto, kPeak, kFew>(a + r * step, lda, b, ldb, depth, c + r * ldc, ldc, alpha, peak);
    for (; r < rows; r++)
      rows_of<1, kV, kOrder, kInto, kPeak, kFew>(a + r * step, lda, b, ldb, depth, c + r * ldc, ldc, alpha, peak);
    if constexpr (kPeak) {
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) store(peak_out + v * lanes, peak[v]);
    }
  }

  // width is a multiple of the lanes; alpha and peak (the largest entry of each column) hold `width` numbers. `ahead`:
  // what is fetched on the way. `few`: the columns are the queries of a sequence of few.
  template <AOrder kOrder, Into kInto, bool kPeak = false>
  static void run(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, int width, Acc* c, i64 ldc,
                  const Acc* alpha = nullptr, Acc* peak = nullptr, Ahead* ahead = nullptr, bool few = false) {
    for_columns<Acc>(width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      const Acc* factor = alpha ? alpha + column : nullptr;
      Acc* top = peak ? peak + column : nullptr;
      auto* const add_up = kV == 1 && kInner<kOrder, kInto> && few ? &columns<kV, kOrder, kInto, kPeak, true>
                                                                   : &columns<kV, kOrder, kInto, kPeak, false>;
      add_up(a, lda, b + column, ldb, rows, depth, c + column, ldc, factor, top, ahead);
    });
  }
};

}  // namespace tilewise::TILEWISE_ISA
