// The products of short bfloat16 sequences whose heads share no keys and are no wider than two tiles, where there are
// tiles: scores by tiles, as TileProducts has them, and sums of widened values.
#pragma once

#include "decode/tiles.h"

namespace tilewise::TILEWISE_ISA {

class HybridProducts : TileProducts {
  using Widened = PlainMode<Bf16, float>;
  using Sums = FewRows<Widened>;

 public:
  static constexpr i64 alone = 3;
  static bool serves(int depth) { return depth == kTileDepth || depth == 2 * kTileDepth; }

  struct Vectors {
    using Key = Bf16;
    static constexpr int unit = 1, sums = RowVectors<Widened>::sums;
    // In pairs: half of the words are not in use.
    static void pack(const Bf16* from, i64 row, i64 col, int rows, int depth, i64 stride, float* to) {
      if (rows > 1 || col != 1)
        return RowVectors<PairMode>::pack(from, row, col, rows, depth, stride, reinterpret_cast<i32*>(to));
      for (int d = 0; d < depth; d += kTileDepth) store(to + d / 2, (Vec<float>)words_of(from + d, kTileDepth));
    }
    static void weights(float*, int) {}
  };

  struct Room {
    TileProducts::Room several;
    TileShapes* shapes;  // of single rows
    Room(Carver& carve, i64 rows, int depth) : several(carve, rows, depth), shapes(carve.take<TileShapes>(1)) {}

    // Sums and the query are columns of one number, or pair. Few registers are in use: where another thread is busy on
    // the same core, products by six of them took 1.2 times as long as by four, and by eight 2.1 times as by four.
    void open(const float* q, i64 q_stride, int rows, int depth) const {
      if (rows > alone) return several.open(reinterpret_cast<const i32*>(q), q_stride, rows, depth);
      *shapes = TileShapes();
      shapes->set(0, kTileRows, 4), shapes->set(1, kTileRows, kTileBytes);
      for (int part = 0; part < depth / kTileDepth; part++) shapes->set(2 + part, kTileRows, 4);
      shapes->use();
    }
    void close() const { several.close(); }
  };

  static void dots(const Room& room, const float* q, i64 q_stride, int row0, int rows, const Bf16* const* keys,
                   int count, int depth, float* s, i64 stride, RowsAhead& ahead) {
    if (rows > alone)
      return TileProducts::dots(room.several, nullptr, 0, row0, rows, keys, count, depth, s, stride, ahead);
    ahead.spread((ahead.left() + 1) / 2, count / kSubKeys);
    for (int j = 0; j < count; j += kSubKeys) {
      ahead.step();
      for (int r = 0; r < rows; r++)
        dot_row(room, q + (row0 + r) * q_stride, RowPointers<Bf16>{keys + j}, kSubKeys, depth, s + r * stride + j);
    }
  }
  template <class Keys>
  static void dot_row(const Room& room, const float* q, const Keys& keys, int count, int depth, float* s) {
    if (depth == kTileDepth)
      row_tiles<1>(room, q, keys, count, s);
    else
      row_tiles<2>(room, q, keys, count, s);
  }

  static void sums(const Room&, const float* p, int rows, const Bf16* const* values, int keys, int width, float* out,
                   i64 out_stride, const float* alpha, RowsAhead& ahead) {
    Sums::sums({}, p, rows, values, keys, width, out, out_stride, alpha, ahead);
  }
  template <class Values>
  static void sum_row(const float* p, const Values& values, int keys, int width, float* out, float alpha) {
    Sums::sum_row(p, values, keys, width, out, alpha);
  }

 private:
  template <int kParts>
  static KeyRows group_of(const Room& room, const RowPointers<Bf16>& keys) {
    return rows_of(room.several.keys, keys.rows, kParts * kTileDepth);
  }
  template <int kParts>
  static KeyRows group_of(const Room&, const EvenRows<Bf16>& keys) {
    return {keys.first, keys.apart * 2};
  }

  template <int kParts, class Keys>
  TW_NOINLINE static void row_tiles(const Room& room, const float* q, const Keys& keys, int count, float* s) {
    load_tile<2>(q, 4);
    if constexpr (kParts > 1) load_tile<3>(q + kTileRows, 4);
    for (int j = 0; j < count; j += kSubKeys) {
      const KeyRows at = group_of<kParts>(room, keys.from(j));
      clear_tile<0>();
      load_tile<1>(at.first, at.bytes), multiply_tiles<0, 1, 2>();
      if constexpr (kParts > 1) load_tile<1>(at.first + kTileDepth, at.bytes), multiply_tiles<0, 1, 3>();
      store_tile<0>(s + j, 4);
    }
  }
};

}  // namespace tilewise::TILEWISE_ISA
