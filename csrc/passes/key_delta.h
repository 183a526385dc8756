// Refines delta of every row by the sum over its keys of P * (dP - delta), which are computed again for it.
//
// The usual delta, rowsum(dO * O), takes O as it was stored, and every dS of the row has the error of its rounding.
// Mostly the gradients of q and k do not show it. Three kinds of calls do, and this pass serves them at the cost of two
// products of five:
// - A table in float32 beside 16-bit operands, above all where it adds up dS over keys, which cancel. A table of one
//   number, where all of them cancel, shows it in any type.
// - Equal values for all keys, and few queries: the backward pass finds those by itself (`shows`).
#pragma once

#include "passes/tile_gradients.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode>
class KeyDeltaKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Tiles = TileGradients<Mode>;

 public:
  explicit KeyDeltaKernel(const Backward& f) : f_(f), tiles_(f) {}

  bool run() {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    return for_tasks<typename Mode::Session>(f_.threads, tasks.count(), room(), [&](i64 task, void* base) {
      i64 b, h, tile;
      tasks.locate(task, b, h, tile);
      query_tile(b, h, tile * kTileQueries, base);
    });
  }

  std::size_t room() const {
    std::size_t bytes;
    Memory(f_, nullptr, &bytes);
    return bytes;
  }

  // Whether the rounding of O would show in the gradients of q and k. With equal values, dP of all keys has one and the
  // same rounding error, which cancels in dS. And a few rows with nearly one-hot probabilities have no others beside
  // them whose errors are as large.
  bool shows(const Sequence& seq, i64 h) const {
    if (f_.partial || KeyBlocks(seq.keys).count == 1) return false;  // see GradTile::one_block
    return seq.queries <= kFewRows || same_values(seq, h / (f_.heads / f_.kv_heads));
  }

  // Refines delta of the rows of a tile; `base` has room().
  void query_tile(i64 b, i64 h, i64 m0, void* base) const { query_tile(b, h, m0, Memory(f_, base)); }

 private:
  static constexpr i64 kFewRows = 16, kSamples = 8;

  // Whether some keys, spread over the sequence, have the same values to the bit. They stand for the others: a mistake
  // costs time, or leaves the rounding that it would have taken away.
  bool same_values(const Sequence& seq, i64 kv_head) const {
    const Elem* v = Mode::at(f_.v.data, view_at(f_.v, seq.b, kv_head, seq.key_begin));
    for (i64 x = 1; x < kSamples; x++) {
      const Elem* other = v + (seq.keys - 1) * x / (kSamples - 1) * f_.v.row;
      for (i64 d = 0; d < f_.value_dim; d++)
        if (std::memcmp(v + d * f_.v.col, other + d * f_.v.col, sizeof(Elem)) != 0) return false;
    }
    return true;
  }

  struct Memory {
    typename Tiles::Memory tile;
    Word *keys, *values;
    Memory(const Backward& f, void* base, std::size_t* bytes = nullptr) : Memory(f, Carver(base), bytes) {}

   private:
    Memory(const Backward& f, Carver carve, std::size_t* bytes) : tile(f, carve) {
      keys = carve.take<Word>(key_room<Mode>(kRoomKeys, f.head_dim));
      values = carve.take<Word>(key_room<Mode>(kRoomKeys, f.value_dim));
      if (bytes) *bytes = carve.used();
    }
  };

  void query_tile(i64 b, i64 h, i64 m0, Memory memory) const {
    const Sequence seq = sequence(f_, b);
    if (KeyBlocks(seq.keys).count == 1) return;
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const ScoreChain<Acc> chain(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const GradTile<Mode>& state = memory.tile.tile;
    const i64 row = seq.query_begin + m0;
    for (int i = 0; i < kTileQueries; i++) state.excess[i] = state.weight[i] = 0;
    const Range all{0, seq.keys};
    const auto visit = [&](const MaskedTile& masked, Words<Word> keys, Words<Word> values) {
      tiles_.add_excess(seq, h, masked, keys, values, chain, memory.tile);
    };
    const bool opened = tiles_.each_block(seq, h, m0, mask, memory, all, visit);
    if (!opened) return;
    const Acc* row_sum = rows_at<Acc>(f_.row_sum, b, h, row);
    Acc* delta = rows_at<Acc>(f_.delta, b, h, row);
    // The forward pass rescaled its sum as the maximum grew, so with the coarse exponential of the paired mode these
    // keys' weight differs a little from what it came to. It is made up for: dS of all keys adds up to nothing.
    for (int i = 0; i < rows; i++) {
      const Acc weight = 1 + (state.weight[i] - row_sum[i] * state.inverse_sum[i]);
      delta[i] += (state.excess[i] - delta[i] * state.absent[i]) / weight;
    }
  }

  const Backward& f_;
  Tiles tiles_;
};

}  // namespace tilewise::TILEWISE_ISA
