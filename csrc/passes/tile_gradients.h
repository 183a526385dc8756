// P and dS of one tile of queries against a block of keys: what the gradients of the operands and of a bias share.
#pragma once

#include "passes/forward.h"

namespace tilewise::TILEWISE_ISA {

// One tile of queries with everything that a tile product of the backward pass reads of it.
template <class Mode>
struct GradTile {
  using Word = typename Mode::Word;
  using Acc = typename Mode::Acc;
  i64 first;
  int rows, width;
  Word *q, *grad_out;  // transposed: [words(D)][width], [words(Dv)][width]
  Words<Word> q_rows, grad_rows;
  Acc *row_max, *inverse_sum, *delta;
  Acc *excess, *weight;  // of key_delta.h alone
  Acc* absent;           // the sink's probability: what those of the keys lack to 1
  Acc *slope, *center;   // of the entropy's gradient, see open_entropy
  Acc* grad_lse;
  bool one_block;  // all keys of the sequence are in one block: delta is summed from the tile itself
};

// Computes P and dS of a tile; shared by the gradients of the operands and of a bias.
template <class Mode>
class TileGradients {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Product = typename Mode::Product;
  static constexpr int lanes = kLanes<Acc>;

 public:
  explicit TileGradients(const Backward& f) : f_(f), units_(f) {
    for (int i = 0; i < f.score_length; i++)
      bends_ |= f.score[i].op == ScoreOp::softcap || (f.score[i].op == ScoreOp::expr && !adds(*f.score[i].slope));
  }

  struct Memory {
    GradTile<Mode> tile{};
    Word *q_room, *grad_room;
    Acc *scores, *grads, *gain;
    Word *p_rows, *ds_rows;  // of the paired mode: the lanes packed in pairs
    u64 *bits, *kept;
    char* expr;
    Memory(const Backward& f, Carver& carve) {
      const i64 depth = round_up(f.head_dim, lanes), value = round_up(f.value_dim, lanes);
      tile.q = carve.take<Word>(kTileQueries * depth);
      tile.grad_out = carve.take<Word>(kTileQueries * value);
      q_room = carve.take<Word>(kTileQueries * depth);
      grad_room = carve.take<Word>(kTileQueries * value);
      tile.row_max = carve.take<Acc>(kTileQueries);
      tile.inverse_sum = carve.take<Acc>(kTileQueries);
      tile.delta = carve.take<Acc>(kTileQueries);
      tile.excess = carve.take<Acc>(kTileQueries);
      tile.weight = carve.take<Acc>(kTileQueries);
      tile.absent = carve.take<Acc>(kTileQueries);
      tile.slope = carve.take<Acc>(kTileQueries);
      tile.center = carve.take<Acc>(kTileQueries);
      tile.grad_lse = carve.take<Acc>(kTileQueries);
      scores = carve.take<Acc>(kRoomKeys * kTileQueries);
      grads = carve.take<Acc>(kRoomKeys * kTileQueries);
      gain = carve.take<Acc>(kRoomKeys * kTileQueries);
      p_rows = carve.take<Word>(kRoomKeys * kTileQueries / 2);
      ds_rows = carve.take<Word>(kRoomKeys * kTileQueries / 2);
      bits = carve.take<u64>(kRoomKeys);
      kept = carve.take<u64>(kRoomKeys + 4);
      expr = carve.take<char>(f.expr_room);
    }
  };

  void open(const Sequence& seq, i64 h, i64 first, Memory& memory) const {
    GradTile<Mode>& tile = memory.tile;
    tile.first = first;
    tile.rows = static_cast<int>(min(kTileQueries, seq.queries - first));
    tile.width = static_cast<int>(round_up(tile.rows, lanes));
    const i64 row = seq.query_begin + first;
    const Elem* q = Mode::at(f_.q.data, view_at(f_.q, seq.b, h, row));
    const Elem* g = Mode::at(f_.grad_out.data, view_at(f_.grad_out, seq.b, h, row));
    Mode::transposed(q, f_.q.row, f_.q.col, tile.rows, f_.head_dim, tile.width, tile.q);
    Mode::transposed(g, f_.grad_out.row, f_.grad_out.col, tile.rows, f_.value_dim, tile.width, tile.grad_out);
    tile.q_rows = Mode::padded(q, f_.q.row, f_.q.col, tile.rows, f_.head_dim, memory.q_room);
    tile.grad_rows = Mode::padded(g, f_.grad_out.row, f_.grad_out.col, tile.rows, f_.value_dim, memory.grad_room);
    const Acc infinity = static_cast<Acc>(__builtin_inf());
    const Acc* row_max = rows_at<Acc>(f_.row_max, seq.b, h, row);
    const Acc* row_sum = rows_at<Acc>(f_.row_sum, seq.b, h, row);
    const Acc* delta = rows_at<Acc>(f_.delta, seq.b, h, row);
    const Acc* grad_lse = f_.grad_lse.data ? rows_at<Acc>(f_.grad_lse, seq.b, h, row) : nullptr;
    // The sum over this tile's keys is that of the row only where the row has no others.
    tile.one_block = !f_.partial && KeyBlocks(seq.keys).count == 1;
    for (int i = 0; i < tile.width; i++) {
      const bool live = i < tile.rows && row_sum[i] != 0;
      // An infinite maximum makes every probability of a dead row, or of a lane without a query, exactly 0.
      tile.row_max[i] = live ? row_max[i] : infinity;
      tile.inverse_sum[i] = tile.absent[i] = 0;
      tile.delta[i] = i < tile.rows ? delta[i] : 0;
      tile.grad_lse[i] = i < tile.rows && grad_lse ? grad_lse[i] : 0;
      tile.slope[i] = tile.center[i] = 0;
      if (!live) continue;
      double sum = row_sum[i], share = 0;
      if (f_.sinks != nullptr) {
        const double sink = static_cast<const Acc*>(f_.sinks)[h];
        share =
            __builtin_exp2((sink - static_cast<double>(row_max[i]) * static_cast<double>(units_.to_natural)) * kLog2e);
        sum += share;
      }
      tile.inverse_sum[i] = static_cast<Acc>(1 / sum);
      tile.absent[i] = static_cast<Acc>(share < sum ? share / sum : 1);  // an infinite share is all of it
    }
    if (f_.grad_entropy.data) open_entropy(seq, h, row, tile);
  }

  // d entropy / d s = -p * (log p + entropy) = -p * ln(2) * (t - mean of t), t the logits less the largest of them in
  // base-2 units. A tile subtracts the largest score, which a sink may exceed: t = exponent + row_max - largest.
  void open_entropy(const Sequence& seq, i64 h, i64 row, GradTile<Mode>& tile) const {
    const Acc* row_max = rows_at<Acc>(f_.row_max, seq.b, h, row);
    const Acc* row_sum = rows_at<Acc>(f_.row_sum, seq.b, h, row);
    const Acc* row_mean = rows_at<Acc>(f_.row_mean, seq.b, h, row);
    const Acc* grad = rows_at<Acc>(f_.grad_entropy, seq.b, h, row);
    for (int i = 0; i < tile.width; i++) {
      if (i >= tile.rows || row_sum[i] == 0) continue;
      Acc above = 0;
      if (f_.sinks != nullptr) {
        const Acc sink = static_cast<const Acc*>(f_.sinks)[h];
        const Acc excess = (sink - row_max[i] * units_.to_natural) * static_cast<Acc>(kLog2e);
        if (excess > 0) above = excess > -kFar<Acc> ? -kFar<Acc> : excess;
      }
      tile.slope[i] = grad[i] * static_cast<Acc>(kLn2);
      tile.center[i] = -above - row_mean[i];
    }
  }

  // Values for dP, times 1 / (1 - p) under dropout: scaled as the output is, so that where one key has all the
  // weight dP - delta is exactly zero. (Not in bfloat16, whose rounding would cost more than it saves.)
  Words<Word> value_words(const Elem* v, const View& view, int count, Word* room) const {
    const Words<Word> words = Mode::along_depth(v, view.row, view.col, count, f_.value_dim, room);
    if constexpr (!Mode::paired) {
      if (f_.dropout > 0) {
        const Acc keep_scale = static_cast<Acc>(1 / (1 - f_.dropout));
        for (int j = 0; j < count; j++)
          for (int d = 0; d < f_.value_dim; d++)
            room[static_cast<i64>(j) * f_.value_dim + d] = words.data[j * words.stride + d] * keep_scale;
        return {room, f_.value_dim};
      }
    }
    return words;
  }

  // P (with dropped pairs zero) and dS = d loss / d (score after step `from` - 1 of the chain). Plain modes:
  // floats in memory.scores and memory.grads; the paired mode: rows and pairs, see Memory. With `kFloat` dS stays
  // in floats in any mode. `raw` receives the scores before the chain.
  template <bool kFloat = false>
  void compute(const Sequence& seq, i64 h, const MaskedTile& masked, Words<Word> keys, Words<Word> values,
               const ScoreChain<Acc>& chain, const Memory& memory, int from = 0, Acc* raw = nullptr,
               Ahead* ahead = nullptr) const {
    const GradTile<Mode>& tile = memory.tile;
    const int count = static_cast<int>(masked.end - masked.begin);
    Acc* gain = bends_ ? memory.gain : nullptr;
    const u64* kept = products(seq, h, masked, keys, values, chain, memory, {gain, from, raw}, ahead);
    const u64* bits = masked.plain ? nullptr : masked.bits;
    if (f_.grad_lse.data || f_.grad_entropy.data)
      return differentiate_statistics<kFloat>(count, memory, bits, kept, gain);
    const bool special = bits || kept || gain;
    for_columns<Acc>(tile.width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      if (tile.one_block) refine_delta<kV>(column, count, memory, bits, kept);
      if (special)
        differentiate<kV, true, kFloat, false>(column, count, memory, bits, kept, gain);
      else
        differentiate<kV, false, kFloat, false>(column, count, memory, nullptr, nullptr, nullptr);
    });
  }

  // Calls f(masked, keys, values) for each block of keys of which the tile of queries from m0 on sees some, the tile
  // open. `rooms`: has memory for the words of keys and values. Blocks outside of `own` are left out. Returns whether
  // there was one.
  template <class Rooms, class F>
  bool each_block(const Sequence& seq, i64 h, i64 m0, const Mask& mask, Rooms& rooms, Range own, const F& f) const {
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    const i64 kv_head = h / (f_.heads / f_.kv_heads);
    const KeyBlocks blocks(mask.key_limit());
    bool opened = false;
    for (i64 x = 0; x < blocks.count; x++) {
      if (blocks.end(x) <= own.begin || blocks.begin(x) >= own.end) continue;
      MaskedTile masked;
      masked.bits = rooms.tile.bits;
      if (!masked.resolve(mask, m0, rows, blocks.begin(x), blocks.end(x))) continue;
      if (!opened) open(seq, h, m0, rooms.tile);
      opened = true;
      const int count = static_cast<int>(masked.end - masked.begin);
      const i64 row = seq.key_begin + masked.begin;
      const Words<Word> keys = Mode::along_depth(Mode::at(f_.k.data, view_at(f_.k, seq.b, kv_head, row)), f_.k.row,
                                                 f_.k.col, count, f_.head_dim, rooms.keys);
      const Words<Word> values =
          value_words(Mode::at(f_.v.data, view_at(f_.v, seq.b, kv_head, row)), f_.v, count, rooms.values);
      f(masked, keys, values);
    }
    return opened;
  }

  // Adds what these keys give to the excess, the sum over the keys of P * (dP - delta), and to the weight, that of P.
  void add_excess(const Sequence& seq, i64 h, const MaskedTile& masked, Words<Word> keys, Words<Word> values,
                  const ScoreChain<Acc>& chain, const Memory& memory) const {
    const u64* kept = products(seq, h, masked, keys, values, chain, memory, {}, nullptr);
    for_columns<Acc>(memory.tile.width, [&](auto vectors, int column) {
      refine_delta<decltype(vectors)::value, true>(column, static_cast<int>(masked.end - masked.begin), memory,
                                                   masked.plain ? nullptr : masked.bits, kept);
    });
  }

 private:
  // The scores and dP of a tile, in memory.scores and memory.grads. Returns the pairs that dropout keeps, null for all.
  const u64* products(const Sequence& seq, i64 h, const MaskedTile& masked, Words<Word> keys, Words<Word> values,
                      const ScoreChain<Acc>& chain, const Memory& memory,
                      const typename ScoreChain<Acc>::Extras& extras, Ahead* ahead) const {
    const GradTile<Mode>& tile = memory.tile;
    const int count = static_cast<int>(masked.end - masked.begin), width = tile.width;
    const bool few = seq.queries <= kFewQueries;
    Ahead biases;
    if (units_.chain) chain.look_ahead(tile.first, tile.rows, masked.begin, count, biases);
    Product::template run<AOrder::row_major, Into::overwrite>(keys.data, keys.stride, tile.q, width, count,
                                                              Mode::words(f_.head_dim), width, memory.scores, width,
                                                              nullptr, nullptr, ahead, few);
    Product::template run<AOrder::row_major, Into::overwrite>(values.data, values.stride, tile.grad_out, width, count,
                                                              Mode::words(f_.value_dim), width, memory.grads, width,
                                                              nullptr, nullptr, biases.any() ? &biases : ahead, few);
    if (units_.chain) chain.apply(memory.scores, width, tile.first, tile.rows, masked.begin, count, extras);
    if (f_.dropout <= 0) return nullptr;
    dropout_bits(f_, seq.b, h, tile.first, static_cast<int>(round_up(width, kLanes<u32>)), masked.begin, count,
                 memory.kept);
    return memory.kept;
  }

  // Whether the derivative of an expression by the score is 1 everywhere.
  static bool adds(const ExprProgram& slope) {
    const ExprValue& by_score = slope.values[slope.output[1]];
    return by_score.op == ExprOp::constant && by_score.real == 1;
  }

  struct Lane {
    Vec<Acc> top, inverse, delta, slope{}, center{}, grad_lse{};
  };

  // With kStatistics lse and entropy have gradients too. What they add comes after dP - delta: where one key has all
  // the weight that difference is zero, and all of the gradient is theirs.
  // With kSums delta is being refined; p keeps the pairs that dropout drops.
  template <bool kSpecial, bool kStatistics = false, bool kSums = false>
  TW_INLINE void pair(const Acc* s, const Acc* g, i64 at, const Lane& lane, u64 seen, const u64* kept, u64 keep,
                      const Acc* gain, Acc factor, Acc keep_scale, Vec<Acc>& p, Vec<Acc>& ds) {
    const Vec<Acc> exponent = (load(s + at) - lane.top) * factor;
    p = Mode::power(exponent) * lane.inverse;
    Vec<Acc> dp = load(g + at);
    if constexpr (kSpecial) {
      p = keep_where<Acc>(seen, p);
      if (kept) dp = keep_where<Acc>(keep, Mode::paired ? dp * keep_scale : dp);
    }
    Vec<Acc> above = dp - lane.delta;
    // The 16-bit types round what they store of v / (1 - p), and delta with it. Where one key has all the weight dP is
    // delta, whatever is left of it here.
    if constexpr (kSpecial && !kSums)
      if (kept) above = p == 1 ? Vec<Acc>{} : above;
    if constexpr (kStatistics) above += lane.grad_lse - lane.slope * (vmax(set(kFar<Acc>), exponent) + lane.center);
    ds = p * above;
    if constexpr (kSpecial) {
      if (gain) ds *= load(gain + at);
      ds = keep_where<Acc>(seen, ds);
      if (kept && !kSums) p = keep_where<Acc>(keep, p);
    }
  }

  // Makes delta, the sum over the keys of P * dP, sharper. It begins as rowsum(dO * O), whose O is rounded. Its error
  // is what dS of all keys adds up to, so one step of refinement adds that sum: delta += sum of P * (dP - delta), less
  // the sink's share. The differences are small where delta matters most: keys with the same value have dP = delta, and
  // after the step nothing is left of their difference.
  template <int kV, bool kWeights = false>
  void refine_delta(int column, int count, const Memory& memory, const u64* bits, const u64* kept) const {
    const GradTile<Mode>& tile = memory.tile;
    const Acc factor = units_.to_base2, keep_scale = static_cast<Acc>(1 / (1 - f_.dropout));
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      const int i = column + v * lanes;
      const Lane lane{load(tile.row_max + i), load(tile.inverse_sum + i), load(tile.delta + i)};
      Vec<Acc> sum{}, part{}, weight{}, piece{};
      for (int j = 0; j < count; j++) {
        Vec<Acc> p, ds;
        pair<true, false, true>(memory.scores, memory.grads, static_cast<i64>(j) * tile.width + i, lane,
                                bits ? bits[j] >> i : ~u64{0}, kept, kept ? kept[j] >> i : 0, nullptr, factor,
                                keep_scale, p, ds);
        // In pieces, as the forward pass has its row sums.
        if (j % kSubKeys == 0) {
          sum += part, part = Vec<Acc>{};
          if constexpr (kWeights) weight += piece, piece = Vec<Acc>{};
        }
        part += ds;
        if constexpr (kWeights) piece += p;
      }
      sum += part;
      if constexpr (kWeights) {
        store(tile.excess + i, load(tile.excess + i) + sum);
        store(tile.weight + i, load(tile.weight + i) + (weight + piece));
      } else {
        store(tile.delta + i, lane.delta + (sum - lane.delta * load(tile.absent + i)));
      }
    }
  }

  // A function of its own: beside the loops for calls without such gradients it would change how those are compiled.
  template <bool kFloat>
  TW_NOINLINE void differentiate_statistics(int count, const Memory& memory, const u64* bits, const u64* kept,
                                            const Acc* gain) const {
    for_columns<Acc>(memory.tile.width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      if (memory.tile.one_block) refine_delta<kV>(column, count, memory, bits, kept);
      differentiate<kV, true, kFloat, true>(column, count, memory, bits, kept, gain);
    });
  }

  template <int kV, bool kSpecial, bool kFloat, bool kStatistics>
  void differentiate(int column, int count, const Memory& memory, const u64* bits, const u64* kept,
                     const Acc* gain) const {
    const GradTile<Mode>& tile = memory.tile;
    const int width = tile.width;
    const Acc factor = units_.to_base2, keep_scale = static_cast<Acc>(1 / (1 - f_.dropout));
    Lane lane[kV];
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      const int i = column + v * lanes;
      lane[v] = {load(tile.row_max + i), load(tile.inverse_sum + i), load(tile.delta + i)};
      if constexpr (kStatistics) {
        lane[v].slope = load(tile.slope + i), lane[v].center = load(tile.center + i);
        lane[v].grad_lse = load(tile.grad_lse + i);
      }
    }
    if constexpr (Mode::paired && !kFloat) {
      constexpr int step = Mode::step;
      for (int j = 0; j < count; j += step) {
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) {
          const int i = column + v * lanes;
          Vec<Acc> p[step] = {}, ds[step] = {};
          TW_UNROLL(4)
          for (int x = 0; x < step; x++) {
            if (x > 0 && j + x >= count) break;
            pair<kSpecial, kStatistics>(memory.scores, memory.grads, static_cast<i64>(j + x) * width + i, lane[v],
                                        kSpecial && bits ? bits[j + x] >> i : ~u64{0}, kept,
                                        kSpecial && kept ? kept[j + x] >> i : 0, gain, factor, keep_scale, p[x], ds[x]);
          }
          store_packed(memory, j, i, p, ds);
        }
      }
      return;
    }
    for (int j = 0; j < count; j++) {
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) {
        const int i = column + v * lanes;
        const i64 at = static_cast<i64>(j) * width + i;
        const u64 seen = kSpecial && bits ? bits[j] >> i : ~u64{0};
        Vec<Acc> p, ds;
        pair<kSpecial, kStatistics>(memory.scores, memory.grads, at, lane[v], seen, kept,
                                    kSpecial && kept ? kept[j] >> i : 0, gain, factor, keep_scale, p, ds);
        store(memory.scores + at, p);
        store(memory.grads + at, ds);
      }
    }
  }

#if defined(TW_PAIRS)
  // Rows of P and dS from row j on as bfloat16, lanes side by side: a word is two neighbouring queries. And dS over its
  // scores as the product over the keys reads it.
  template <int kStep>
  TW_INLINE void store_packed(const Memory& memory, int j, int i, const Vec<float> (&p)[kStep],
                              const Vec<float> (&ds)[kStep]) {
    const i64 width = memory.tile.width, row = j * width / 2;
    i32 *p_rows = memory.p_rows + row, *ds_rows = memory.ds_rows + row;
    i32* columns = reinterpret_cast<i32*>(memory.grads) + row + i;
    if constexpr (kStep == 2) {
      PairMode::store_pairs(p_rows + i / 2, p[0]), PairMode::store_pairs(p_rows + (i + width) / 2, p[1]);
      PairMode::store_pairs(ds_rows + i / 2, ds[0]), PairMode::store_pairs(ds_rows + (i + width) / 2, ds[1]);
      store(columns, PairMode::pair(ds[0], ds[1]));
    } else {
      const Vec<i32> first = Mode::narrowed(ds[0], ds[1]), second = Mode::narrowed(ds[2], ds[3]);
      Mode::store_rows(p_rows + i, width, Mode::narrowed(p[0], p[1]), Mode::narrowed(p[2], p[3]));
      Mode::store_rows(ds_rows + i, width, first, second);
      Mode::store_columns(columns, width, first, second);
    }
  }
#endif

  const Backward& f_;
  ScoreUnits<Acc> units_;
  bool bends_ = false;
};

}  // namespace tilewise::TILEWISE_ISA
