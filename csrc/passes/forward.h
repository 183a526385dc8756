// The forward pass: online softmax over blocks of keys, queries in the lanes (FlashAttention-2, Dao 2023,
// algorithm 1, transposed). S^T = K Q^T, P^T = exp(S^T - max), O^T += V^T P^T.
//
// Why it is arranged so:
// - Queries lie in the lanes. Row maxima and row sums are then plain vector operations, without a sum across lanes, and
//   keys and values are read where they lie: one element of them is broadcast against a vector of queries. Only the
//   queries are packed, once for all keys.
// - A tile has 64 queries, so that a mask of a row of keys is one 64-bit word.
// - A task has 8 tiles against the same block of keys: the block is packed (or at least read from memory) once for all.
//   Where threads would idle a task has fewer tiles; no tile's bits depend on its neighbours.
// - A block has 128 keys. The order of all sums follows from that number, so it is part of the rounding contract.
// - Matrix tiles (products/tiles.h) have other numbers: tiles of 32 queries, 32 of them in a task, blocks of 64 keys.
// - The scale and log2(e) are one factor (ScoreUnits), which multiplies S - max: a probability is one exp2.
#pragma once

#include "passes/close_rows.h"
#include "products/modes.h"
#include "base/eight_bits.h"
#include "base/philox.h"
#include "base/schedule.h"
#include "variants/score.h"

namespace tilewise::TILEWISE_ISA {

// What one tile of queries carries from block to block.
template <class Mode>
struct QueryTile {
  using Acc = typename Mode::Acc;
  i64 first;               // query
  int rows, width;         // width: rows rounded up to whole vectors
  typename Mode::Word* q;  // [words(D)][width]
  // In pieces: the same with its planes, and out and row_sum of the keys before those that these two are of, or null.
  Words<typename Mode::Word> split_q{};
  Acc *out_before = nullptr, *sum_before = nullptr;
  Acc* out;      // [Dv][width], not yet divided by the row sum
  Acc* row_max;  // in the units of the scores, see ScoreUnits
  Acc* row_sum;
  // For statistics only.
  Acc* row_moment;  // see RowNumbers
  Acc* best;        // the largest score as the matrix product and the score chain left it
  // The first key that has it: piece * kSubKeys + place, either exact in any type.
  Acc *best_piece, *best_place;
  TableRows table;
};

template <class Mode>
class ForwardKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Product = typename Mode::Product;
  using Session = typename Mode::Session;
  using Packed = PackedKeys<Word>;
  static constexpr int lanes = kLanes<Acc>, kQueries = Mode::tile_queries, kPieces = Mode::pieces;

 public:
  explicit ForwardKernel(const Forward& f) : f_(f), units_(f) {}

  bool run() {
    int tiles = Mode::query_tiles;
    // More, smaller tasks when threads would idle; a tile's result does not depend on its neighbours.
    while (tiles > 1 && f_.threads > 1 && task_estimate(tiles) < 4 * f_.threads) tiles /= 2;
    tiles_ = tiles;
    const QueryTasks tasks(f_, static_cast<i64>(tiles) * kQueries, f_.for_backward ? 0 : kFewQueries);
    if (tasks.count() <= 0) return tasks.count() == 0;
    const i64 rows = static_cast<i64>(tiles) * kQueries;
    const TaskOrder order(f_, tasks.count(), [&](i64 task, const MaskInstr& table) {
      i64 b, h, block;
      tasks.locate(task, b, h, block);
      const Sequence seq = sequence(f_, b);
      return table_weight(table, b, h, block * rows, min((block + 1) * rows, seq.queries) - 1, 0, seq.keys);
    });
    Memory sizes(f_, tiles, nullptr);
    return for_tasks<Session>(f_.threads, tasks.count(), sizes.bytes, [&](i64 task, void* memory, Session& session) {
      i64 b, h, block;
      tasks.locate(order[task], b, h, block);
      work(b, h, block, Memory(f_, tiles_, memory), session);
    });
  }

 private:
  struct Memory {
    Word *q, *keys, *values, *kept_p = nullptr;
    Elem *key_rows, *value_rows;
    Acc *out, *scores, *row_max, *row_sum, *alpha, *peak, *odd_out = nullptr, *run_out = nullptr, *run_sum = nullptr;
    Acc *row_moment, *best, *best_piece, *best_place;
    u64 *bits, *kept;
    char* expr;
    std::size_t bytes;
    Memory(const Forward& f, int tiles, void* base) {
      Carver carve(base);
      const i64 queries = static_cast<i64>(tiles) * kQueries;
      q = carve.take<Word>(tiles * query_room<Mode>(kQueries, f.head_dim));
      out = carve.take<Acc>(queries * f.value_dim);
      scores = carve.take<Acc>(kRoomKeys * kQueries);
      row_max = carve.take<Acc>(queries);
      row_sum = carve.take<Acc>(queries);
      if constexpr (Mode::keeps_references) kept_p = carve.take<Word>(kPieces * p_apart(f.value_dim));
      if constexpr (kPieces > 1)
        for (Acc** array : {&odd_out, &run_out}) *array = carve.take<Acc>(static_cast<i64>(f.value_dim) * kQueries);
      if constexpr (kPieces > 1) run_sum = carve.take<Acc>(kQueries);
      alpha = carve.take<Acc>(kQueries);
      peak = carve.take<Acc>(kQueries);
      bits = carve.take<u64>(kRoomKeys);
      kept = carve.take<u64>(kRoomKeys + 4);
      expr = carve.take<char>(f.expr_room);
      const i64 packed = min(Mode::packed_keys * 3 / 2, max(kRoomKeys, f.keys));
      keys = carve.take<Word>(key_room<Mode>(packed, f.head_dim));
      values = carve.take<Word>(Mode::rows_room(packed, f.value_dim));
      const bool copied = f.page_size != 0 || f.stored != Stored::plain;
      key_rows = carve.take<Elem>(copied ? packed * f.head_dim : 0);
      value_rows = carve.take<Elem>(copied ? packed * f.value_dim : 0);
      row_moment = carve.take<Acc>(f.entropy.data ? queries : 0);
      for (Acc** array : {&best, &best_piece, &best_place}) *array = carve.take<Acc>(f.entropy.data ? queries : 0);
      bytes = carve.used();
    }
  };

  i64 task_estimate(int tiles) const {
    return f_.batch * f_.heads * ((f_.queries + tiles * kQueries - 1) / (tiles * kQueries));
  }

  void work(i64 b, i64 h, i64 block, const Memory& memory, Session& session) const {
    const Sequence seq = sequence(f_, b);
    const i64 begin = block * tiles_ * kQueries, end = min(seq.queries, begin + tiles_ * kQueries);
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.expr);
    const ScoreChain<Acc> chain(f_, b, h, seq.queries, seq.keys, memory.expr);
    QueryTile<Mode> tiles[Mode::query_tiles];
    int count = 0;
    for (i64 first = begin; first < end; first += kQueries) {
      tiles[count] = open(seq, h, first, end, count, memory);
      tiles[count].table = mask.table(first, min(first + kQueries, end) - 1);
      count++;
    }

    const Range visible = mask.visible(begin, end - 1);
    const KeyBlocks blocks(mask.key_limit(), Mode::packed_keys);
    const TableRows table = mask.table(begin, end - 1);
    const i64 last = visible.begin < visible.end ? blocks.containing(visible.end - 1) + 1 : 0;
    const auto next = [&](i64 x) {  // from x on
      while (x < last && table.skips(blocks.begin(x), blocks.end(x))) x++;
      return x;
    };
    for (i64 x = next(blocks.containing(visible.begin)), y = 0; x < last; x = y) {
      y = next(x + 1);
      Ahead ahead;
      if (y < last && stands_alone(tiles, count, blocks.begin(x), blocks.end(x), y > x + 1))
        look_ahead(seq, h, blocks.begin(y), blocks.end(y), ahead);
      key_block(seq, h, blocks.begin(x), blocks.end(x), mask, chain, tiles, count, memory, session,
                ahead.any() ? &ahead : nullptr);
    }
    for (int t = 0; t < count; t++) close(seq, h, tiles[t]);
  }

  // Whether little is computed with keys n0 .. n1 - 1 before the next block of keys is needed.
  static bool stands_alone(const QueryTile<Mode>* tiles, int count, i64 n0, i64 n1, bool gap) {
    if (gap || count == 0 || !tiles[0].table.known()) return gap;
    int visited = 0;
    for (int t = 0; t < count; t++) visited += !tiles[t].table.skips(n0, n1);
    return 2 * visited <= count;
  }

  void look_ahead(const Sequence& seq, i64 h, i64 n0, i64 n1, Ahead& ahead) const {
    if (f_.page_size != 0 || f_.stored != Stored::plain) return;
    const i64 kv_head = h / (f_.heads / f_.kv_heads), row = seq.key_begin + n0, size = sizeof(Elem);
    if (f_.k.col == 1)
      ahead.add(Mode::at(f_.k.data, view_at(f_.k, seq.b, kv_head, row)), f_.k.row * size, n1 - n0, f_.head_dim * size);
    if (f_.v.col == 1)
      ahead.add(Mode::at(f_.v.data, view_at(f_.v, seq.b, kv_head, row)), f_.v.row * size, n1 - n0, f_.value_dim * size);
  }

  QueryTile<Mode> open(const Sequence& seq, i64 h, i64 first, i64 end, int index, const Memory& memory) const {
    QueryTile<Mode> tile;
    tile.first = first;
    tile.rows = static_cast<int>(min(kQueries, end - first));
    tile.width = static_cast<int>(round_up(tile.rows, lanes));
    const i64 at = static_cast<i64>(index) * kQueries;
    tile.q = memory.q + index * query_room<Mode>(kQueries, f_.head_dim);
    tile.out = memory.out + at * f_.value_dim;
    tile.row_max = memory.row_max + at;
    tile.row_sum = memory.row_sum + at;
    tile.row_moment = memory.row_moment + at;
    tile.best = memory.best + at;
    tile.best_piece = memory.best_piece + at;
    tile.best_place = memory.best_place + at;
    const Elem* q = Mode::at(f_.q.data, view_at(f_.q, seq.b, h, seq.query_begin + first));
    if constexpr (kPieces == 1)
      Mode::transposed(q, f_.q.row, f_.q.col, tile.rows, f_.head_dim, tile.width, tile.q);
    else
      tile.split_q = Mode::transposed(q, f_.q.row, f_.q.col, tile.rows, f_.head_dim, tile.width, tile.q);
    for (int i = 0; i < tile.width; i++) {
      tile.row_max[i] = -static_cast<Acc>(__builtin_inf());
      tile.row_sum[i] = 0;
      if (f_.entropy.data) tile.row_moment[i] = 0, tile.best[i] = -static_cast<Acc>(__builtin_inf());
    }
    std::memset(tile.out, 0,
                static_cast<std::size_t>(tile.width) * static_cast<std::size_t>(f_.value_dim) * sizeof(Acc));
    return tile;
  }

  struct StoredRows {
    const Elem* data;
    i64 row, col;
  };
  // Keys or values from n0 on, where they lie; copied to `room` where that is in several pages, or in 8 bits.
  StoredRows stored(const View& view, const View& scales, const Sequence& seq, i64 kv_head, i64 n0, i64 rows, int width,
                    Elem* room) const {
    if (f_.stored != Stored::plain) {
      Elem* to = room;
      for (i64 n = n0; n < n0 + rows; n++, to += width) {
        const u8* from = static_cast<const u8*>(view.data) + key_run(f_, view, seq, kv_head, n, n + 1).at;
        Acc scale;
        row_scales(f_, scales, seq, kv_head, n, n + 1, &scale);
        widen_scaled(f_.stored, from, scale, width, to);
      }
      return {room, width, 1};
    }
    const KeyRun whole = key_run(f_, view, seq, kv_head, n0, n0 + rows);
    if (whole.count >= rows) return {Mode::at(view.data, whole.at), view.row, view.col};
    Elem* to = room;
    for (i64 n = n0; n < n0 + rows;) {
      const KeyRun run = key_run(f_, view, seq, kv_head, n, n0 + rows);
      n += run.count;
      for (i64 i = 0; i < run.count; i++, to += width) {
        const Elem* from = Mode::at(view.data, run.at + i * view.row);
        if (view.col == 1) {
          std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(Elem));
        } else {
          for (i64 d = 0; d < width; d++) to[d] = from[d * view.col];
        }
      }
    }
    return {room, width, 1};
  }

  void key_block(const Sequence& seq, i64 h, i64 n0, i64 n1, const Mask& mask, const ScoreChain<Acc>& chain,
                 const QueryTile<Mode>* tiles, int count, const Memory& memory, Session& session, Ahead* ahead) const {
    const KeyBlocks blocks(mask.key_limit(), Mode::block_keys(f_.head_dim, f_.value_dim));
    Packed packed;
    for (int t = 0; t < count; t++) {
      QueryTile<Mode> tile = tiles[t];
      bool visited = false;
      Stream stream;
      for (i64 y = blocks.containing(n0); y < blocks.count && blocks.begin(y) < n1; y++) {
        if (tile.table.skips(blocks.begin(y), blocks.end(y))) continue;
        MaskedTile masked;
        masked.bits = memory.bits;
        if (!masked.resolve(mask, tile.first, tile.rows, blocks.begin(y), blocks.end(y))) continue;
        if (packed.begin < 0) {
          // Only the keys that some tile of this task may see: what is excluded is never read.
          const QueryTile<Mode>& bottom = tiles[count - 1];
          pack(seq, h, mask.walked(tiles[0].first, bottom.first + bottom.rows - 1, n0, n1), memory, session, packed);
        }
        if (!visited) visited = true, begin_sums(tile, memory);
        const i64 skip = masked.begin - packed.begin;
        const Block now{masked, packed.keys.behind(skip),
                        packed.values.behind(skip, Mode::skip_rows(packed.values, skip)), masked.end == packed.end};
        if constexpr (Mode::keeps_references) {
          if (kPieces > 1 || stays_in_order()) {
            // A guess: mostly the next block of this tile is the one behind.
            const i64 after = now.masked.end, more = min(blocks.size, packed.end - after);
            flow(tile, seq, h, now, chain, memory, stream, after < n1 && more > 0 ? static_cast<int>(more) : 0, ahead);
            continue;
          }
        }
        if constexpr (kPieces == 1) step(tile, seq, h, now, chain, memory, ahead);
      }
      if constexpr (Mode::keeps_references) add_values(tile, memory, stream, ahead);
      end_sums(tile);
    }
  }

  // Sums of float32 begin anew with each run of keys that is packed (see PieceMode).
  void begin_sums(QueryTile<Mode>& tile, const Memory& memory) const {
    if constexpr (kPieces > 1) {
      if (!Mode::sums_in_runs) return;
      tile.out_before = tile.out, tile.sum_before = tile.row_sum;
      tile.out = memory.run_out, tile.row_sum = memory.run_sum;
      for (i64 i = 0; i < static_cast<i64>(f_.value_dim) * tile.width; i += lanes) store(tile.out + i, Vec<Acc>{});
      for (int i = 0; i < tile.width; i += lanes) store(tile.row_sum + i, Vec<Acc>{});
    }
  }
  void end_sums(const QueryTile<Mode>& tile) const {
    if (tile.out_before == nullptr) return;
    for (i64 i = 0; i < static_cast<i64>(f_.value_dim) * tile.width; i += lanes)
      store(tile.out_before + i, load(tile.out_before + i) + load(tile.out + i));
    for (int i = 0; i < tile.width; i += lanes)
      store(tile.sum_before + i, load(tile.sum_before + i) + load(tile.row_sum + i));
  }

  void pack(const Sequence& seq, i64 h, Range all, const Memory& memory, Session& session, Packed& packed) const {
    const i64 kv_head = h / (f_.heads / f_.kv_heads);
    if constexpr (Mode::keeps_references) {
      const Packed& last = session.packed;  // in the same memory
      if (last.b == seq.b && last.kv_head == kv_head && last.begin == all.begin && last.end == all.end) {
        packed = last;
        return;
      }
    }
    const int rows = static_cast<int>(all.end - all.begin);
    const StoredRows k = stored(f_.k, f_.k_scales, seq, kv_head, all.begin, rows, f_.head_dim, memory.key_rows);
    const StoredRows v = stored(f_.v, f_.v_scales, seq, kv_head, all.begin, rows, f_.value_dim, memory.value_rows);
    packed = {seq.b,
              kv_head,
              all.begin,
              all.end,
              Mode::along_depth(k.data, k.row, k.col, rows, f_.head_dim, memory.keys),
              Mode::along_rows(v.data, v.row, v.col, rows, f_.value_dim, memory.values)};
    if constexpr (Mode::keeps_references) session.packed = packed;
  }

  // A block of keys that a tile of queries sees.
  struct Block {
    MaskedTile masked;
    Words<Word> keys{}, values{};
    bool last = false;  // of what is packed: no values lie behind its own
    int count() const { return static_cast<int>(masked.end - masked.begin); }
  };

  // Blocks whose probabilities wait for their values: these are added up while the scores of a later block are made, by
  // one run of products, and of several blocks in one go.
  struct Stream {
    Words<Word> values{};
    i64 end = 0;        // key
    int count = 0;      // keys
    int words = 0;      // of a lane's probabilities, zeros behind the last keys included
    bool rose = false;  // whether a reference grew in the last block
  };
  static constexpr i64 p_keys(int value_dim) {
    if constexpr (Mode::keeps_references) return Mode::value_keys(value_dim) + kRoomKeys;
    return 0;
  }

  static constexpr i64 p_apart(int value_dim) { return p_keys(value_dim) * kQueries / 2; }  // from a piece to the next

  // Whether the softmax of a block is the same whatever else the call asks for.
  bool stays_in_order() const { return f_.dropout <= 0 && f_.entropy.data == nullptr; }

  // Takes in a block with references that the rows have (see TileMode). `more`: keys that lie behind it.
  void flow(const QueryTile<Mode>& tile, const Sequence& seq, i64 h, const Block& now, const ScoreChain<Acc>& chain,
            const Memory& memory, Stream& x, int more, Ahead* ahead) const {
    const int count = now.count(), width = tile.width, depth = Mode::words(f_.head_dim);
    Acc* s = memory.scores;
    // Probabilities that wait are used up where there are many, or where this block's keys do not follow theirs.
    const bool full =
        x.count >= Mode::value_keys(f_.value_dim) || x.end != now.masked.begin || x.count % Mode::kWhole != 0;
    if constexpr (kPieces > 1) {
      split_products(tile, &now, memory, x, full, ahead);
    } else if (full) {
      Product::template run_two<Into::overwrite, Into::add>(
          {now.keys.data, now.keys.stride, tile.q, width, count, depth, width, s, width},
          {x.values.data, x.values.stride, memory.kept_p, width, x.count > 0 ? f_.value_dim : 0, x.words, width,
           tile.out, width},
          ahead);
      x.count = x.words = 0;
    } else {
      Product::template run<AOrder::row_major, Into::overwrite>(now.keys.data, now.keys.stride, tile.q, width, count,
                                                                depth, width, s, width, nullptr, nullptr, ahead);
    }
    // Scores of one step are made within the softmax. A first block, a masked one, and one behind a block where
    // references grew, need them before.
    const bool settled = Mode::settled(tile.row_max, width);
    bool within = kPieces == 1 && chain.is_step() && now.masked.plain && settled && !x.rose, peaked = false;
    const auto make_scores = [&] {
      if (units_.chain)
        peaked = chain.apply(s, width, tile.first, tile.rows, now.masked.begin, count, {.peak = memory.peak});
    };
    if (!within) make_scores();
    if (!now.masked.plain) exclude(s, width, count, now.masked.bits), peaked = false;
    if constexpr (kPieces > 1) {
      if (f_.entropy.data) {
        mask_and_peak(s, width, count, nullptr, memory.peak);
        peaked = true;
        track_top(s, width, count, now.masked.begin, tile, memory.peak);
      }
    }
    // Where references had to grow for the block before, they mostly have to for this one.
    bool rose = false;
    if (!settled || (x.rose && peaked)) rose = raise(tile, s, count, peaked, memory, x, ahead);
    if (x.count == 0) x.values = now.values;
    Word* p = memory.kept_p + x.count / 2 * width;
    typename Mode::Near near;
    if (more >= count && now.keys.stride == depth) {
      near.keys = now.keys.data + count * now.keys.stride;
      near.values = now.values.data, near.value_stride = now.values.stride;
    }
    const auto softmax = [&](bool last, const typename Mode::Near& fetched, auto... step) {
      return Mode::softmax_kept(s, width, count, tile.row_max, tile.row_sum, units_.to_base2, p, last, fetched, depth,
                                p_apart(f_.value_dim), step...);
    };
    bool kept;
    if constexpr (kPieces == 1)
      kept = within
                 ? chain.with_step(tile.first, now.masked.begin, [&](auto step) { return softmax(false, near, step); })
                 : softmax(false, near);
    else
      kept = softmax(false, near);
    if (!kept) {
      if (within) make_scores();
      const bool grew = raise(tile, s, count, peaked, memory, x, ahead);
      if (grew) rose = true, x.values = now.values, p = memory.kept_p;
      softmax(true, {});
    }
    x.rose = rose;
    if constexpr (kPieces > 1) {
      if (f_.entropy.data) Mode::add_moments(s, width, count, tile.row_max, tile.row_moment, units_.to_base2);
      if (f_.dropout > 0) {
        dropout_bits(f_, seq.b, h, tile.first, width, now.masked.begin, count, memory.kept);
        Mode::drop(p, p_apart(f_.value_dim), width, count, memory.kept);
      }
    }
    x.count += count;
    x.words = (x.count + 1) / 2;
    x.end = now.masked.end;
    // Whole tiles, where nothing but zeros of values lies behind: no number that is hidden meets them.
    for (; now.last && x.words % Product::kStep != 0; x.words++)
      for (int y = 0; y < kPieces; y++)
        for (int i = 0; i < width; i += lanes)
          store(memory.kept_p + y * p_apart(f_.value_dim) + x.words * width + i, Vec<Word>{});
  }
  // Lets the references of rows grow where a block's scores ask for it; false where none does. `peaked`: the largest
  // scores are there.
  bool raise(const QueryTile<Mode>& tile, Acc* s, int count, bool peaked, const Memory& memory, Stream& x,
             Ahead* ahead) const {
    if (!peaked) mask_and_peak(s, tile.width, count, nullptr, memory.peak);
    if (!Mode::grows(tile.row_max, memory.peak, tile.width, units_.to_base2)) return false;
    add_values(tile, memory, x, ahead);
    if constexpr (kPieces == 1)
      Mode::raise(memory.peak, tile.width, tile.row_max, tile.row_sum, units_.to_base2, tile.out, f_.value_dim);
    else
      Mode::raise(memory.peak, tile.width, tile.row_max, tile.row_sum, units_.to_base2, tile.out, f_.value_dim,
                  f_.entropy.data ? tile.row_moment : nullptr, tile.sum_before, tile.out_before);
    return true;
  }
  void add_values(const QueryTile<Mode>& tile, const Memory& memory, Stream& x, Ahead* ahead) const {
    if (x.count == 0) return;
    if constexpr (kPieces > 1) {
      split_products(tile, nullptr, memory, x, true, ahead);
    } else {
      Product::template run<AOrder::column_major, Into::add>(x.values.data, x.values.stride, memory.kept_p, tile.width,
                                                             f_.value_dim, x.words, tile.width, tile.out, tile.width,
                                                             nullptr, nullptr, ahead);
      x.count = x.words = 0;
    }
  }
  // By pieces: the values that wait, where they are to be added now, and the scores of a block, if there is one.
  void split_products(const QueryTile<Mode>& tile, const Block* now, const Memory& memory, Stream& x, bool add_values,
                      Ahead* ahead) const {
    const int width = tile.width, value_dim = f_.value_dim, depth = Mode::words(f_.head_dim);
    add_values = add_values && x.count > 0;
    typename Product::Pending last;
    u64 odd[Mode::kColumnWords];
    bool any_odd = false;
    if (add_values) {
      any_odd = Mode::odd_columns(x.values, x.count, value_dim, odd);
      for (int d = 0; any_odd && d < value_dim; d++) {
        if ((odd[d / 64] >> d % 64 & 1) == 0) continue;
        for (int i = 0; i < width; i += lanes)
          store(memory.odd_out + d * width + i,
                Mode::first_pieces(x.values.data + d * x.values.stride, memory.kept_p + i, width, (x.count + 1) / 2,
                                   load(tile.out + d * width + i)));
      }
      Product::template run<Mode::Pairs::values, true>(
          {x.values.data, x.values.stride, x.values.apart, memory.kept_p, width, p_apart(value_dim), value_dim, x.words,
           width, tile.out, width},
          last, ahead);
    }
    if (now != nullptr)
      Product::template run<Mode::Pairs::scores, false>(
          {now->keys.data, now->keys.stride, now->keys.apart, tile.q, width, tile.split_q.apart, now->count(), depth,
           width, memory.scores, width},
          last, ahead);
    Product::flush(last);
    for (int d = 0; any_odd && d < value_dim; d++)
      for (int i = 0; i < width && (odd[d / 64] >> d % 64 & 1) != 0; i += lanes)
        store(tile.out + d * width + i, load(memory.odd_out + d * width + i));
    if (now != nullptr && (now->keys.odd != nullptr || tile.split_q.odd != nullptr))
      Mode::odd_scores(now->keys, tile.split_q, now->count(), width, depth, memory.scores);
    if (add_values) x.count = x.words = 0;
  }
  // Pairs that the mask excludes become -inf.
  static void exclude(Acc* s, int width, int count, const u64* bits) {
    const Vec<Acc> none = set(-static_cast<Acc>(__builtin_inf()));
    for (int j = 0; j < count; j++) {
      if (bits[j] == ~u64{0}) continue;
      for (int i = 0; i < width; i += lanes)
        store(s + j * width + i, select_bits<Acc>(bits[j] >> i, load(s + j * width + i), none));
    }
  }

  // A function of its own: inlined into its only caller, dot products of bfloat16 took 1.06 times as long.
  TW_NOINLINE void step(const QueryTile<Mode>& tile, const Sequence& seq, i64 h, const Block& block,
                        const ScoreChain<Acc>& chain, const Memory& memory, Ahead* ahead) const {
    const MaskedTile& masked = block.masked;
    const Word *keys = block.keys.data, *values = block.values.data;
    const i64 key_stride = block.keys.stride, value_stride = block.values.stride;
    const int count = block.count(), width = tile.width;
    Acc* s = memory.scores;
    const i64 depth = Mode::words(f_.head_dim);
    const int words = (count + Mode::per_word - 1) / Mode::per_word;
    const bool few = seq.queries <= kFewQueries;
    bool peaked = true;
    if (units_.chain) {
      Ahead biases;
      chain.look_ahead(tile.first, tile.rows, masked.begin, count, biases);
      Product::template run<AOrder::row_major, Into::overwrite>(keys, key_stride, tile.q, width, count, depth, width, s,
                                                                width, nullptr, nullptr, biases.any() ? &biases : ahead,
                                                                few);
      peaked = chain.apply(s, width, tile.first, tile.rows, masked.begin, count, {.peak = memory.peak});
    } else {
      Product::template run<AOrder::row_major, Into::overwrite, true>(
          keys, key_stride, tile.q, width, count, depth, width, s, width, nullptr, memory.peak, ahead, few);
    }
    if (!peaked || !masked.plain) mask_and_peak(s, width, count, masked.plain ? nullptr : masked.bits, memory.peak);
    if (f_.entropy.data) track_top(s, width, count, masked.begin, tile, memory.peak);
    const u64* kept = nullptr;
    if (f_.dropout > 0) {
      dropout_bits(f_, seq.b, h, tile.first, static_cast<int>(round_up(width, kLanes<u32>)), masked.begin, count,
                   memory.kept);
      kept = memory.kept;
    }
    if (f_.entropy.data)
      softmax_columns<true>(s, count, tile, kept, memory);
    else
      softmax_columns<false>(s, count, tile, kept, memory);
    Product::template run<AOrder::column_major, Into::rescale>(values, value_stride, reinterpret_cast<const Word*>(s),
                                                               width, f_.value_dim, words, width, tile.out, width,
                                                               memory.alpha, nullptr, ahead);
  }

  // Pairs that the mask excludes become -inf; the largest score of each query is taken again.
  static void mask_and_peak(Acc* s, int width, int count, const u64* bits, Acc* peak) {
    const Vec<Acc> none = set(-static_cast<Acc>(__builtin_inf()));
    for_columns<Acc>(width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      Vec<Acc> top[kV];
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) top[v] = none;
      for (int j = 0; j < count; j++) {
        const u64 seen = bits ? bits[j] : ~u64{0};
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) {
          const int i = column + v * lanes;
          Acc* p = s + static_cast<i64>(j) * width + i;
          Vec<Acc> value = load(p);
          if (seen != ~u64{0}) {
            value = select_bits<Acc>(seen >> i, value, none);
            store(p, value);
          }
          top[v] = vmax(value, top[v]);
        }
      }
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) store(peak + column + v * lanes, top[v]);
    });
  }

  // For the queries whose maximum grows, the first key of the block that has the new one; a NaN is the largest of all.
  static void track_top(const Acc* s, int width, int count, i64 n0, const QueryTile<Mode>& tile, const Acc* peak) {
    const Vec<Acc> piece = set(static_cast<Acc>(n0 / kSubKeys));
    for_columns<Acc>(width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      Vec<Acc> top[kV], place[kV], here = set(static_cast<Acc>(count));
      Vec<SInt<Acc>> odd[kV];  // whether one of the scores is NaN, which no peak shows
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++)
        top[v] = load(peak + column + v * lanes), place[v] = Vec<Acc>{}, odd[v] = Vec<SInt<Acc>>{};
      for (int j = 0; j < count; j++) {
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) {
          const Vec<Acc> x = load(s + static_cast<i64>(j) * width + column + v * lanes);
          odd[v] |= (Vec<SInt<Acc>>)(x != x);
        }
      }
      for (int j = count - 1; j >= 0; j--) {
        here -= static_cast<Acc>(1);
        TW_UNROLL(4)
        for (int v = 0; v < kV; v++) {
          const Vec<Acc> x = load(s + static_cast<i64>(j) * width + column + v * lanes);
          place[v] = (odd[v] ? (Vec<SInt<Acc>>)(x != x) : (Vec<SInt<Acc>>)(x == top[v])) ? here : place[v];
        }
      }
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) {
        const int i = column + v * lanes;
        const Vec<Acc> before = load(tile.best + i);
        const Vec<Acc> now = odd[v] ? set(static_cast<Acc>(__builtin_nan(""))) : top[v];
        const Vec<SInt<Acc>> taken = odd[v] ? (Vec<SInt<Acc>>)(before == before) : (Vec<SInt<Acc>>)(top[v] > before);
        store(tile.best + i, taken ? now : before);
        store(tile.best_piece + i, taken ? piece : load(tile.best_piece + i));
        store(tile.best_place + i, taken ? place[v] : load(tile.best_place + i));
      }
    });
  }

  template <bool kMoment>
  void softmax_columns(Acc* s, int count, const QueryTile<Mode>& tile, const u64* kept, const Memory& memory) const {
    for_columns<Acc>(tile.width, [&](auto vectors, int column) {
      constexpr int kV = decltype(vectors)::value;
      if (kept)
        softmax<kV, true, kMoment>(s, tile.width, count, column, tile, kept, memory);
      else
        softmax<kV, false, kMoment>(s, tile.width, count, column, tile, nullptr, memory);
    });
  }

  // Scores become probabilities relative to the new row maximum, in the layout that the second product reads.
  template <int kV, bool kDropout, bool kMoment>
  void softmax(Acc* s, int width, int count, int column, const QueryTile<Mode>& tile, const u64* kept,
               const Memory& memory) const {
    const Acc factor = units_.to_base2;
    Vec<Acc> top[kV], sum[kV], moment[kV];
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      const int i = column + v * lanes;
      const Vec<Acc> before = load(tile.row_max + i);
      const Vec<Acc> now = Mode::reference(before, load(memory.peak + i), factor);
      // A row that has seen no key yet has no maximum to subtract.
      top[v] = now == -static_cast<Acc>(__builtin_inf()) ? Vec<Acc>{} : now;
      const Vec<Acc> change = (before - top[v]) * factor, alpha = exp2<5>(change, Acc{});
      store(memory.alpha + i, alpha);
      store(tile.row_max + i, now);
      sum[v] = moment[v] = Vec<Acc>{};
      if constexpr (kMoment) {
        // What was relative to the maximum before becomes relative to the one now.
        const Vec<Acc> moved = vmax(set(kFar<Acc>), change);
        store(tile.row_moment + i, (load(tile.row_moment + i) + moved * load(tile.row_sum + i)) * alpha);
      }
    }
    // A row sum has pieces of kSubKeys keys. Keys with equal scores add the same number again and again; in one long
    // chain each such addition is rounded the same way, and the errors add up.
    for (int first = 0; first < count; first += kSubKeys) {
      const int last = min(first + kSubKeys, count);
      Vec<Acc> piece[kV];
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) piece[v] = Vec<Acc>{};
      if constexpr (Mode::paired) {
#if defined(TW_PAIRS)
        for (int j = first; j < last; j += Mode::step) {
          TW_UNROLL(4)
          for (int v = 0; v < kV; v++) {
            const int i = column + v * lanes;
            Vec<Acc> e[Mode::step] = {};
            TW_UNROLL(4)
            for (int x = 0; x < Mode::step; x++) {
              if (x > 0 && j + x >= count) break;
              const Vec<Acc> t = (load(s + static_cast<i64>(j + x) * width + i) - top[v]) * factor;
              e[x] = Mode::power(t);
              if constexpr (kMoment) moment[v] = fused(e[x], vmax(set(kFar<Acc>), t), moment[v]);
            }
            TW_UNROLL(2)
            for (int x = 0; x < Mode::step; x += 2) piece[v] += e[x] + e[x + 1];
            if constexpr (kDropout) {
              TW_UNROLL(4)
              for (int x = 0; x < Mode::step; x++) e[x] = keep_where<Acc>(kept[j + x] >> i, e[x]);
            }
            Word* to = reinterpret_cast<Word*>(s) + static_cast<i64>(j / 2) * width + i;
            if constexpr (Mode::step == 2)
              store(to, Mode::pair(e[0], e[1]));
            else
              Mode::store_columns(to, width, Mode::narrowed(e[0], e[1]), Mode::narrowed(e[2], e[3]));
          }
        }
#endif
      } else {
        for (int j = first; j < last; j++) {
          TW_UNROLL(4)
          for (int v = 0; v < kV; v++) {
            const int i = column + v * lanes;
            Acc* p = s + static_cast<i64>(j) * width + i;
            const Vec<Acc> x = (load(p) - top[v]) * factor;
            Vec<Acc> e = Mode::power(x);
            piece[v] += e;
            if constexpr (kMoment) moment[v] = fused(e, vmax(set(kFar<Acc>), x), moment[v]);
            if constexpr (kDropout) e = keep_where<Acc>(kept[j] >> i, e);
            store(p, e);
          }
        }
      }
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) sum[v] += piece[v];
    }
    // The block's own sum is added last.
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++) {
      const int i = column + v * lanes;
      Vec<Acc> before = load(tile.row_sum + i) * load(memory.alpha + i);
      if constexpr (Mode::keeps_references) before = rounded(before, Acc{});  // as Mode::raise leaves it
      store(tile.row_sum + i, before + sum[v]);
      if constexpr (kMoment) store(tile.row_moment + i, load(tile.row_moment + i) + moment[v]);
    }
  }

  // Divides by the row sums (the sink's share included) and writes out, lse and the row statistics.
  void close(const Sequence& seq, i64 h, const QueryTile<Mode>& tile) const {
    alignas(kVectorBytes) Acc sinks[kQueries];
    if (f_.sinks != nullptr)
      for (int i = 0; i < tile.width; i++) sinks[i] = static_cast<const Acc*>(f_.sinks)[h];
    const RowNumbers<Acc> rows = {tile.row_max, tile.row_sum, f_.entropy.data ? tile.row_moment : nullptr,
                                  f_.entropy.data ? tile.best : nullptr};
    const ClosedRows<Acc> closed(rows, tile.width, f_.sinks != nullptr ? sinks : nullptr, f_.dropout, units_);
    const i64 row = seq.query_begin + tile.first;
    closed.write(f_, rows, 0, tile.rows, seq.b, h, row);
    if (f_.top_key.data) {
      i64* top_key = rows_at<i64>(f_.top_key, seq.b, h, row);
      for (int i = 0; i < tile.rows; i++) {
        const bool found = tile.best[i] != -static_cast<Acc>(__builtin_inf());
        top_key[i] =
            found ? static_cast<i64>(tile.best_piece[i]) * kSubKeys + static_cast<i64>(tile.best_place[i]) : -1;
      }
    }
    Elem* out = Mode::at(const_cast<void*>(f_.out.data), view_at(f_.out, seq.b, h, row));
    Mode::unpack(tile.out, tile.width, tile.rows, f_.value_dim, closed.factor, closed.live, out, f_.out.row);
  }

  const Forward& f_;
  ScoreUnits<Acc> units_;
  int tiles_ = 1;
};

}  // namespace tilewise::TILEWISE_ISA
