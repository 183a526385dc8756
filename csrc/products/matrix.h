// How bfloat16 is computed by NEON's matrix instruction (bfmmla): words of the paired mode two by two, and a product
// of blocks of 2 x 2.
//
// Why it is arranged so:
// - An instruction multiplies two rows of four numbers with two columns of four: 16 products, where `bfdot` has 8. Arm
//   defines it as two `bfdot` one after the other, so the bits are those of the paired mode.
// - So an operand's vector has two rows (or columns) and four neighbours of each along the contraction. Left operands
//   have their rows in twos, vectors side by side. Right operands keep the size and the rows of the paired mode: row
//   2 k has the first two of each four columns, row 2 k + 1 the others. So P and dS are written over the scores that
//   they are made from, as in the other modes.
// - A sum has two rows and two columns. One exchange of halves makes rows of two sums, once for a block of C, so that C
//   has queries in its lanes as everywhere.
// - Keys and values are copied into this order once for all tiles of queries of a task.
#pragma once

#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

// For the ceiling of a bare loop alone: a vector of both operands.
struct MatrixDot {
  using Word = i32;
  static constexpr int per_word = 4;
  TW_INLINE Vec<Word> broadcast(Word a) { return set(a); }
  TW_INLINE Vec<float> multiply_add(Vec<float> acc, Vec<Word> a, Vec<Word> b) {
    return (Vec<float>)vbfmmlaq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
};

struct MatrixGemm {
  using Word = i32;
  using Acc = float;
  static constexpr int lanes = kLanes<float>;
  static constexpr int kPairs = 4, kColumns = 2;  // rows in twos, and vectors of columns, of the block in registers

  TW_INLINE Vec<float> first_halves(Vec<float> a, Vec<float> b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
  TW_INLINE Vec<float> second_halves(Vec<float> a, Vec<float> b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

  // `single`: the last row of the block is not one of C.
  template <int kR, int kV, AOrder kOrder, Into kInto, bool kPeak>
  TW_INLINE void block(const Word* a, i64 lda, const Word* b, i64 ldb, int depth, float* c, i64 ldc, const float* alpha,
                       Vec<float>* peak, bool single = false) {
    const i64 pair = kOrder == AOrder::row_major ? 2 * lda : 4, step = kOrder == AOrder::row_major ? 4 : 2 * lda;
    Vec<float> acc[kR][kV][2] = {};
    TW_UNROLL(2)
    for (int k = 0; k < depth; k += 2, a += step, b += 2 * ldb) {
      Vec<Word> left[kR], right[kV][2];
      TW_UNROLL(4)
      for (int r = 0; r < kR; r++) left[r] = load(a + r * pair);
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) right[v][0] = load(b + v * lanes), right[v][1] = load(b + ldb + v * lanes);
      TW_UNROLL(4)
      for (int r = 0; r < kR; r++) {
        TW_UNROLL(2)
        for (int v = 0; v < kV; v++) {
          acc[r][v][0] = MatrixDot::multiply_add(acc[r][v][0], left[r], right[v][0]);
          acc[r][v][1] = MatrixDot::multiply_add(acc[r][v][1], left[r], right[v][1]);
        }
      }
    }
    TW_UNROLL(4)
    for (int r = 0; r < kR; r++) {
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) {
        float* to = c + 2 * r * ldc + v * lanes;
        const auto row = [&](float* p, Vec<float> sum) __attribute__((always_inline)) {
          if constexpr (kInto == Into::add) sum += load(p);
          if constexpr (kInto == Into::rescale) sum += load(p) * load(alpha + v * lanes);
          store(p, sum);
          if constexpr (kPeak) peak[v] = vmax(sum, peak[v]);
        };
        row(to, first_halves(acc[r][v][0], acc[r][v][1]));
        if (!single) row(to + ldc, second_halves(acc[r][v][0], acc[r][v][1]));
      }
    }
  }

  template <int kV, AOrder kOrder, Into kInto, bool kPeak>
  TW_NOINLINE static void columns(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, float* c,
                                  i64 ldc, const float* alpha, float* peak_out, Ahead* ahead) {
    const i64 step = kOrder == AOrder::row_major ? lda : 2;
    Vec<float> peak[kV];
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) peak[v] = set(-__builtin_inff());
    int r = 0;
    for (; r + 2 * kPairs <= rows; r += 2 * kPairs) {
      block<kPairs, kV, kOrder, kInto, kPeak>(a + r * step, lda, b, ldb, depth, c + r * ldc, ldc, alpha, peak);
      if (ahead != nullptr) ahead->step();
    }
    for (; r < rows; r += 2)
      block<1, kV, kOrder, kInto, kPeak>(a + r * step, lda, b, ldb, depth, c + r * ldc, ldc, alpha, peak,
                                         r + 1 == rows);
    if constexpr (kPeak) {
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) store(peak_out + v * lanes, peak[v]);
    }
  }

  // As Gemm::run, for operands in the layouts of MatrixMode; an odd depth in words is one more, zeros in the last.
  template <AOrder kOrder, Into kInto, bool kPeak = false>
  static void run(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, int width, Acc* c, i64 ldc,
                  const Acc* alpha = nullptr, Acc* peak = nullptr, Ahead* ahead = nullptr, bool = false) {
    const auto part = [&](auto vectors, int column) {
      columns<decltype(vectors)::value, kOrder, kInto, kPeak>(a, lda, b + column, ldb, rows, depth, c + column, ldc,
                                                              alpha ? alpha + column : nullptr,
                                                              peak ? peak + column : nullptr, ahead);
    };
    int column = 0;
    for (; column + kColumns * lanes <= width; column += kColumns * lanes) part(Int<kColumns>{}, column);
    if (column < width) part(Int<1>{}, column);
  }

  // An entry of a product, of each lane, with the bits that `run` gives it; both operands as right ones.
  TW_INLINE Vec<float> inner(const Word* a, const Word* b, i64 stride, int words, bool) {
    Vec<float> sum{};
    for (int x = 0; x < words; x += 2, a += 2 * stride, b += 2 * stride) {
      const Vec<i32> p = load(a), q = load(a + stride), s = load(b), t = load(b + stride);
      sum = PairDot::multiply_add(sum, __builtin_shufflevector(p, q, 0, 2, 4, 6),
                                  __builtin_shufflevector(s, t, 0, 2, 4, 6));
      sum = PairDot::multiply_add(sum, __builtin_shufflevector(p, q, 1, 3, 5, 7),
                                  __builtin_shufflevector(s, t, 1, 3, 5, 7));
    }
    return sum;
  }
};

struct MatrixMode : PairMode {
  using Product = MatrixGemm;
  static constexpr int step = 4;

  static int words(int depth) { return (depth + 3) / 4 * 2; }

  // Four numbers of a row, zeros behind `count`.
  TW_INLINE uint16x4_t four(const Bf16* p, i64 col, i64 count) {
    if (col == 1 && count >= 4) return vld1_u16(bits(p));
    u16 x[4] = {};
    for (i64 i = 0; i < count && i < 4; i++) x[i] = p[i * col].bits;
    return vld1_u16(x);
  }
  TW_INLINE Vec<i32> both(uint16x4_t a, uint16x4_t b) { return (Vec<i32>)vcombine_u16(a, b); }
  // Four rows of four numbers, two in a vector, become two vectors of two columns.
  TW_INLINE void turn(Vec<i32> ab, Vec<i32> cd, Vec<i32> (&columns)[2]) {
    const uint16x8_t ac = vzip1q_u16((uint16x8_t)ab, (uint16x8_t)cd), bd = vzip2q_u16((uint16x8_t)ab, (uint16x8_t)cd);
    columns[0] = (Vec<i32>)vzip1q_u16(ac, bd), columns[1] = (Vec<i32>)vzip2q_u16(ac, bd);
  }
  TW_INLINE Vec<i32> narrowed(Vec<float> a, Vec<float> b) {
    return (Vec<i32>)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b);
  }

  // Four rows of P or dS, from row j on: as a right operand, queries in its columns, ...
  TW_INLINE void store_columns(Word* to, i64 width, Vec<i32> ab, Vec<i32> cd) {
    Vec<i32> columns[2];
    turn(ab, cd, columns);
    store(to, columns[0]), store(to + width, columns[1]);
  }
  // ... and as a left one.
  TW_INLINE void store_rows(Word* to, i64 width, Vec<i32> ab, Vec<i32> cd) { store(to, ab), store(to + width, cd); }

  static Words<Word> along_depth(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const int whole = words(depth);
    for (int j = 0; j < rows; j += 2) {
      const Bf16* from = p + j * row;
      for (int d = 0; d < depth; d += 4, from += 4 * col)
        store(room + static_cast<i64>(j) * whole + d,
              both(four(from, col, depth - d), four(from + row, col, j + 1 < rows ? depth - d : 0)));
    }
    return {room, whole};
  }
  // Calls put(j, d, columns) of every four rows and columns; zeros where there is no row or column.
  template <class Put>
  TW_INLINE void quads(const Bf16* p, i64 row, i64 col, int rows, int depth, i64 width, const Put& put) {
    for (int j = 0; j < rows; j += 4) {
      for (int d = 0; d < width; d += 4) {
        uint16x4_t x[4];
        TW_UNROLL(4)
        for (int y = 0; y < 4; y++) x[y] = four(p + (j + y) * row + d * col, col, j + y < rows ? depth - d : 0);
        Vec<i32> columns[2];
        turn(both(x[0], x[1]), both(x[2], x[3]), columns);
        put(j, d, columns);
      }
    }
  }
  // A left operand with the rows along its contraction, and a right one.
  TW_NOINLINE static Words<Word> along_rows(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = round_up(depth, 4);
    quads(p, row, col, rows, depth, stride, [&](int j, int d, const Vec<i32>(&columns)[2]) {
      Word* to = room + j / 2 * stride + 2 * d;
      store(to, columns[0]), store(to + kLanes<i32>, columns[1]);
    });
    return {room, stride};
  }
  TW_NOINLINE static Words<Word> padded(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = round_up(depth, kLanes<float>);
    quads(p, row, col, rows, depth, stride, [&](int j, int d, const Vec<i32>(&columns)[2]) {
      Word* to = room + j / 2 * stride + d;
      store(to, columns[0]), store(to + stride, columns[1]);
    });
    return {room, stride};
  }
  static i64 rows_room(i64 rows, int depth) { return round_up(rows, 4) / 2 * round_up(depth, 4); }
  // Rows come in pieces of kSubKeys, so four of them are never cut.
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows / 2 * words.stride; }
  TW_NOINLINE static void transposed(const Bf16* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    for (int i = 0; i < width; i += 2) {
      for (int d = 0; d < depth; d += 4) {
        const Bf16* from = p + i * row + d * col;
        const int at = i % 4 == 0 ? i : i - 2;
        store(to + static_cast<i64>(d / 2 + i % 4 / 2) * width + at,
              both(four(from, col, i < rows ? depth - d : 0), four(from + row, col, i + 1 < rows ? depth - d : 0)));
      }
    }
  }
};

}  // namespace tilewise::TILEWISE_ISA
