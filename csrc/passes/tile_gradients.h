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
  Word *q, *grad_out;               // transposed: [words(D)][width], [words(Dv)][width]
  Words<Word> split_q, split_grad;  // in pieces: the same with their planes
  Words<Word> q_rows, grad_rows;
  Acc *row_max, *inverse_sum, *delta;
  Acc *excess, *weight;  // of key_delta.h alone
  Acc* absent;           // the sink's probability: what those of the keys lack to 1
  Acc *slope, *center;   // of the entropy's gradient, see open_entropy
  Acc* grad_lse;
  bool one_block;  // all keys that the tile may see are in one block: delta is summed from the tile itself
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
  // Words from row to row of P and dS in pairs of lanes.
  static constexpr i64 kRowWords = Mode::grad_tiles * kTileQueries / 2;
  static constexpr i64 kRowsApart = kRoomKeys * kRowWords, kColumnsApart = kRoomKeys * kTileQueries / 2;
  static i64 row_words(int width) { return Mode::grad_tiles > 1 ? kRowWords : width / Mode::per_word; }

  explicit TileGradients(const Backward& f) : f_(f), units_(f) {
    for (int i = 0; i < f.score_length; i++)
      bends_ |= f.score[i].op == ScoreOp::softcap || (f.score[i].op == ScoreOp::expr && !adds(*f.score[i].slope));
  }

  struct Memory {
    GradTile<Mode> tile{};
    Word *q_room, *grad_room;
    Acc *scores, *grads, *gain;
    // Of the paired mode: P and dS with the lanes packed in pairs, rows of `row_words`; and dS in pairs of keys. In
    // pieces a plane of each, kRowsApart and kColumnsApart words from the next, and whether a number is not finite.
    Word *p_rows, *ds_rows, *ds_columns;
    bool* odd = nullptr;
    u64 *bits, *kept;
    char* expr;
    Memory(const Backward& f, Carver& carve) {
      static_assert(Mode::grad_tiles <= 2);
      open_rooms(f, carve);
      q_room = carve.take<Word>(rows_room(f.head_dim));
      grad_room = carve.take<Word>(rows_room(f.value_dim));
      scores = carve.take<Acc>(kRoomKeys * kTileQueries);
      grads = carve.take<Acc>(kRoomKeys * kTileQueries);
      gain = carve.take<Acc>(kRoomKeys * kTileQueries);
      p_rows = carve.take<Word>(Mode::pieces * kRowsApart);
      ds_rows = carve.take<Word>(Mode::pieces * kRowsApart);
      // Over dP where that is all there before the first of it is written.
      ds_columns = Mode::grad_tiles > 1 || Mode::pieces > 1 ? carve.take<Word>(Mode::pieces * kColumnsApart)
                                                            : reinterpret_cast<Word*>(grads);
      if constexpr (Mode::pieces > 1) odd = carve.take<bool>(1);
      bits = carve.take<u64>(kRoomKeys);
      kept = carve.take<u64>(kRoomKeys + 4);
      expr = carve.take<char>(f.expr_room);
    }
    // Of the tile behind the first one. Its rows of queries, and its lanes of P and dS, follow those of the first: a
    // product takes both. It shares all else that is not of its queries.
    Memory(const Backward& f, Carver& carve, const Memory& first) : Memory(first) {
      open_rooms(f, carve);
      q_room += kTileQueries / Mode::per_word * round_up(f.head_dim, lanes);
      grad_room += kTileQueries / Mode::per_word * round_up(f.value_dim, lanes);
      p_rows += kTileQueries / 2;
      ds_rows += kTileQueries / 2;
      bits = carve.take<u64>(kRoomKeys);
    }

   private:
    // Of the rows of a tile, see Mode::transposed and Mode::padded.
    static i64 columns_room(int depth) {
      if constexpr (Mode::pieces == 1) return kTileQueries * round_up(depth, lanes);
      if constexpr (Mode::pieces > 1) return Mode::query_room(kTileQueries, depth);
    }
    static i64 rows_room(int depth) {
      if constexpr (Mode::pieces == 1) return kTileQueries * round_up(depth, lanes);
      if constexpr (Mode::pieces > 1) return Mode::padded_room(kTileQueries, depth);
    }
    void open_rooms(const Backward& f, Carver& carve) {
      tile.q = carve.take<Word>(columns_room(f.head_dim));
      tile.grad_out = carve.take<Word>(columns_room(f.value_dim));
      tile.row_max = carve.take<Acc>(kTileQueries);
      tile.inverse_sum = carve.take<Acc>(kTileQueries);
      tile.delta = carve.take<Acc>(kTileQueries);
      tile.excess = carve.take<Acc>(kTileQueries);
      tile.weight = carve.take<Acc>(kTileQueries);
      tile.absent = carve.take<Acc>(kTileQueries);
      tile.slope = carve.take<Acc>(kTileQueries);
      tile.center = carve.take<Acc>(kTileQueries);
      tile.grad_lse = carve.take<Acc>(kTileQueries);
    }
  };

  void open(const Sequence& seq, i64 h, i64 first, const Mask& mask, Memory& memory) const {
    GradTile<Mode>& tile = memory.tile;
    tile.first = first;
    tile.rows = static_cast<int>(min(kTileQueries, seq.queries - first));
    tile.width = static_cast<int>(round_up(tile.rows, lanes));
    const i64 row = seq.query_begin + first;
    const Elem* q = Mode::at(f_.q.data, view_at(f_.q, seq.b, h, row));
    const Elem* g = Mode::at(f_.grad_out.data, view_at(f_.grad_out, seq.b, h, row));
    const auto transpose = [&](const Elem* from, const View& view, int depth, Word* to, Words<Word>& split) {
      if constexpr (Mode::pieces == 1)
        Mode::transposed(from, view.row, view.col, tile.rows, depth, tile.width, to);
      else
        split = Mode::transposed(from, view.row, view.col, tile.rows, depth, tile.width, to);
    };
    transpose(q, f_.q, f_.head_dim, tile.q, tile.split_q);
    transpose(g, f_.grad_out, f_.value_dim, tile.grad_out, tile.split_grad);
    tile.q_rows = Mode::padded(q, f_.q.row, f_.q.col, tile.rows, f_.head_dim, memory.q_room);
    tile.grad_rows = Mode::padded(g, f_.grad_out.row, f_.grad_out.col, tile.rows, f_.value_dim, memory.grad_room);
    const Acc infinity = static_cast<Acc>(__builtin_inf());
    const Acc* row_max = rows_at<Acc>(f_.row_max, seq.b, h, row);
    const Acc* row_sum = rows_at<Acc>(f_.row_sum, seq.b, h, row);
    const Acc* delta = rows_at<Acc>(f_.delta, seq.b, h, row);
    const Acc* grad_lse = f_.grad_lse.data ? rows_at<Acc>(f_.grad_lse, seq.b, h, row) : nullptr;
    tile.one_block = in_one_block(seq, first, tile.rows, mask);
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
    const u64* kept = dropped(seq, h, masked, memory);
    const u64* bits = masked.plain ? nullptr : masked.bits;
    // A lane behind the last query may share a word with it. So a key that is NaN must leave no NaN there: it would
    // meet the zero that the products read.
    if (Mode::paired && tile.rows < tile.width) {
      const u64 there = (u64{1} << tile.rows) - 1;
      for (int j = 0; j < count; j++) memory.bits[j] = bits == nullptr ? there : bits[j] & there;
      bits = memory.bits;
    }
    const Part whole{memory.scores, memory.grads, bends_ ? memory.gain : nullptr, tile.width, 0, tile.width, 0, count};
    // All keys of a row are looked at before dS of the first is known.
    constexpr bool kParts = Mode::grad_tiles > 1 || Mode::pieces > 1;
    const bool at_once = kFloat || raw != nullptr || tile.one_block || !kParts;
    if constexpr (Mode::pieces > 1) *memory.odd = false;
    if (at_once) {
      products(seq, masked, keys, values, chain, memory, whole, {whole.gain, from, raw}, ahead);
      if (tile.one_block)
        for_columns<Acc>(tile.width, [&](auto vectors, int column) {
          refine_delta<decltype(vectors)::value>(column, count, memory, bits, kept);
        });
      return differentiate<kFloat>(memory, whole, bits, kept);
    }
    // In parts that the nearest cache holds.
    constexpr int kKeys = 64, kQueries = Mode::pieces > 1 ? kTileQueries : 32;
    for (int n = 0; n < count; n += kKeys) {
      for (int i = 0; i < tile.width; i += kQueries) {
        const int wide = static_cast<int>(min(kQueries, tile.width - i)),
                  deep = static_cast<int>(min(kKeys, count - n));
        const Part part{memory.scores, memory.grads, whole.gain, wide, i, wide, n, deep};
        products(seq, masked, keys, values, chain, memory, part, {whole.gain, from, nullptr}, ahead);
        differentiate<kFloat>(memory, part, bits, kept);
      }
    }
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
      if (!opened) open(seq, h, m0, mask, rooms.tile);
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
    const u64* kept = dropped(seq, h, masked, memory);
    const int count = static_cast<int>(masked.end - masked.begin), width = memory.tile.width;
    products(seq, masked, keys, values, chain, memory,
             {memory.scores, memory.grads, nullptr, width, 0, width, 0, count}, {}, nullptr);
    for_columns<Acc>(width, [&](auto vectors, int column) {
      refine_delta<decltype(vectors)::value, true>(column, count, memory, masked.plain ? nullptr : masked.bits, kept);
    });
  }

 private:
  // Some queries of a tile, from lane `lane` on, against some keys of a block, from key `key` on: their scores, dP, and
  // the derivative of the score chain, in rows of `stride`.
  struct Part {
    Acc *scores, *grads, *gain;
    int stride, lane, width, key, count;
  };

  // Whether all keys that rows may see are in one block, so that a sum over it is that of the rows. The first rows
  // under a causal mask are such. They have few keys, so their errors are the largest of all, and delta's would be much
  // of them. In bfloat16 the rounding of P and dS is larger than that.
  bool in_one_block(const Sequence& seq, i64 first, int rows, const Mask& mask) const {
    if (f_.partial) return false;
    const bool all = KeyBlocks(seq.keys).count == 1;
    if (all || Mode::coarse) return all;
    const KeyBlocks blocks(mask.key_limit());
    const Range range = mask.visible(first, first + rows - 1);
    return range.end <= range.begin || blocks.containing(range.begin) == blocks.containing(range.end - 1);
  }

  // The pairs that dropout keeps, null for all.
  const u64* dropped(const Sequence& seq, i64 h, const MaskedTile& masked, const Memory& memory) const {
    if (f_.dropout <= 0) return nullptr;
    dropout_bits(f_, seq.b, h, memory.tile.first, static_cast<int>(round_up(memory.tile.width, kLanes<u32>)),
                 masked.begin, static_cast<int>(masked.end - masked.begin), memory.kept);
    return memory.kept;
  }

  // The scores and dP of a part.
  void products(const Sequence& seq, const MaskedTile& masked, Words<Word> keys, Words<Word> values,
                const ScoreChain<Acc>& chain, const Memory& memory, const Part& x,
                const typename ScoreChain<Acc>::Extras& extras, Ahead* ahead) const {
    const GradTile<Mode>& tile = memory.tile;
    const bool few = seq.queries <= kFewQueries;
    const i64 first = tile.first + x.lane, key = masked.begin + x.key;
    const int rows = static_cast<int>(min(x.width, tile.rows - x.lane)), words = Mode::words(f_.head_dim);
    const int value_words = Mode::words(f_.value_dim);
    [[maybe_unused]] const Word *k = keys.data + x.key * keys.stride, *v = values.data + x.key * values.stride;
    Ahead biases;
    if (units_.chain) chain.look_ahead(first, rows, key, x.count, biases);
    if constexpr (Mode::pieces > 1) {
      Mode::scores(keys.behind(x.key), tile.split_q, x.count, x.width, words, x.scores, ahead);
      Mode::scores(values.behind(x.key), tile.split_grad, x.count, x.width, value_words, x.grads,
                   biases.any() ? &biases : ahead);
    } else if constexpr (Mode::grad_tiles > 1) {
      Product::template run_two<Into::overwrite, Into::overwrite>(
          {k, keys.stride, tile.q + x.lane, tile.width, x.count, words, x.width, x.scores, x.stride},
          {v, values.stride, tile.grad_out + x.lane, tile.width, x.count, value_words, x.width, x.grads, x.stride},
          biases.any() ? &biases : ahead);
    } else {
      Product::template run<AOrder::row_major, Into::overwrite>(k, keys.stride, tile.q, tile.width, x.count, words,
                                                                x.width, x.scores, x.stride, nullptr, nullptr, ahead,
                                                                few);
      Product::template run<AOrder::row_major, Into::overwrite>(v, values.stride, tile.grad_out, tile.width, x.count,
                                                                value_words, x.width, x.grads, x.stride, nullptr,
                                                                nullptr, biases.any() ? &biases : ahead, few);
    }
    if (units_.chain) chain.apply(x.scores, x.stride, first, rows, key, x.count, extras);
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

  template <bool kFloat>
  void differentiate(const Memory& memory, const Part& x, const u64* bits, const u64* kept) const {
    if (f_.grad_lse.data || f_.grad_entropy.data)
      differentiate_columns<true, kFloat, true>(memory, x, bits, kept);
    else if (bits || kept || x.gain)
      differentiate_columns<true, kFloat, false>(memory, x, bits, kept);
    else
      differentiate_columns<false, kFloat, false>(memory, x, nullptr, nullptr);
  }
  // A function of its own: beside loops for other calls it would be compiled less well.
  template <bool kSpecial, bool kFloat, bool kStatistics>
  TW_NOINLINE void differentiate_columns(const Memory& memory, const Part& x, const u64* bits, const u64* kept) const {
    for_columns<Acc>(x.width, [&](auto vectors, int column) {
      differentiate<decltype(vectors)::value, kSpecial, kFloat, kStatistics>(column, memory, x, bits, kept);
    });
  }

  template <int kV, bool kSpecial, bool kFloat, bool kStatistics>
  void differentiate(int column, const Memory& memory, const Part& x, const u64* bits, const u64* kept) const {
    const GradTile<Mode>& tile = memory.tile;
    const Acc factor = units_.to_base2, keep_scale = static_cast<Acc>(1 / (1 - f_.dropout));
    Lane lane[kV];
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      const int i = x.lane + column + v * lanes;
      lane[v] = {load(tile.row_max + i), load(tile.inverse_sum + i), load(tile.delta + i)};
      if constexpr (kStatistics) {
        lane[v].slope = load(tile.slope + i), lane[v].center = load(tile.center + i);
        lane[v].grad_lse = load(tile.grad_lse + i);
      }
    }
    const auto pair_at = [&](int j, int v, Vec<Acc>& p, Vec<Acc>& ds) __attribute__((always_inline)) {
      const int i = x.lane + column + v * lanes;
      pair<kSpecial, kStatistics>(x.scores, x.grads, static_cast<i64>(j) * x.stride + column + v * lanes, lane[v],
                                  kSpecial && bits ? bits[x.key + j] >> i : ~u64{0}, kept,
                                  kSpecial && kept ? kept[x.key + j] >> i : 0, x.gain, factor, keep_scale, p, ds);
    };
    if constexpr (Mode::paired && !kFloat) {
      constexpr int step = Mode::step;
      [[maybe_unused]] bool finite = true;
      for (int j = 0; j < x.count; j += step) {
        Vec<Acc> p[kV][step] = {}, ds[kV][step] = {};
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) {
          TW_UNROLL(4)
          for (int y = 0; y < step; y++) {
            if (y > 0 && j + y >= x.count) break;
            pair_at(j + y, v, p[v][y], ds[v][y]);
          }
          if constexpr (Mode::pieces == 1 && (Mode::grad_tiles == 1 || kV != 2))
            store_packed(memory, x.key + j, x.lane + column + v * lanes, p[v], ds[v]);
        }
        if constexpr (Mode::pieces > 1) {
          const i64 words = row_words(tile.width), at = (x.key + j) * words + (x.lane + column) / 2;
          const typename Mode::Rows to{memory.p_rows + at,
                                       memory.ds_rows + at,
                                       memory.ds_columns + (x.key + j) / 2 * tile.width + x.lane + column,
                                       words,
                                       kRowsApart,
                                       kColumnsApart};
          finite &= Mode::store_rows(p, ds, to);
        }
        if constexpr (Mode::grad_tiles > 1 && kV == 2) {
          const i64 words = row_words(tile.width), at = (x.key + j) * words + (x.lane + column) / 2;
          Mode::store_two(memory.p_rows + at, memory.ds_rows + at, words,
                          memory.ds_columns + (x.key + j) / 2 * tile.width + x.lane + column, p, ds);
        }
      }
      if constexpr (Mode::pieces > 1) *memory.odd |= !finite;
      return;
    }
    for (int j = 0; j < x.count; j++) {
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) {
        const i64 at = static_cast<i64>(j) * x.stride + column + v * lanes;
        Vec<Acc> p, ds;
        pair_at(j, v, p, ds);
        store(x.scores + at, p);
        store(x.grads + at, ds);
      }
    }
  }

#if defined(TW_PAIRS)
  // Rows of P and dS from row j on as bfloat16, lanes side by side: a word is two neighbouring queries. And dS as the
  // product over the keys reads it.
  template <int kStep>
  TW_INLINE void store_packed(const Memory& memory, int j, int i, const Vec<float> (&p)[kStep],
                              const Vec<float> (&ds)[kStep]) {
    const i64 width = memory.tile.width, words = row_words(memory.tile.width);
    i32 *p_rows = memory.p_rows + j * words, *ds_rows = memory.ds_rows + j * words;
    i32* columns = memory.ds_columns + j / 2 * width + i;
    if constexpr (kStep == 2) {
      PairMode::store_pairs(p_rows + i / 2, p[0]), PairMode::store_pairs(p_rows + i / 2 + words, p[1]);
      PairMode::store_pairs(ds_rows + i / 2, ds[0]), PairMode::store_pairs(ds_rows + i / 2 + words, ds[1]);
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
