// delta of every row as the sum over its keys of P * dP, which are computed again for it.
//
// The usual delta, rowsum(dO * O), takes O as it was stored. In a 16-bit type that leaves it eight bits or eleven, and
// every dS of the row has the same error. The gradients of q and k do not show it: they are rounded to that type
// themselves. A table in float32 does, above all where it adds up dS over keys, which cancel; and a table of one
// number, where all of them cancel, does in any type. This pass serves the gradients of such tables, at the cost of two
// products of five.
#pragma once

#include "passes/tile_gradients.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class KeyDeltaKernel {
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Tiles = TileGradients<Mode>;

 public:
  explicit KeyDeltaKernel(const Backward& f) : f_(f), tiles_(f) {}

  bool run() {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    std::size_t bytes;
    Memory(f_, nullptr, &bytes);
    return for_tasks(f_.threads, tasks.count(), bytes, [&](i64 task, void* base) {
      i64 b, h, tile;
      tasks.locate(task, b, h, tile);
      query_tile(b, h, tile * kTileQueries, Memory(f_, base));
    });
  }

 private:
  struct Memory {
    typename Tiles::Memory tile;
    Word *keys, *values;
    Memory(const Backward& f, void* base, std::size_t* bytes = nullptr) : Memory(f, Carver(base), bytes) {}

   private:
    Memory(const Backward& f, Carver carve, std::size_t* bytes) : tile(f, carve) {
      keys = carve.take<Word>(kRoomKeys * static_cast<i64>(f.head_dim));
      values = carve.take<Word>(kRoomKeys * static_cast<i64>(f.value_dim));
      if (bytes) *bytes = carve.used();
    }
  };

  void query_tile(i64 b, i64 h, i64 m0, Memory memory) const {
    const Sequence seq = sequence(f_, b);
    if (KeyBlocks(seq.keys).count == 1) return;  // see GradTile::one_block
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const ScoreChain<Acc> chain(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const GradTile<Mode>& state = memory.tile.tile;
    const i64 row = seq.query_begin + m0;
    Acc* to = rows_at<Acc>(f_.delta, b, h, row);
    for (int i = 0; i < rows; i++) to[i] = 0;  // where the tile's delta begins, once it is open
    for (int i = 0; i < kTileQueries; i++) state.weight[i] = 0;
    const Range all{0, seq.keys};
    const auto visit = [&](const MaskedTile& masked, Words<Word> keys, Words<Word> values) {
      tiles_.add_to_delta(seq, h, masked, keys, values, chain, memory.tile);
    };
    const bool opened = tiles_.each_block(seq, h, m0, mask, memory, all, visit);
    if (!opened) return;
    const Acc* row_sum = rows_at<Acc>(f_.row_sum, b, h, row);
    // The forward pass rescaled its sum as the maximum grew, so with the coarse exponential of the paired mode these
    // keys' weight differs a little from what it came to. It is made up for: dS of all keys adds up to nothing.
    for (int i = 0; i < rows; i++) to[i] = state.delta[i] / (1 + (state.weight[i] - row_sum[i] * state.inverse_sum[i]));
  }

  const Backward& f_;
  Tiles tiles_;
};

}  // namespace tilewise::TILEWISE_ISA
