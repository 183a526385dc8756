// The matrix product of bfloat16 by matrix tiles (AMX).
//
// Why it is arranged so:
// - All five products of attention have one form here: rows of words (pairs along the contraction) times words of
//   pairs of rows. S^T = K Q^T and dP^T = V dO^T read keys and values where they lie; O^T = V^T P^T and dQ^T = K^T dS^T
//   read them transposed, packed once for all tiles of queries; dV = P^T dO and dK = dS^T Q read P and dS as the
//   softmax left them.
// - A block of C is 2 x 2 tiles: then each tile that is loaded meets two others.
// - A store waits for its product, and the next use of its register waits for the store. So the sums of a block stay in
//   their registers until the first products of the next block: each register is stored just before that block needs
//   it, and the products of the others hide the store.
// - A tile instruction adds up 32 products and then adds these to C: chains of additions are short, so C itself may be
//   loaded, and added to, by tiles.
// - What is no whole tile (rows, or the depth) is copied, zeros around it. A hidden number never meets a zero, so that
//   NaN and infinity stay where they are.
#pragma once

#include "products/amx.h"
#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

struct TileGemm {
  using Word = i32;
  using Acc = float;
  static constexpr int kSide = 16;  // rows of a tile, and words of its rows
  static constexpr int kStep = kSide;
  static constexpr int kAhead = 4;  // calls of Ahead::step() for a block

  // C[16 kR][16 kC] (+)= A B over `steps` tiles of the depth. Strides in words.
  template <int kR, int kC, bool kAdd>
  TW_INLINE void block(const Word* a, i64 lda, const Word* b, i64 ldb, int steps, float* c, i64 ldc) {
    const i64 row = lda * 4, word = ldb * 4, sum = ldc * 4;
    if constexpr (kAdd) {
      load_tile<0>(c, sum);
      if constexpr (kC == 2) load_tile<1>(c + kSide, sum);
      if constexpr (kR == 2) load_tile<2>(c + kSide * ldc, sum);
      if constexpr (kR == 2 && kC == 2) load_tile<3>(c + kSide * ldc + kSide, sum);
    } else {
      clear_tile<0>();
      if constexpr (kC == 2) clear_tile<1>();
      if constexpr (kR == 2) clear_tile<2>();
      if constexpr (kR == 2 && kC == 2) clear_tile<3>();
    }
    for (int k = 0; k < steps; k++) add_step<kR, kC>(a + k * kStep, row, b + k * kStep * ldb, word, lda);
    store_tile<0>(c, sum);
    if constexpr (kC == 2) store_tile<1>(c + kSide, sum);
    if constexpr (kR == 2) store_tile<2>(c + kSide * ldc, sum);
    if constexpr (kR == 2 && kC == 2) store_tile<3>(c + kSide * ldc + kSide, sum);
  }

  template <int kR, int kC>
  TW_INLINE void add_step(const Word* a, i64 row, const Word* b, i64 word, i64 lda) {
    load_tile<6>(b, word);
    load_tile<4>(a, row);
    multiply_tiles<0, 4, 6>();
    if constexpr (kC == 2) {
      load_tile<7>(b + kSide, word);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (kR == 2) {
      load_tile<5>(a + kSide * lda, row);
      multiply_tiles<2, 5, 6>();
    }
    if constexpr (kR == 2 && kC == 2) multiply_tiles<3, 5, 7>();
  }

  // A block of 2 x 2 tiles whose sums are still in their registers.
  struct Pending {
    float* c = nullptr;
    i64 stride = 0;
  };
  template <int kTile>
  static float* place(float* c, i64 stride) {
    return c + kTile / 2 * kSide * stride + kTile % 2 * kSide;
  }
  static void flush(Pending& last) {
    if (last.c == nullptr) return;
    const i64 sum = last.stride * 4;
    store_tile<0>(place<0>(last.c, last.stride), sum);
    store_tile<1>(place<1>(last.c, last.stride), sum);
    store_tile<2>(place<2>(last.c, last.stride), sum);
    store_tile<3>(place<3>(last.c, last.stride), sum);
    last.c = nullptr;
  }

  // C (+)= A B of whole blocks of 2 x 2 tiles. Stores what is pending; the last block becomes pending. Strides in
  // words.
  template <bool kAdd>
  TW_NOINLINE static void grid(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int steps, int width, float* c,
                               i64 ldc, Pending& last, Ahead* ahead = nullptr) {
    const i64 row = lda * 4, word = ldb * 4;
    for (int r = 0; r < rows; r += 2 * kSide) {
      for (int column = 0; column < width; column += 2 * kSide) {
        const Word *left = a + r * lda, *right = b + column;
        float* to = c + r * ldc + column;
        if (last.c != nullptr)
          first_step<true, kAdd>(left, row, right, word, lda, to, ldc, last);
        else
          first_step<false, kAdd>(left, row, right, word, lda, to, ldc, last);
        for (int k = 1; k < steps; k++) add_step<2, 2>(left + k * kStep, row, right + k * kStep * ldb, word, lda);
        last = {to, ldc};
        if (ahead != nullptr)
          for (int x = 0; x < kAhead; x++) ahead->step();
      }
    }
  }
  template <bool kStore, bool kAdd>
  TW_INLINE void first_step(const Word* a, i64 row, const Word* b, i64 word, i64 lda, float* c, i64 ldc,
                            const Pending& last) {
    const auto turn = [&](auto number) __attribute__((always_inline)) {
      constexpr int tile = decltype(number)::value;
      if constexpr (kStore) store_tile<tile>(place<tile>(last.c, last.stride), last.stride * 4);
      if constexpr (kAdd)
        load_tile<tile>(place<tile>(c, ldc), ldc * 4);
      else
        clear_tile<tile>();
    };
    load_tile<6>(b, word);
    load_tile<4>(a, row);
    turn(Int<0>{});
    multiply_tiles<0, 4, 6>();
    load_tile<7>(b + kSide, word);
    turn(Int<1>{});
    multiply_tiles<1, 4, 7>();
    load_tile<5>(a + kSide * lda, row);
    turn(Int<2>{});
    multiply_tiles<2, 5, 6>();
    turn(Int<3>{});
    multiply_tiles<3, 5, 7>();
  }
  static bool whole(int rows, int depth, int width) {
    return rows % (2 * kSide) == 0 && depth % kStep == 0 && width % (2 * kSide) == 0;
  }

  // Rows [0, rows) and words [0, words) of a tile's place, zeros around them.
  static void copy_words(const Word* from, i64 stride, int rows, int words, Word* to, i64 to_stride = kSide) {
    for (int r = 0; r < kSide; r++)
      store(to + r * to_stride, r < rows ? load_first(from + r * stride, words) : Vec<i32>{});
  }

  // An operand whose last tile along the depth has fewer words: `steps` whole ones, and a copy of the rest.
  struct Depth {
    int steps, rest;
    explicit Depth(int depth) : steps(depth / kStep), rest(depth % kStep) {}
  };

  // kR x kC tiles of C from copies of what is no whole tile: `rows` of A count, and `rest` words of the last tile of
  // the depth. C goes through a copy where rows are missing.
  template <int kR, int kC, bool kAdd>
  TW_NOINLINE static void ragged_block(const Word* a, i64 lda, int rows, const Word* b, i64 ldb, Depth depth, float* c,
                                       i64 ldc) {
    alignas(64) Word left[2 * kSide * kSide], right[2 * kSide * kSide];
    alignas(64) float sums[4 * kSide * kSide];
    const int width = kC * kSide;
    for (int r = 0; r < kR * kSide; r++)
      for (int i = 0; i < width; i += kSide)
        store(sums + r * width + i, kAdd && r < rows ? load(c + r * ldc + i) : Vec<float>{});
    load_tile<0>(sums, width * 4);
    if constexpr (kC == 2) load_tile<1>(sums + kSide, width * 4);
    if constexpr (kR == 2) load_tile<2>(sums + kSide * width, width * 4);
    if constexpr (kR == 2 && kC == 2) load_tile<3>(sums + kSide * width + kSide, width * 4);
    for (int k = 0; k < depth.steps + (depth.rest != 0); k++) {
      const bool whole = k < depth.steps;
      const int words = whole ? kStep : depth.rest;
      const Word *from_a = a + k * kStep, *from_b = b + k * kStep * ldb;
      i64 a_stride = lda, b_stride = ldb;
      if (!whole || rows < kR * kSide) {
        for (int i = 0; i < kR; i++)
          copy_words(from_a + i * kSide * lda, lda, rows - i * kSide, words, left + i * kSide * kSide);
        from_a = left, a_stride = kSide;
      }
      if (!whole) {
        for (int j = 0; j < kC; j++) copy_words(from_b + j * kSide, ldb, words, kSide, right + j * kSide, kC * kSide);
        from_b = right, b_stride = kC * kSide;
      }
      add_step<kR, kC>(from_a, a_stride * 4, from_b, b_stride * 4, a_stride);
    }
    store_tile<0>(sums, width * 4);
    if constexpr (kC == 2) store_tile<1>(sums + kSide, width * 4);
    if constexpr (kR == 2) store_tile<2>(sums + kSide * width, width * 4);
    if constexpr (kR == 2 && kC == 2) store_tile<3>(sums + kSide * width + kSide, width * 4);
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < width; i += kSide) store(c + r * ldc + i, load(sums + r * width + i));
  }

  // Of 16 kR rows (the last of them may be missing) and 16 kC columns.
  template <int kR, int kC, bool kAdd>
  TW_INLINE void rows_by_columns(const Word* a, i64 lda, int rows, const Word* b, i64 ldb, Depth depth, float* c,
                                 i64 ldc) {
    if (rows < kR * kSide || depth.rest != 0)
      ragged_block<kR, kC, kAdd>(a, lda, rows, b, ldb, depth, c, ldc);
    else
      block<kR, kC, kAdd>(a, lda, b, ldb, depth.steps, c, ldc);
  }

  // All rows of kC tiles of columns.
  template <int kC, bool kAdd, bool kPeak>
  TW_NOINLINE static void columns(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, float* c,
                                  i64 ldc, float* peak_out, Ahead* ahead) {
    const Depth whole(depth);
    Vec<float> peak[kC];
    TW_UNROLL(2)
    for (int v = 0; v < kC; v++) peak[v] = set(-__builtin_inff());
    const auto add_peaks = [&](int from, int to) __attribute__((always_inline)) {
      for (int r = from; r < to; r++) {
        TW_UNROLL(2)
        for (int v = 0; v < kC; v++) peak[v] = vmax(load(c + r * ldc + v * kSide), peak[v]);
      }
    };
    int r = 0, looked = 0;
    for (; r < rows; r += 2 * kSide) {
      const int left = rows - r;
      if (left > kSide)
        rows_by_columns<2, kC, kAdd>(a + r * lda, lda, left < 2 * kSide ? left : 2 * kSide, b, ldb, whole, c + r * ldc,
                                     ldc);
      else
        rows_by_columns<1, kC, kAdd>(a + r * lda, lda, left, b, ldb, whole, c + r * ldc, ldc);
      // The block before: this one's stores wait for its products.
      if constexpr (kPeak) add_peaks(looked, r);
      looked = r;
      if (ahead != nullptr)
        for (int x = 0; x < kAhead; x++) ahead->step();
    }
    if constexpr (kPeak) {
      add_peaks(looked, rows);
      TW_UNROLL(2)
      for (int v = 0; v < kC; v++) store(peak_out + v * kSide, peak[v]);
    }
  }

  template <bool kAdd, bool kPeak>
  static void multiply(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, int width, float* c,
                       i64 ldc, float* peak, Ahead* ahead) {
    if constexpr (!kPeak) {
      if (whole(rows, depth, width)) {
        Pending last;
        grid<kAdd>(a, lda, b, ldb, rows, depth / kStep, width, c, ldc, last, ahead);
        return flush(last);
      }
    }
    int column = 0;
    for (; column + 2 * kSide <= width; column += 2 * kSide)
      columns<2, kAdd, kPeak>(a, lda, b + column, ldb, rows, depth, c + column, ldc, kPeak ? peak + column : nullptr,
                              ahead);
    if (column < width)
      columns<1, kAdd, kPeak>(a, lda, b + column, ldb, rows, depth, c + column, ldc, kPeak ? peak + column : nullptr,
                              ahead);
  }

  // A product, as grid() has it.
  struct Operands {
    const Word* a;
    i64 lda;
    const Word* b;
    i64 ldb;
    int rows, depth, width;
    Acc* c;
    i64 ldc;
  };
  // C (+)= A B of one, then of another, which may have no rows. In one run where both are of whole blocks.
  template <Into kFirst, Into kSecond>
  static void run_two(const Operands& x, const Operands& y, Ahead* ahead) {
    if (!whole(x.rows, x.depth, x.width) || !whole(y.rows, y.depth, y.width)) {
      multiply<kFirst == Into::add, false>(x.a, x.lda, x.b, x.ldb, x.rows, x.depth, x.width, x.c, x.ldc, nullptr,
                                           ahead);
      if (y.rows > 0)
        multiply<kSecond == Into::add, false>(y.a, y.lda, y.b, y.ldb, y.rows, y.depth, y.width, y.c, y.ldc, nullptr,
                                              ahead);
      return;
    }
    Pending last;
    grid<kFirst == Into::add>(x.a, x.lda, x.b, x.ldb, x.rows, x.depth / kStep, x.width, x.c, x.ldc, last, ahead);
    grid<kSecond == Into::add>(y.a, y.lda, y.b, y.ldb, y.rows, y.depth / kStep, y.width, y.c, y.ldc, last, ahead);
    flush(last);
  }

  // As Gemm::run. What that reads with its columns along the rows of C is transposed here (TileMode::along_rows), so
  // that the order of A says nothing more.
  template <AOrder, Into kInto, bool kPeak = false>
  static void run(const Word* a, i64 lda, const Word* b, i64 ldb, int rows, int depth, int width, Acc* c, i64 ldc,
                  const Acc* alpha = nullptr, Acc* peak = nullptr, Ahead* ahead = nullptr, bool = false) {
    if constexpr (kInto == Into::rescale) {
      u64 same = ~u64{0};
      for (int i = 0; i < width; i += kSide) same &= bits_of_mask<i32>((Vec<i32>)(load(alpha + i) == 1.0f));
      if (same == ~u64{0} >> 48) return multiply<true, kPeak>(a, lda, b, ldb, rows, depth, width, c, ldc, peak, ahead);
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i += kSide) store(c + r * ldc + i, load(c + r * ldc + i) * load(alpha + i));
    }
    multiply<kInto != Into::overwrite, kPeak>(a, lda, b, ldb, rows, depth, width, c, ldc, peak, ahead);
  }

  // An entry of a product, of each lane, added up in the order of the tile instruction: even and odd places apart over
  // 16 words, then both, then to the rest.
  TW_INLINE Vec<float> inner(const Word* a, const Word* b, i64 stride, int words, bool) {
    Vec<float> sum{};
    for (int d = 0; d < words; d += kStep) sum = add_inner(a + d * stride, b + d * stride, stride, sum);
    return sum;
  }
  // One step of the depth.
  TW_INLINE Vec<float> add_inner(const Word* a, const Word* b, i64 stride, Vec<float> sum) {
    Vec<float> even{}, odd{};
    for (int x = 0; x < kStep; x++) {
      const Vec<i32> p = load(a + x * stride), q = load(b + x * stride);
      even = fused((Vec<float>)(p << 16), (Vec<float>)(q << 16), even);
      odd = fused((Vec<float>)(p & -65536), (Vec<float>)(q & -65536), odd);
    }
    return sum + (even + odd);
  }
};

}  // namespace tilewise::TILEWISE_ISA
