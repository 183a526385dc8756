// The backward pass: the probabilities are computed again, tile by tile, from the saved row statistics
// (FlashAttention-2, Dao 2023, algorithm 2, transposed). With P the probabilities, dP = dO V^T and
// dS = P * (dP - delta): dV = P^T dO, dK = dS^T Q, dQ = dS K.
#pragma once

#include "tile_gradients.h"

namespace tilewise::TILEWISE_ISA {

constexpr int kTilesPerSum = 64;  // tiles of queries whose shares of dK and dV are added up in one go
constexpr int kPartialShare = 4;  // memory of partial dQs, in multiples of the operands'

// Keys are worked through in chunks of whole blocks; the sum over chunks is taken in their order. How many
// blocks a chunk has depends on the sequence's own length alone.
constexpr int kChunkBlocks = 8;  // at least
constexpr int kMostChunks = 8;

struct Chunks {
  KeyBlocks blocks;
  i64 per_chunk, count;
  explicit Chunks(i64 key_limit)
      : blocks(key_limit),
        per_chunk(max(kChunkBlocks, (blocks.count + kMostChunks - 1) / kMostChunks)),
        count((blocks.count + per_chunk - 1) / per_chunk) {}
  i64 first_block(i64 chunk) const { return chunk * per_chunk; }
  i64 last_block(i64 chunk) const { return min(blocks.count, (chunk + 1) * per_chunk); }
  i64 begin(i64 chunk) const { return blocks.begin(first_block(chunk)); }
  i64 end(i64 chunk) const { return blocks.end(last_block(chunk) - 1); }
  i64 room() const { return per_chunk * kBlockKeys + kBlockKeys / 2; }
};

// The gradients of a chunk's keys or values. Tiles add their shares to `part`; every kTilesPerSum of them go on to
// `total`, so that no chain of additions is longer.
template <class Acc>
class KeySums {
 public:
  KeySums(Acc* part, Acc* total, i64 size) : part_(part), total_(total), size_(size) { clear(); }

  void count_tile() {
    if (++pending_ == kTilesPerSum) settle();
  }
  const Acc* finish() {
    if (!settled_) return part_;
    if (pending_ > 0) settle();
    return total_;
  }

 private:
  void clear() { std::memset(part_, 0, static_cast<std::size_t>(size_) * sizeof(Acc)); }
  void settle() {
    if (!settled_) {
      std::memcpy(total_, part_, static_cast<std::size_t>(size_) * sizeof(Acc));
    } else {
      for (i64 x = 0; x < size_; x += kLanes<Acc>) store(total_ + x, load(total_ + x) + load(part_ + x));
    }
    clear();
    settled_ = true;
    pending_ = 0;
  }

  Acc *part_, *total_;
  i64 size_;
  int pending_ = 0;
  bool settled_ = false;
};

template <class Mode>
class BackwardKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Product = Gemm<typename Mode::Dot>;
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
    typename Tiles::Memory tile;
    Word *keys, *key_rows, *values;
    Acc *grad_k, *grad_v, *total_k, *total_v, *grad_q, *sums;
    Memory(const Backward& f, void* base, i64 sums_size, std::size_t* bytes = nullptr)
        : Memory(f, Carver(base), sums_size, bytes) {}

   private:
    Memory(const Backward& f, Carver carve, i64 sums_size, std::size_t* bytes) : tile(f, carve) {
      const i64 room = Chunks(f.keys).room();
      keys = carve.take<Word>(room * f.head_dim);
      key_rows = carve.take<Word>(Mode::paired ? room * f.head_dim : 0);
      values = carve.take<Word>(room * f.value_dim);
      grad_k = carve.take<Acc>(room * round_up(f.head_dim, lanes));
      grad_v = carve.take<Acc>(room * round_up(f.value_dim, lanes));
      total_k = carve.take<Acc>(room * round_up(f.head_dim, lanes));
      total_v = carve.take<Acc>(room * round_up(f.value_dim, lanes));
      grad_q = carve.take<Acc>(kTileQueries * static_cast<i64>(f.head_dim));
      sums = carve.take<Acc>(sums_size);
      if (bytes) *bytes = carve.used();
    }
  };

  static i64 tile_count(i64 queries) { return (queries + kTileQueries - 1) / kTileQueries; }
  i64 tile_size() const { return kTileQueries * static_cast<i64>(f_.head_dim); }
  Chunks chunks(const Sequence& seq) const { return Chunks(Mask(f_, seq.b, 0, seq.queries, seq.keys).key_limit()); }

  // delta = rowsum(dO * O) - dlse, the term that the softmax and the logsumexp share. Summed by the same
  // instructions in the same order as an entry of dP = dO V^T, so that where one key has all the weight (O = V)
  // the difference dP - delta is exactly zero.
  bool rowwise_delta() const {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    const int words = Mode::words(f_.value_dim);
    const i64 size = static_cast<i64>(words) * kTileQueries;
    const std::size_t bytes = static_cast<std::size_t>(2 * size) * sizeof(Word);
    return for_tasks(f_.threads, tasks.count(), bytes, [&](i64 task, void* base) {
      i64 b, h, block;
      tasks.locate(task, b, h, block);
      const Sequence seq = sequence(f_, b);
      const i64 first = block * kTileQueries, row = seq.query_begin + first;
      const int rows = static_cast<int>(min(kTileQueries, seq.queries - first));
      const int width = static_cast<int>(round_up(rows, lanes));
      Word *o = static_cast<Word*>(base), *g = o + size;
      Mode::transposed(Mode::at(f_.out.data, view_at(f_.out, b, h, row)), f_.out.row, f_.out.col, rows, f_.value_dim,
                       width, o);
      Mode::transposed(Mode::at(f_.grad_out.data, view_at(f_.grad_out, b, h, row)), f_.grad_out.row, f_.grad_out.col,
                       rows, f_.value_dim, width, g);
      for (int i = 0; i < width; i += lanes) {
        Vec<Acc> sum{};
        for (int d = 0; d < words; d += kChain) {
          Vec<Acc> part{};
          for (int x = d; x < words && x < d + kChain; x++)
            part = Mode::Dot::multiply_add(part, load(o + x * width + i), load(g + x * width + i));
          sum += part;
        }
        if (f_.grad_lse.data) sum -= load_first(rows_at<Acc>(f_.grad_lse, b, h, row) + i, rows - i);
        store_first(rows_at<Acc>(f_.delta, b, h, row) + i, rows - i, sum);
      }
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
    const i64 sums = Chunks(f_.keys).count > 1 ? group_ * tile_count(f_.queries) * tile_size() : 0;
    std::size_t bytes;
    Memory(f_, nullptr, sums, &bytes);
    const i64 tasks = f_.batch * f_.kv_heads;
    const TaskOrder order(f_, tasks, [&](i64 task, const MaskInstr& table) {
      const Sequence seq = sequence(f_, task / f_.kv_heads);
      return weight(table, seq, task % f_.kv_heads, 0, seq.keys);
    });
    return for_tasks(f_.threads, tasks, bytes, [&](i64 place, void* base) {
      const i64 task = order[place];
      Memory memory(f_, base, sums);
      const Sequence seq = sequence(f_, task / f_.kv_heads);
      const i64 kv_head = task % f_.kv_heads;
      const Chunks all = chunks(seq);
      for (i64 c = 0; c < all.count; c++) chunk(seq, kv_head, all, c, memory, memory.sums, c == 0, c + 1 == all.count);
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
      partial = static_cast<Acc*>(std::aligned_alloc(4096, static_cast<std::size_t>(bytes)));
    bool ok = true;
    done = total == 0 || partial != nullptr;
    unsigned char* touched = partial ? reinterpret_cast<unsigned char*>(partial) + sums : nullptr;
    if (done)
      ok = split_chunks(first_task, first_sum, partial, touched) &&
           (total == 0 || add_chunks(first_sum, partial, touched));
    std::free(partial);
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
    return for_tasks(f_.threads, first_task[f_.batch], bytes, [&](i64 place, void* base) {
      Memory memory(f_, base, 0);
      const i64 task = order[place], b = sequence_of(first_task, task);
      const Sequence seq = sequence(f_, b);
      const Chunks all = chunks(seq);
      const i64 at = task - first_task[b], kv_head = at / all.count, c = at % all.count;
      const i64 slot = group_ * tile_count(seq.queries) * tile_size();
      const i64 first = all.count > 1 ? first_sum[b] + (c * f_.kv_heads + kv_head) * slot : 0;
      chunk(seq, kv_head, all, c, memory, partial + first, true, all.count == 1, touched + first / tile_size());
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
      const int rows = static_cast<int>(min(kTileQueries, seq.queries - tile * kTileQueries));
      const int width = static_cast<int>(round_up(rows, lanes));
      if (!touched[at]) std::memset(sum, 0, tile_bytes(width));
      for (i64 c = 1; c < count; c++)
        if (touched[at + c * tiles]) add(sum, sum + c * stride, width);
      write_grad_q(seq, h, tile, rows, width, sum);
    });
  }

  std::size_t tile_bytes(int width) const {
    return static_cast<std::size_t>(width) * static_cast<std::size_t>(f_.head_dim) * sizeof(Acc);
  }

  void add(Acc* to, const Acc* from, int width) const {
    for (i64 x = 0; x < static_cast<i64>(width) * f_.head_dim; x += lanes) store(to + x, load(to + x) + load(from + x));
  }

  void write_grad_q(const Sequence& seq, i64 h, i64 tile, int rows, int width, const Acc* from) const {
    alignas(kVectorBytes) Acc factor[kTileQueries];
    for (int i = 0; i < kTileQueries; i++) factor[i] = static_cast<Acc>(f_.scale);
    Elem* to = Mode::at(const_cast<void*>(f_.grad_q.data),
                        view_at(f_.grad_q, seq.b, h, seq.query_begin + tile * kTileQueries));
    unpack_transposed(from, width, rows, f_.head_dim, factor, ~u64{0}, to, f_.grad_q.row);
  }

  // All queries of a group against one chunk of keys: dK and dV of the chunk, and the chunk's share of dQ, which
  // goes to `sums` (replacing on `first`, else adding) or, when it is the only chunk, straight to the result. Where
  // there is `touched` it tells of each tile of queries whether it has such a share at all; if not none is written.
  void chunk(const Sequence& seq, i64 kv_head, const Chunks& all, i64 c, Memory& memory, Acc* sums, bool first,
             bool last, unsigned char* touched = nullptr) const {
    const i64 n0 = all.begin(c), n1 = all.end(c);
    const int count = static_cast<int>(n1 - n0);
    const Elem* k = Mode::at(f_.k.data, view_at(f_.k, seq.b, kv_head, seq.key_begin + n0));
    const Elem* v = Mode::at(f_.v.data, view_at(f_.v, seq.b, kv_head, seq.key_begin + n0));
    const Words<Word> keys = Mode::along_depth(k, f_.k.row, f_.k.col, count, f_.head_dim, memory.keys);
    const Words<Word> values = tiles_.value_words(v, f_.v, count, memory.values);
    const Words<Word> key_rows =
        Mode::paired ? Mode::along_rows(k, f_.k.row, f_.k.col, count, f_.head_dim, memory.key_rows) : keys;
    KeySum sum_k(memory.grad_k, memory.total_k, count * depth_), sum_v(memory.grad_v, memory.total_v, count * value_);

    for (i64 g = 0; g < group_; g++) {
      const i64 h = kv_head * group_ + g;
      const Mask mask(f_, seq.b, h, seq.queries, seq.keys, memory.tile.expr);
      const ScoreChain<Acc> chain(f_, seq.b, h, seq.queries, seq.keys, memory.tile.expr);
      for (i64 tile = 0; tile < tile_count(seq.queries); tile++) {
        const bool any = query_tile(seq, h, tile, all, c, mask, chain, keys, values, key_rows, memory);
        if (any) {
          sum_k.count_tile();
          sum_v.count_tile();
        }
        const int rows = static_cast<int>(min(kTileQueries, seq.queries - tile * kTileQueries));
        const int width = static_cast<int>(round_up(rows, lanes));
        if (first && last) {
          if (!any) std::memset(memory.grad_q, 0, tile_bytes(width));
          write_grad_q(seq, h, tile, rows, width, memory.grad_q);
          continue;
        }
        const i64 at = g * tile_count(seq.queries) + tile;
        Acc* sum = sums + at * tile_size();
        if (touched != nullptr) touched[at] = any;
        if (any && first)
          std::memcpy(sum, memory.grad_q, tile_bytes(width));
        else if (any)
          add(sum, memory.grad_q, width);
        else if (first && touched == nullptr)
          std::memset(sum, 0, tile_bytes(width));
        if (last) write_grad_q(seq, h, tile, rows, width, sum);
      }
    }
    write_rows(sum_k.finish(), depth_, count, f_.head_dim, static_cast<Acc>(f_.scale), f_.grad_k, seq, kv_head, n0);
    write_rows(sum_v.finish(), value_, count, f_.value_dim, static_cast<Acc>(1 / (1 - f_.dropout)), f_.grad_v, seq,
               kv_head, n0);
    if (c + 1 == all.count) zero_beyond(seq, kv_head, all.blocks.limit);
  }

  // One tile of queries against a chunk: adds to the chunk's dK and dV, leaves the tile's dQ in memory.grad_q.
  bool query_tile(const Sequence& seq, i64 h, i64 tile, const Chunks& all, i64 c, const Mask& mask,
                  const ScoreChain<Acc>& chain, Words<Word> keys, Words<Word> values, Words<Word> key_rows,
                  Memory& memory) const {
    const i64 m0 = tile * kTileQueries, n0 = all.begin(c);
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    bool touched = false;
    if (mask.skips(m0, m0 + rows - 1, n0, all.end(c))) return false;
    for (i64 x = all.first_block(c); x < all.last_block(c); x++) {
      MaskedTile masked;
      masked.bits = memory.tile.bits;
      if (!masked.resolve(mask, m0, rows, all.blocks.begin(x), all.blocks.end(x))) continue;
      if (!touched) {
        tiles_.open(seq, h, m0, memory.tile);
        std::memset(
            memory.grad_q, 0,
            static_cast<std::size_t>(memory.tile.tile.width) * static_cast<std::size_t>(f_.head_dim) * sizeof(Acc));
        touched = true;
      }
      const i64 skip = masked.begin - n0;
      const Words<Word> k{keys.data + skip * keys.stride, keys.stride};
      const Words<Word> v{values.data + skip * values.stride, values.stride};
      tiles_.compute(seq, h, masked, k, v, chain, memory.tile);
      products(masked, skip, {key_rows.data + skip / Mode::per_word * key_rows.stride, key_rows.stride}, memory);
    }
    return touched;
  }

  void products(const MaskedTile& masked, i64 skip, Words<Word> key_rows, Memory& memory) const {
    const GradTile<Mode>& tile = memory.tile.tile;
    const int count = static_cast<int>(masked.end - masked.begin), width = tile.width;
    const int queries = (tile.rows + Mode::per_word - 1) / Mode::per_word;
    const Word* p = Mode::paired ? memory.tile.p_rows : reinterpret_cast<const Word*>(memory.tile.scores);
    const Word* ds = Mode::paired ? memory.tile.ds_rows : reinterpret_cast<const Word*>(memory.tile.grads);
    const i64 row = width / Mode::per_word;
    Product::template run<AOrder::row_major, Into::add>(p, row, tile.grad_rows.data, tile.grad_rows.stride, count,
                                                        queries, static_cast<int>(value_),
                                                        memory.grad_v + skip * value_, value_);
    Product::template run<AOrder::row_major, Into::add>(ds, row, tile.q_rows.data, tile.q_rows.stride, count, queries,
                                                        static_cast<int>(depth_), memory.grad_k + skip * depth_,
                                                        depth_);
    Product::template run<AOrder::column_major, Into::add>(
        key_rows.data, key_rows.stride, reinterpret_cast<const Word*>(memory.tile.grads), width, f_.head_dim,
        (count + Mode::per_word - 1) / Mode::per_word, width, memory.grad_q, width);
  }

  void write_rows(const Acc* from, i64 stride, int count, int depth, Acc factor, const View& to, const Sequence& seq,
                  i64 head, i64 n0) const {
    for (int j = 0; j < count; j++) {
      Elem* row = Mode::at(const_cast<void*>(to.data), view_at(to, seq.b, head, seq.key_begin + n0 + j));
      for (int d = 0; d < depth; d += lanes) narrow(row + d, depth - d, load(from + j * stride + d) * factor);
    }
  }
  // Keys that no query may see were not visited; their gradients are zero.
  void zero_beyond(const Sequence& seq, i64 head, i64 from) const {
    for (i64 n = from; n < seq.keys; n++) {
      const i64 row = seq.key_begin + n;
      std::memset(static_cast<void*>(Mode::at(const_cast<void*>(f_.grad_k.data), view_at(f_.grad_k, seq.b, head, row))),
                  0, static_cast<std::size_t>(f_.head_dim) * sizeof(Elem));
      std::memset(static_cast<void*>(Mode::at(const_cast<void*>(f_.grad_v.data), view_at(f_.grad_v, seq.b, head, row))),
                  0, static_cast<std::size_t>(f_.value_dim) * sizeof(Elem));
    }
  }

  const Backward& f_;
  Tiles tiles_;
  i64 group_, depth_, value_;
};

}  // namespace tilewise::TILEWISE_ISA
