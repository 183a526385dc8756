// The backward pass: the probabilities are computed again, tile by tile, from the saved row statistics
// (FlashAttention-2, Dao 2023, algorithm 2, transposed). With P the probabilities, dP = dO V^T and
// dS = P * (dP - delta): dV = P^T dO, dK = dS^T Q, dQ = dS K.
//
// Why it is arranged so:
// - The outer loop is over chunks of keys, the inner one over tiles of queries. Then each dK and dV is written once,
//   and only dQ needs sums over chunks.
// - A chunk has at least 8 blocks (1,024 keys), and a sequence at most 8 chunks: queries are packed anew for each
//   chunk, and each chunk may have a partial dQ.
// - Few heads leave threads idle, so their chunks become tasks, each with a dQ of its own. These are added in the order
//   of the chunks, which is the order of one task that does all: no bit depends on the number of threads.
// - P and dS are never written to memory: they are computed again from the saved row maximum and row sum, which cost
//   less to read than the probabilities would.
#pragma once

#include "passes/key_delta.h"
#include "passes/key_sums.h"
#include "passes/tile_gradients.h"

#include <array>

namespace tilewise::TILEWISE_ISA {

constexpr int kPartialShare = 4;  // memory of partial dQs, in multiples of the operands'

// What became of the dQ of a tile of queries so far, chunk of keys after chunk: a sum of shares, or the result already.
enum class SoFar : unsigned char { nothing = 0, sum = 1, result = 2 };

template <class Mode>
class BackwardKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Product = typename Mode::Product;
  using Tiles = TileGradients<Mode>;
  using KeySum = KeySums<Acc>;
  static constexpr int lanes = kLanes<Acc>;

 public:
  explicit BackwardKernel(const Backward& f)
      : f_(f),
        tiles_(f),
        group_(f.heads / f.kv_heads),
        depth_(round_up(f.head_dim, lanes)),
        value_(round_up(f.value_dim, lanes)) {}

  bool run() {
    if (!rowwise_delta()) return false;
    // Few heads: their chunks become tasks of their own, each with a partial dQ, added up afterwards in the same
    // order in which one task would have done it.
    const bool few = f_.threads > 1 && f_.batch * f_.kv_heads < 4 * f_.threads;
    bool done = false;
    if (few && !run_split(done)) return false;
    return done || run_whole();
  }

 private:
  struct Memory {
    std::array<typename Tiles::Memory, Mode::grad_tiles> tile;
    Word *keys, *key_rows, *values;
    Acc *grad_k, *grad_v, *total_k, *total_v, *sums, *spare = nullptr;  // spare: see PieceMode::add_product
    Acc* grad_q[Mode::grad_tiles];
    typename KeySum::Block *blocks_k, *blocks_v;
    SoFar* so_far;
    Memory(const Backward& f, void* base, i64 tiles, std::size_t* bytes = nullptr)
        : Memory(f, Carver(base), tiles, bytes) {}

   private:
    static auto tile_rooms(const Backward& f, Carver& carve) {
      const typename Tiles::Memory first(f, carve);
      if constexpr (Mode::grad_tiles == 1)
        return std::array{first};
      else
        return std::array{first, typename Tiles::Memory(f, carve, first)};
    }
    Memory(const Backward& f, Carver carve, i64 tiles, std::size_t* bytes) : tile(tile_rooms(f, carve)) {
      const Chunks chunks(f.keys);
      const i64 room = chunks.room();
      blocks_k = carve.take<typename KeySum::Block>(chunks.per_chunk);
      blocks_v = carve.take<typename KeySum::Block>(chunks.per_chunk);
      so_far = carve.take<SoFar>(tiles);
      keys = carve.take<Word>(key_room<Mode>(room, f.head_dim));
      key_rows = carve.take<Word>(Mode::paired ? Mode::rows_room(room, f.head_dim) : 0);
      values = carve.take<Word>(key_room<Mode>(room, f.value_dim));
      grad_k = carve.take<Acc>(room * round_up(f.head_dim, lanes));
      grad_v = carve.take<Acc>(room * round_up(f.value_dim, lanes));
      total_k = carve.take<Acc>(room * round_up(f.head_dim, lanes));
      total_v = carve.take<Acc>(room * round_up(f.value_dim, lanes));
      for (Acc*& one : grad_q) one = carve.take<Acc>(kTileQueries * static_cast<i64>(f.head_dim));
      sums = carve.take<Acc>(tiles * kTileQueries * static_cast<i64>(f.head_dim));
      if constexpr (Mode::pieces > 1) {
        const i64 widest = round_up(max(f.head_dim, f.value_dim), lanes);
        spare = carve.take<Acc>(2 * kRoomKeys * widest);  // of a block's keys, more than a tile has queries
      }
      if (bytes) *bytes = carve.used();
    }
  };

  struct Chunk {
    const Sequence& seq;
    const Chunks& all;
    i64 c;
    Words<Word> keys, values, key_rows;
    KeySum sum_k, sum_v;
  };

  static i64 tile_count(i64 queries) { return (queries + kTileQueries - 1) / kTileQueries; }
  i64 tile_size() const { return kTileQueries * static_cast<i64>(f_.head_dim); }
  Chunks chunks(const Sequence& seq) const { return Chunks(Mask(f_, seq.b, 0, seq.queries, seq.keys).key_limit()); }

  // delta = rowsum(dO * O), what the softmax takes from every dP of a row. Summed by the same
  // instructions in the same order as an entry of dP = dO V^T, so that where one key has all the weight (O = V)
  // the difference dP - delta is exactly zero.
  bool rowwise_delta() const {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    const int words = Mode::words(f_.value_dim);
    const i64 size = query_room<Mode>(kTileQueries, f_.value_dim);
    const KeyDeltaKernel<Mode> by_keys(f_);
    const i64 rows_room = 2 * size * static_cast<i64>(sizeof(Word));
    const auto bytes = static_cast<std::size_t>(max(rows_room, static_cast<i64>(by_keys.room())));
    return for_tasks<typename Mode::Session>(f_.threads, tasks.count(), bytes, [&](i64 task, void* base) {
      i64 b, h, block;
      tasks.locate(task, b, h, block);
      const Sequence seq = sequence(f_, b);
      const i64 first = block * kTileQueries, row = seq.query_begin + first;
      const int rows = static_cast<int>(min(kTileQueries, seq.queries - first));
      const int width = static_cast<int>(round_up(rows, lanes));
      [[maybe_unused]] const bool few = seq.queries <= kFewQueries && width == lanes;
      Word *o = static_cast<Word*>(base), *g = o + size;
      const Elem* out = Mode::at(f_.out.data, view_at(f_.out, b, h, row));
      const Elem* grad = Mode::at(f_.grad_out.data, view_at(f_.grad_out, b, h, row));
      const auto open = [&](const Elem* from, const View& view, Word* to) {
        return Mode::transposed(from, view.row, view.col, rows, f_.value_dim, width, to);
      };
      const auto put = [&](int i, Vec<Acc> delta) {
        store_first(rows_at<Acc>(f_.delta, b, h, row) + i, rows - i, delta);
      };
      if constexpr (Mode::pieces > 1) {
        const Words<Word> split_o = open(out, f_.out, o), split_g = open(grad, f_.grad_out, g);
        for (int i = 0; i < width; i += lanes) put(i, Mode::inner(split_o, split_g, i, words));
      } else {
        open(out, f_.out, o), open(grad, f_.grad_out, g);
        for (int i = 0; i < width; i += lanes) put(i, Product::inner(o + i, g + i, width, words, few));
      }
      if (by_keys.shows(seq, h)) by_keys.query_tile(b, h, first, base);
    });
  }

  // Of the task that takes the queries of a group against the keys n0 .. n1 - 1.
  i64 weight(const MaskInstr& table, const Sequence& seq, i64 kv_head, i64 n0, i64 n1) const {
    i64 sum = 0;
    for (i64 g = 0; g < group_; g++)
      sum += table_weight(table, seq.b, kv_head * group_ + g, 0, seq.queries - 1, n0, n1);
    return sum;
  }

  bool run_whole() const {
    const i64 tiles = Chunks(f_.keys).count > 1 ? group_ * tile_count(f_.queries) : 0;
    std::size_t bytes;
    Memory(f_, nullptr, tiles, &bytes);
    const i64 tasks = f_.batch * f_.kv_heads;
    const TaskOrder order(f_, tasks, [&](i64 task, const MaskInstr& table) {
      const Sequence seq = sequence(f_, task / f_.kv_heads);
      return weight(table, seq, task % f_.kv_heads, 0, seq.keys);
    });
    return for_tasks<typename Mode::Session>(f_.threads, tasks, bytes, [&](i64 place, void* base) {
      const i64 task = order[place];
      Memory memory(f_, base, tiles);
      const Sequence seq = sequence(f_, task / f_.kv_heads);
      const i64 kv_head = task % f_.kv_heads;
      const Chunks all = chunks(seq);
      std::memset(memory.so_far, 0, static_cast<std::size_t>(tiles));
      for (i64 c = 0; c < all.count; c++) {
        chunk(seq, kv_head, all, c, memory, [&](i64 h, i64 tile, const TableRows& table, bool any, Acc* grad_q) {
          if (all.count == 1) return write_share(seq, h, tile, any, grad_q);
          const i64 at = (h - kv_head * group_) * tile_count(seq.queries) + tile;
          const bool last = c + 1 == all.count || table.skips(all.end(c), all.blocks.limit);
          add_share(seq, h, tile, any, last, memory.sums + at * tile_size(), memory.so_far[at], grad_q);
        });
      }
    });
  }

  // Leaves `done` false, and nothing done, where the partial sums would take more memory than kPartialShare of the
  // operands, or than there is.
  bool run_split(bool& done) const {
    const std::size_t entries = static_cast<std::size_t>(f_.batch + 1) * 2;
    i64* first_task = static_cast<i64*>(std::malloc(entries * sizeof(i64)));
    if (first_task == nullptr) return false;
    i64* first_sum = first_task + f_.batch + 1;
    first_task[0] = first_sum[0] = 0;
    for (i64 b = 0; b < f_.batch; b++) {
      const Sequence seq = sequence(f_, b);
      const i64 count = chunks(seq).count;
      first_task[b + 1] = first_task[b] + count * f_.kv_heads;
      first_sum[b + 1] = first_sum[b] + (count > 1 ? count * f_.heads * tile_count(seq.queries) * tile_size() : 0);
    }
    const i64 total = first_sum[f_.batch], sums = total * static_cast<i64>(sizeof(Acc));
    const i64 bytes = round_up(sums + total / tile_size(), 4096);
    Acc* partial = nullptr;
    if (bytes > 0 && bytes <= kPartialShare * operand_bytes())
      partial = static_cast<Acc*>(allocate(4096, static_cast<std::size_t>(bytes)));
    bool ok = true;
    done = total == 0 || partial != nullptr;
    unsigned char* touched = partial ? reinterpret_cast<unsigned char*>(partial) + sums : nullptr;
    if (done)
      ok = split_chunks(first_task, first_sum, partial, touched) &&
           (total == 0 || add_chunks(first_sum, partial, touched));
    release(partial);
    std::free(first_task);
    return ok;
  }

  // q, k, v and out.
  i64 operand_bytes() const {
    const i64 last = f_.batch;
    const i64 queries = f_.cu_q ? f_.cu_q[last] : f_.batch * f_.queries;
    const i64 keys = f_.cu_k ? f_.cu_k[last] : f_.batch * f_.keys;
    return (queries * f_.heads + keys * f_.kv_heads) * (f_.head_dim + f_.value_dim) * static_cast<i64>(sizeof(Elem));
  }

  static i64 sequence_of(const i64* first_task, i64 task) {
    i64 b = 0;
    while (first_task[b + 1] <= task) b++;
    return b;
  }

  bool split_chunks(const i64* first_task, const i64* first_sum, Acc* partial, unsigned char* touched) const {
    std::size_t bytes;
    Memory(f_, nullptr, 0, &bytes);
    const TaskOrder order(f_, first_task[f_.batch], [&](i64 task, const MaskInstr& table) {
      const i64 b = sequence_of(first_task, task);
      const Sequence seq = sequence(f_, b);
      const Chunks all = chunks(seq);
      const i64 at = task - first_task[b];
      return weight(table, seq, at / all.count, all.begin(at % all.count), all.end(at % all.count));
    });
    return for_tasks<typename Mode::Session>(f_.threads, first_task[f_.batch], bytes, [&](i64 place, void* base) {
      Memory memory(f_, base, 0);
      const i64 task = order[place], b = sequence_of(first_task, task);
      const Sequence seq = sequence(f_, b);
      const Chunks all = chunks(seq);
      const i64 at = task - first_task[b], kv_head = at / all.count, c = at % all.count;
      const i64 slot = group_ * tile_count(seq.queries) * tile_size();
      const i64 first = all.count > 1 ? first_sum[b] + (c * f_.kv_heads + kv_head) * slot : 0;
      chunk(seq, kv_head, all, c, memory, [&](i64 h, i64 tile, const TableRows&, bool any, Acc* grad_q) {
        if (all.count == 1) return write_share(seq, h, tile, any, grad_q);
        const i64 at = (h - kv_head * group_) * tile_count(seq.queries) + tile;
        touched[first / tile_size() + at] = any;
        if (any) std::memcpy(partial + first + at * tile_size(), grad_q, tile_bytes(width_of(seq, tile)));
      });
    });
  }

  bool add_chunks(const i64* first_sum, Acc* partial, const unsigned char* touched) const {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    return for_tasks(f_.threads, tasks.count(), 64, [&](i64 task, void*) {
      i64 b, h, tile;
      tasks.locate(task, b, h, tile);
      const Sequence seq = sequence(f_, b);
      const i64 count = chunks(seq).count;
      if (count == 1) return;
      const i64 tiles = f_.heads * tile_count(seq.queries), stride = tiles * tile_size();
      const i64 at = first_sum[b] / tile_size() + h * tile_count(seq.queries) + tile;
      Acc* sum = partial + at * tile_size();
      const int width = width_of(seq, tile);
      if (!touched[at]) std::memset(sum, 0, tile_bytes(width));
      for (i64 c = 1; c < count; c++)
        if (touched[at + c * tiles]) add(sum, sum + c * stride, width);
      write_grad_q(seq, h, tile, sum);
    });
  }

  std::size_t tile_bytes(int width) const {
    return static_cast<std::size_t>(width) * static_cast<std::size_t>(f_.head_dim) * sizeof(Acc);
  }

  void add(Acc* to, const Acc* from, int width) const {
    for (i64 x = 0; x < static_cast<i64>(width) * f_.head_dim; x += lanes) store(to + x, load(to + x) + load(from + x));
  }

  // A chunk's share of the dQ of one tile of queries; `last` when no chunk after it can have one.
  void add_share(const Sequence& seq, i64 h, i64 tile, bool any, bool last, Acc* sum, SoFar& so_far,
                 Acc* grad_q) const {
    const int width = width_of(seq, tile);
    if (any && so_far == SoFar::sum) add(sum, grad_q, width);
    if (last && so_far != SoFar::result) {
      if (so_far == SoFar::sum)
        write_grad_q(seq, h, tile, sum);
      else
        write_share(seq, h, tile, any, grad_q);
      so_far = SoFar::result;
    } else if (any && so_far == SoFar::nothing) {
      std::memcpy(sum, grad_q, tile_bytes(width));
      so_far = SoFar::sum;
    }
  }

  // The only share there is.
  void write_share(const Sequence& seq, i64 h, i64 tile, bool any, Acc* grad_q) const {
    if (!any) std::memset(grad_q, 0, tile_bytes(width_of(seq, tile)));
    write_grad_q(seq, h, tile, grad_q);
  }

  void write_grad_q(const Sequence& seq, i64 h, i64 tile, const Acc* from) const {
    const int rows = rows_of(seq, tile), width = width_of(seq, tile);
    alignas(kVectorBytes) Acc factor[kTileQueries];
    for (int i = 0; i < kTileQueries; i++) factor[i] = static_cast<Acc>(f_.scale);
    Elem* to = Mode::at(const_cast<void*>(f_.grad_q.data),
                        view_at(f_.grad_q, seq.b, h, seq.query_begin + tile * kTileQueries));
    Mode::unpack(from, width, rows, f_.head_dim, factor, ~u64{0}, to, f_.grad_q.row);
  }

  // All queries of a group against one chunk of keys: dK and dV of the chunk. share(h, tile, table, any, grad_q) is
  // called of each tile of queries, with the chunk's share of dQ if there is any.
  template <class Share>
  void chunk(const Sequence& seq, i64 kv_head, const Chunks& all, i64 c, Memory& memory, const Share& share) const {
    const i64 n0 = all.begin(c), n1 = all.end(c);
    const int count = static_cast<int>(n1 - n0);
    const Elem* k = Mode::at(f_.k.data, view_at(f_.k, seq.b, kv_head, seq.key_begin + n0));
    const Elem* v = Mode::at(f_.v.data, view_at(f_.v, seq.b, kv_head, seq.key_begin + n0));
    const Words<Word> keys = Mode::along_depth(k, f_.k.row, f_.k.col, count, f_.head_dim, memory.keys);
    const Words<Word> values = tiles_.value_words(v, f_.v, count, memory.values);
    const Words<Word> key_rows =
        Mode::paired ? Mode::along_rows(k, f_.k.row, f_.k.col, count, f_.head_dim, memory.key_rows) : keys;
    Chunk x{seq,
            all,
            c,
            keys,
            values,
            key_rows,
            KeySum(memory.grad_k, memory.total_k, depth_, memory.blocks_k, all, c),
            KeySum(memory.grad_v, memory.total_v, value_, memory.blocks_v, all, c)};
    for (i64 h = kv_head * group_; h < (kv_head + 1) * group_; h++) {
      const Mask mask(f_, seq.b, h, seq.queries, seq.keys, memory.tile[0].expr);
      const ScoreChain<Acc> chain(f_, seq.b, h, seq.queries, seq.keys, memory.tile[0].expr);
      const i64 tiles = tile_count(seq.queries);
      for (i64 tile = 0, many; tile < tiles; tile += many) {
        many = min(min(Mode::grad_tiles, x.sum_k.tiles_left()), tiles - tile);
        Tile group[Mode::grad_tiles];
        for (i64 t = 0; t < many; t++) group[t].table = table_rows(seq, mask, tile + t);
        query_tiles(x, h, tile, group, static_cast<int>(many), mask, chain, memory);
        for (i64 t = 0; t < many; t++) {
          if (group[t].visited > 0) {
            x.sum_k.count_tile();
            x.sum_v.count_tile();
          }
          share(h, tile + t, group[t].table, group[t].visited > 0, memory.grad_q[t]);
        }
      }
    }
    const Acc drop = static_cast<Acc>(1 / (1 - f_.dropout));
    for (i64 block = all.first_block(c); block < all.last_block(c); block++) {
      const i64 begin = all.blocks.begin(block), end = all.blocks.end(block);
      write_rows(x.sum_k.finish(block), depth_, f_.head_dim, static_cast<Acc>(f_.scale), f_.grad_k, seq, kv_head, begin,
                 end);
      write_rows(x.sum_v.finish(block), value_, f_.value_dim, drop, f_.grad_v, seq, kv_head, begin, end);
    }
    if (c + 1 < all.count) return;
    // Keys that no query may see.
    write_rows(nullptr, depth_, f_.head_dim, 1, f_.grad_k, seq, kv_head, all.blocks.limit, seq.keys);
    write_rows(nullptr, value_, f_.value_dim, 1, f_.grad_v, seq, kv_head, all.blocks.limit, seq.keys);
  }

  int rows_of(const Sequence& seq, i64 tile) const {
    return static_cast<int>(min(kTileQueries, seq.queries - tile * kTileQueries));
  }
  int width_of(const Sequence& seq, i64 tile) const { return static_cast<int>(round_up(rows_of(seq, tile), lanes)); }
  TableRows table_rows(const Sequence& seq, const Mask& mask, i64 tile) const {
    return mask.table(tile * kTileQueries, tile * kTileQueries + rows_of(seq, tile) - 1);
  }

  // The first block of the chunk, from block `from` on, that a tile of queries may see.
  static i64 next_block(const Chunk& x, const TableRows& table, i64 from) {
    const i64 last = x.all.last_block(x.c);
    while (from < last && table.skips(x.all.blocks.begin(from), x.all.blocks.end(from))) from++;
    return from;
  }

  // What became of a tile of queries.
  struct Tile {
    TableRows table{};
    MaskedTile masked{};
    int visited = 0;  // blocks
    bool here = false;
  };

  // Tiles of queries side by side against a chunk: adds to the chunk's dK and dV, leaves the tiles' dQ in
  // memory.grad_q.
  void query_tiles(Chunk& x, i64 h, i64 tile, Tile* group, int many, const Mask& mask, const ScoreChain<Acc>& chain,
                   Memory& memory) const {
    const KeyBlocks& blocks = x.all.blocks;
    const i64 n0 = x.all.begin(x.c), last = x.all.last_block(x.c);
    const auto next_of = [&](i64 from) {
      i64 first = last;
      for (int t = 0; t < many; t++)
        if (!group[t].table.skips(n0, x.all.end(x.c))) first = min(first, next_block(x, group[t].table, from));
      return first;
    };
    for (i64 block = next_of(x.all.first_block(x.c)), next = 0; block < last; block = next) {
      next = next_of(block + 1);
      Tile& bottom = group[many - 1];
      Ahead ahead;
      int here = 0;
      for (int t = 0; t < many; t++) {
        Tile& own = group[t];
        const i64 m0 = (tile + t) * kTileQueries;
        const typename Tiles::Memory& rooms = memory.tile[t];
        own.masked.bits = rooms.bits;
        own.here = !own.table.skips(blocks.begin(block), blocks.end(block)) &&
                   own.masked.resolve(mask, m0, rows_of(x.seq, tile + t), blocks.begin(block), blocks.end(block));
        if (!own.here) continue;
        if (own.visited++ == 0) {
          tiles_.open(x.seq, h, m0, mask, memory.tile[t]);
          std::memset(memory.grad_q[t], 0, tile_bytes(rooms.tile.width));
        }
        if (here++ == 0) {
          if (next == last)
            look_down(x, h, tile + many - 1, mask, max(own.visited, bottom.visited), ahead);
          else if (next > block + 1)
            look_ahead(x, next, ahead);
        }
        Ahead* fetched = ahead.any() ? &ahead : nullptr;
        const i64 skip = own.masked.begin - n0;
        tiles_.compute(x.seq, h, own.masked, x.keys.behind(skip), x.values.behind(skip), chain, rooms, 0, nullptr,
                       fetched);
        add_grad_q(own.masked, x.key_rows.behind(skip, Mode::skip_rows(x.key_rows, skip)), rooms, memory.grad_q[t],
                   memory.spare, fetched);
      }
      if (here == 0) continue;
      Ahead* fetched = ahead.any() ? &ahead : nullptr;
      const auto sums = [&](const Tile& own, const typename Tiles::Memory& rooms, int queries) {
        const i64 at = own.masked.begin - blocks.begin(block);
        add_key_gradients(own.masked, rooms, queries, x.sum_k.part(block) + at * depth_,
                          x.sum_v.part(block) + at * value_, memory.spare, fetched);
      };
      // Tiles that see the same keys of the block are one long contraction, in their order.
      if (many == 2 && group[0].here && group[1].here && group[0].masked.begin == group[1].masked.begin &&
          group[0].masked.end == group[1].masked.end) {
        sums(group[0], memory.tile[0], static_cast<int>(kTileQueries) + memory.tile[1].tile.rows);
        continue;
      }
      for (int t = 0; t < many; t++)
        if (group[t].here) sums(group[t], memory.tile[t], memory.tile[t].tile.rows);
    }
  }

  // What a tile reads of a block of keys.
  void look_ahead(const Chunk& x, i64 block, Ahead& ahead) const {
    const i64 size = sizeof(Word), skip = x.all.blocks.begin(block) - x.all.begin(x.c);
    const i64 count = x.all.blocks.end(block) - x.all.blocks.begin(block);
    ahead.add(x.keys.data + skip * x.keys.stride, x.keys.stride * size, count, Mode::words(f_.head_dim) * size);
    ahead.add(x.values.data + skip * x.values.stride, x.values.stride * size, count, Mode::words(f_.value_dim) * size);
    x.sum_k.look_ahead(block, ahead);
    x.sum_v.look_ahead(block, ahead);
  }

  // The same of the first block of the next tile of queries, and what that tile reads of its queries. Where a tile
  // has many blocks its neighbours have them too.
  void look_down(const Chunk& x, i64 h, i64 tile, const Mask& mask, int visited, Ahead& ahead) const {
    constexpr int kFew = 4, kRows = 8;
    if (visited > kFew) return;
    const i64 last = min(tile_count(x.seq.queries), tile + 1 + kRows);
    for (i64 below = tile + 1; below < last; below++) {
      const TableRows table = table_rows(x.seq, mask, below);
      if (!table.known()) return;
      const i64 block = next_block(x, table, x.all.first_block(x.c));
      if (block == x.all.last_block(x.c)) continue;
      const i64 row = x.seq.query_begin + below * kTileQueries, rows = rows_of(x.seq, below), size = sizeof(Elem);
      const View &q = f_.q, &g = f_.grad_out;
      if (q.col == 1) ahead.add(Mode::at(q.data, view_at(q, x.seq.b, h, row)), q.row * size, rows, f_.head_dim * size);
      if (g.col == 1) ahead.add(Mode::at(g.data, view_at(g, x.seq.b, h, row)), g.row * size, rows, f_.value_dim * size);
      return look_ahead(x, block, ahead);
    }
  }

  // dV += P^T dO and dK += dS^T Q of the keys of a block, over `queries` of a tile and those beside it.
  void add_key_gradients(const MaskedTile& masked, const typename Tiles::Memory& rooms, int queries, Acc* grad_k,
                         Acc* grad_v, [[maybe_unused]] Acc* spare, Ahead* ahead) const {
    const GradTile<Mode>& tile = rooms.tile;
    const int count = static_cast<int>(masked.end - masked.begin),
              depth = (queries + Mode::per_word - 1) / Mode::per_word;
    const Word* p = Mode::paired ? rooms.p_rows : reinterpret_cast<const Word*>(rooms.scores);
    const Word* ds = Mode::paired ? rooms.ds_rows : reinterpret_cast<const Word*>(rooms.grads);
    const i64 row = Tiles::row_words(tile.width);
    if constexpr (Mode::pieces > 1) {
      const auto add = [&](const Word* left, const Words<Word>& right, bool odd, i64 wide, Acc* to) {
        Mode::add_product({left, row, Tiles::kRowsApart, right.data, right.stride, right.apart, count, depth,
                           static_cast<int>(wide), to, wide},
                          odd || right.odd != nullptr, spare, ahead);
      };
      add(p, tile.grad_rows, *rooms.odd, value_, grad_v);
      add(ds, tile.q_rows, *rooms.odd, depth_, grad_k);
    } else if constexpr (Mode::grad_tiles > 1) {
      Product::template run_two<Into::add, Into::add>(
          {p, row, tile.grad_rows.data, tile.grad_rows.stride, count, depth, static_cast<int>(value_), grad_v, value_},
          {ds, row, tile.q_rows.data, tile.q_rows.stride, count, depth, static_cast<int>(depth_), grad_k, depth_},
          ahead);
    } else {
      Product::template run<AOrder::row_major, Into::add>(p, row, tile.grad_rows.data, tile.grad_rows.stride, count,
                                                          depth, static_cast<int>(value_), grad_v, value_, nullptr,
                                                          nullptr, ahead);
      Product::template run<AOrder::row_major, Into::add>(ds, row, tile.q_rows.data, tile.q_rows.stride, count, depth,
                                                          static_cast<int>(depth_), grad_k, depth_, nullptr, nullptr,
                                                          ahead);
    }
  }
  // dQ += dS K, transposed.
  void add_grad_q(const MaskedTile& masked, const Words<Word>& key_rows, const typename Tiles::Memory& rooms,
                  Acc* grad_q, [[maybe_unused]] Acc* spare, Ahead* ahead) const {
    const int count = static_cast<int>(masked.end - masked.begin), width = rooms.tile.width;
    const int depth = (count + Mode::per_word - 1) / Mode::per_word;
    const Word* ds = Mode::paired ? rooms.ds_columns : reinterpret_cast<const Word*>(rooms.grads);
    if constexpr (Mode::pieces > 1)
      Mode::add_product({key_rows.data, key_rows.stride, key_rows.apart, ds, width, Tiles::kColumnsApart, f_.head_dim,
                         depth, width, grad_q, width},
                        *rooms.odd || key_rows.odd != nullptr, spare, ahead);
    else
      Product::template run<AOrder::column_major, Into::add>(key_rows.data, key_rows.stride, ds, width, f_.head_dim,
                                                             depth, width, grad_q, width, nullptr, nullptr, ahead);
  }

  // Keys n0 .. n1 - 1 of a gradient; zeros where there is no sum.
  void write_rows(const Acc* from, i64 stride, int depth, Acc factor, const View& to, const Sequence& seq, i64 head,
                  i64 n0, i64 n1) const {
    for (i64 n = n0; n < n1; n++) {
      Elem* row = Mode::at(const_cast<void*>(to.data), view_at(to, seq.b, head, seq.key_begin + n));
      if (from == nullptr) {
        std::memset(static_cast<void*>(row), 0, static_cast<std::size_t>(depth) * sizeof(Elem));
        continue;
      }
      for (int d = 0; d < depth; d += lanes) narrow(row + d, depth - d, load(from + (n - n0) * stride + d) * factor);
    }
  }

  const Backward& f_;
  Tiles tiles_;
  i64 group_, depth_, value_;
};

}  // namespace tilewise::TILEWISE_ISA
