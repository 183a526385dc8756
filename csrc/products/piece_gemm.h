// The matrix product of numbers that are sums of bfloat16 pieces, by matrix tiles (AMX).
//
// Why it is arranged so:
// - An operand has a plane of words for each of its pieces, in the layouts that TileGemm reads. The product of two
//   numbers is the sum of products of their pieces; those that are too small to count are left out.
// - Tiles of one step of the depth are loaded once or twice for all its pairs: loads, from the second cache too, take
//   less time than products.
// - Blocks, and the sums that stay in their registers until the next block needs these, are those of TileGemm.
#pragma once

#include "products/tile_gemm.h"

namespace tilewise::TILEWISE_ISA {

// Which piece of the left operand meets which one of the right: the largest is piece 0.
struct PiecePair {
  int a, b;
};

struct PieceGemm {
  using Word = i32;
  using Acc = float;
  using Pending = TileGemm::Pending;
  static constexpr int kSide = TileGemm::kSide, kStep = TileGemm::kStep;
  static void flush(Pending& last) { TileGemm::flush(last); }

  // C = A B, or C += A B. Pieces are `apart` words from each other; the depth is in words.
  struct Operands {
    const Word* a;
    i64 lda, a_apart;
    const Word* b;
    i64 ldb, b_apart;
    int rows, depth, width;
    Acc* c;
    i64 ldc;
  };

  // kPairs: a list of PiecePair, of which neighbours share a piece where they can: what both read stays in its
  // registers. Each step of the depth takes all pairs, so a sum is the same whether its depth is added up in one go or
  // in several.
  template <const auto& kPairs, bool kAdd>
  TW_NOINLINE static void run(const Operands& x, Pending& last, Ahead* ahead) {
    for (int r = 0; r < x.rows; r += 2 * kSide) {
      for (int column = 0; column < x.width; column += 2 * kSide) {
        const int rows = x.rows - r, columns = x.width - column;
        if (rows >= 2 * kSide && columns >= 2 * kSide && x.depth % kStep == 0) {
          whole_block<kPairs, kAdd>(x, r, column, last);
        } else {
          TileGemm::flush(last);
          if (rows > kSide && columns > kSide)
            edge_block<kPairs, kAdd, 2, 2>(x, r, column);
          else if (rows > kSide)
            edge_block<kPairs, kAdd, 2, 1>(x, r, column);
          else if (columns > kSide)
            edge_block<kPairs, kAdd, 1, 2>(x, r, column);
          else
            edge_block<kPairs, kAdd, 1, 1>(x, r, column);
        }
        if (ahead != nullptr)
          for (int y = 0; y < TileGemm::kAhead; y++) ahead->step();
      }
    }
  }

  // Calls step(pair, k) for each pair and step of the depth, in the order of a sum; without the first where `kRest`.
  template <const auto& kPairs, bool kRest, class Step>
  TW_INLINE void for_steps(int steps, const Step& step) {
    pairs_of<kPairs>([&](auto pair) __attribute__((always_inline)) {
      if constexpr (!kRest || decltype(pair)::value != 0) step(pair, 0);
    });
    for (int k = 1; k < steps; k++) pairs_of<kPairs>([&](auto pair) __attribute__((always_inline)) { step(pair, k); });
  }
  template <const auto& kPairs, class Call>
  TW_INLINE void pairs_of(const Call& call) {
    constexpr int count = sizeof kPairs / sizeof kPairs[0];
    call(Int<0>{});
    if constexpr (count > 1) call(Int<1>{});
    if constexpr (count > 2) call(Int<2>{});
    if constexpr (count > 3) call(Int<3>{});
    if constexpr (count > 4) call(Int<4>{});
    if constexpr (count > 5) call(Int<5>{});
    static_assert(count <= 6);
  }

  template <const auto& kPairs, bool kAdd>
  TW_INLINE void whole_block(const Operands& x, int r, int column, Pending& last) {
    const i64 row = x.lda * 4, word = x.ldb * 4;
    const Word *a = x.a + r * x.lda, *b = x.b + column;
    float* c = x.c + r * x.ldc + column;
    const Word *first_a = a + kPairs[0].a * x.a_apart, *first_b = b + kPairs[0].b * x.b_apart;
    if (last.c != nullptr)
      TileGemm::first_step<true, kAdd>(first_a, row, first_b, word, x.lda, c, x.ldc, last);
    else
      TileGemm::first_step<false, kAdd>(first_a, row, first_b, word, x.lda, c, x.ldc, last);
    for_steps<kPairs, true>(x.depth / kStep, [&](auto pair, int k) __attribute__((always_inline)) {
      constexpr int at = decltype(pair)::value;
      constexpr bool same_a = at > 0 && kPairs[at].a == kPairs[at > 0 ? at - 1 : 0].a;
      constexpr bool same_b = at > 0 && kPairs[at].b == kPairs[at > 0 ? at - 1 : 0].b;
      const Word* left = a + kPairs[at].a * x.a_apart + k * kStep;
      const Word* right = b + kPairs[at].b * x.b_apart + k * kStep * x.ldb;
      if constexpr (!same_b) load_tile<6>(right, word);
      if constexpr (!same_a) load_tile<4>(left, row);
      multiply_tiles<0, 4, 6>();
      if constexpr (!same_b) load_tile<7>(right + kSide, word);
      multiply_tiles<1, 4, 7>();
      if constexpr (!same_a) load_tile<5>(left + kSide * x.lda, row);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    });
    last = {c, x.ldc};
  }

  // 16 kR x 16 kC of C, of which rows may be missing; what is no whole tile is copied, zeros around it.
  template <const auto& kPairs, bool kAdd, int kR, int kC>
  TW_NOINLINE static void edge_block(const Operands& x, int r, int column) {
    alignas(64) Word left[2 * kSide * kSide], right[2 * kSide * kSide];
    alignas(64) float sums[4 * kSide * kSide];
    constexpr int width = kC * kSide;
    const int rows = x.rows - r < kR * kSide ? x.rows - r : kR * kSide, rest = x.depth % kStep;
    float* c = x.c + r * x.ldc + column;
    for (int y = 0; y < kR * kSide; y++)
      for (int i = 0; i < width; i += kSide)
        store(sums + y * width + i, kAdd && y < rows ? load(c + y * x.ldc + i) : Vec<float>{});
    load_tile<0>(sums, width * 4);
    if constexpr (kC == 2) load_tile<1>(sums + kSide, width * 4);
    if constexpr (kR == 2) load_tile<2>(sums + kSide * width, width * 4);
    if constexpr (kR == 2 && kC == 2) load_tile<3>(sums + kSide * width + kSide, width * 4);
    const int steps = x.depth / kStep + (rest != 0);
    for_steps<kPairs, false>(steps, [&](auto pair, int k) __attribute__((always_inline)) {
      constexpr int at = decltype(pair)::value;
      const Word* a = x.a + kPairs[at].a * x.a_apart + r * x.lda + k * kStep;
      const Word* b = x.b + kPairs[at].b * x.b_apart + k * kStep * x.ldb + column;
      const int words = rest != 0 && k == steps - 1 ? rest : kStep;
      i64 lda = x.lda, ldb = x.ldb;
      if (rows < kR * kSide || words < kStep) {
        for (int i = 0; i < kR; i++)
          TileGemm::copy_words(a + i * kSide * x.lda, x.lda, rows - i * kSide, words, left + i * kSide * kSide);
        a = left, lda = kSide;
      }
      if (words < kStep) {
        for (int y = 0; y < kSide; y++)
          for (int j = 0; j < kC; j++)
            store(right + y * width + j * kSide, y < words ? load(b + y * x.ldb + j * kSide) : Vec<i32>{});
        b = right, ldb = width;
      }
      TileGemm::add_step<kR, kC>(a, lda * 4, b, ldb * 4, lda);
    });
    store_tile<0>(sums, width * 4);
    if constexpr (kC == 2) store_tile<1>(sums + kSide, width * 4);
    if constexpr (kR == 2) store_tile<2>(sums + kSide * width, width * 4);
    if constexpr (kR == 2 && kC == 2) store_tile<3>(sums + kSide * width + kSide, width * 4);
    for (int y = 0; y < rows; y++)
      for (int i = 0; i < width; i += kSide) store(c + y * x.ldc + i, load(sums + y * width + i));
  }
};

}  // namespace tilewise::TILEWISE_ISA
