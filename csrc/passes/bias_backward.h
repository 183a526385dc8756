// The gradient of a bias: dS of every tile, added up over the dimensions that the bias was broadcast over. A task
// owns a piece of the result and visits what falls on it in a fixed order, so no two threads meet and the sum is
// the same to the bit every time.
#pragma once

#include "passes/tile_gradients.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class BiasKernel {
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Tiles = TileGradients<Mode>;
  static constexpr int lanes = kLanes<Acc>;

 public:
  explicit BiasKernel(const BiasBackward& f) : f_(f), tiles_(f), to_(f.grad_bias) {}

  bool run() {
    const i64 query_tiles = (f_.queries + kTileQueries - 1) / kTileQueries, key_blocks = KeyBlocks(f_.keys).count;
    const i64 batches = to_.batch ? f_.batch : 1, heads = to_.head ? f_.heads : 1;
    const i64 tiles = to_.row ? query_tiles : 1, blocks = to_.col ? key_blocks : 1;
    std::size_t bytes;
    Memory(f_, nullptr, &bytes);
    return for_tasks<typename Mode::Session>(
        f_.threads, batches * heads * tiles * blocks, bytes, [&](i64 task, void* base) {
          Memory memory(f_, base);
          const i64 x = task % blocks, t = task / blocks % tiles;
          const i64 h = task / (blocks * tiles) % heads, b = task / (blocks * tiles * heads);
          for (i64 bb = to_.batch ? b : 0; bb < (to_.batch ? b + 1 : f_.batch); bb++)
            for (i64 hh = to_.head ? h : 0; hh < (to_.head ? h + 1 : f_.heads); hh++)
              for (i64 tt = to_.row ? t : 0; tt < (to_.row ? t + 1 : query_tiles); tt++)
                query_tile(bb, hh, tt, to_.col ? x : -1, memory);
        });
  }

 private:
  struct Memory {
    typename Tiles::Memory tile;
    Word *keys, *values;
    Acc* turned;
    Memory(const Backward& f, void* base, std::size_t* bytes = nullptr) : Memory(f, Carver(base), bytes) {}

   private:
    Memory(const Backward& f, Carver carve, std::size_t* bytes) : tile(f, carve) {
      keys = carve.take<Word>(key_room<Mode>(kRoomKeys, f.head_dim));
      values = carve.take<Word>(key_room<Mode>(kRoomKeys, f.value_dim));
      turned = carve.take<Acc>((kRoomKeys + lanes) * kTileQueries);
      if (bytes) *bytes = carve.used();
    }
  };

  // `piece`: the columns [piece, piece + 1) * kBlockKeys of the result that the task owns, the last one all that
  // follow; -1 for all. Blocks of a sequence need not end where pieces do: what sticks out is left to its owner.
  void query_tile(i64 b, i64 h, i64 tile, i64 piece, Memory& memory) const {
    const Sequence seq = sequence(f_, b);
    const i64 m0 = tile * kTileQueries;
    if (m0 >= seq.queries) return;
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const ScoreChain<Acc> chain(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const KeyBlocks blocks(mask.key_limit());
    const bool last_piece = piece < 0 || piece + 1 == KeyBlocks(f_.keys).count;
    const Range own{max(piece, 0) * kBlockKeys, last_piece ? blocks.limit : (piece + 1) * kBlockKeys};
    const auto visit = [&](const MaskedTile& masked, Words<Word> keys, Words<Word> values) {
      tiles_.template compute<true>(seq, h, masked, keys, values, chain, memory.tile, f_.index + 1);
      const Range part{max(own.begin, masked.begin), min(own.end, masked.end)};
      if (part.begin >= part.end) return;
      const Acc* ds = memory.tile.grads + (part.begin - masked.begin) * memory.tile.tile.width;
      const i64 at = b * to_.batch + h * to_.head + m0 * to_.row + part.begin * to_.col;
      const int columns = static_cast<int>(part.end - part.begin);
      if (f_.wide)
        add(static_cast<double*>(const_cast<void*>(to_.data)) + at, ds, rows, columns, memory);
      else
        add(static_cast<Acc*>(const_cast<void*>(to_.data)) + at, ds, rows, columns, memory);
    };
    tiles_.each_block(seq, h, m0, mask, memory, own, visit);
  }

  // to[i][j] += ds[j][i], or the sums over what the bias is broadcast over.
  template <class To>
  void add(To* to, const Acc* ds, int rows, int count, Memory& memory) const {
    const int width = memory.tile.tile.width;
    if (to_.row == 0) {
      To all = 0;
      for (int j = 0; j < count; j++) {
        Acc sum = 0;
        for (int i = 0; i < rows; i++) sum += ds[static_cast<i64>(j) * width + i];
        if (to_.col) to[j * to_.col] += sum;
        all += sum;
      }
      if (to_.col == 0) *to += all;
      return;
    }
    if (to_.col == 0) {
      for (int i = 0; i < rows; i++) {
        Acc sum = 0;
        for (int j = 0; j < count; j++) sum += ds[static_cast<i64>(j) * width + i];
        to[i * to_.row] += sum;
      }
      return;
    }
    const int turned = static_cast<int>(round_up(count, lanes));
    pack_transposed(ds, width, 1, count, rows, turned, memory.turned);
    for (int i = 0; i < rows; i++) {
      const Acc* from = memory.turned + static_cast<i64>(i) * turned;
      for (int j = 0; j < count; j++) to[i * to_.row + j] += from[j];
    }
  }

  const BiasBackward& f_;
  Tiles tiles_;
  View to_;  // col is 1 or 0
};

}  // namespace tilewise::TILEWISE_ISA
