// The forward pass of 1 to 8 queries (FlashDecoding, Dao et al. 2023). It reads each key and value once and does little
// with it, so memory sets its speed.
//
// Why it is arranged so:
// - Lanes lie along the width of a head. With queries in the lanes, as in passes/forward.h, most lanes would be empty.
// - Rows are the queries of all heads that share their keys: one load of a key serves them all.
// - Keys are split (decode/tasks.h), so that one query of one head still keeps all threads busy. Splits follow from the
//   length of the sequence alone and are merged in their order: no bit depends on the number of threads.
// - The rows of the next block are fetched while this one is computed, of several pages in turn (decode/ahead.h).
//   If the keys are in the caches already, nothing is fetched (decode/near.h).
// - One or two rows on Intel's processors fetch beside each load instead, if keys and values lie without gaps (Stream).
//   That took up to 15 % less on a Xeon without AMX, from its shared cache as from memory. AMD's were not measured.
#pragma once

#include "decode/alone.h"
#include "decode/narrow.h"
#include "decode/near.h"
#include "base/philox.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode, class Product>
class DecodeKernel {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Vectors = typename Product::Vectors;
  using Key = typename Vectors::Key;
  using State = RowState<Acc>;
  static constexpr int lanes = kLanes<Acc>;
  static constexpr bool kBytes = sizeof(Key) == 1;  // rows in 8 bits are widened by the products
  static constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());

 public:
  explicit DecodeKernel(const Forward& f)
      : f_(f),
        units_(f),
        q_stride_(row_words<Mode, Product>(f.head_dim)),
        out_stride_(round_up(f.value_dim, Vectors::sums * lanes)),
        alike_(heads_alike(f)) {}

  bool run() {
    const SplitTasks tasks(f_);
    if (tasks.count() <= 0) return tasks.count() == 0;
    rows_ = tasks.most_rows(), heads_ = tasks.most_heads();
    state_bytes_ = state(nullptr).bytes;
    const std::size_t each = state_bytes_;
    near_ = lie_near<Mode>(f_, tasks);
    const bool together = f_.stored == Stored::plain && f_.page_size == 0 && f_.k.col == 1 && f_.v.col == 1 &&
                          f_.k.row == f_.head_dim && f_.v.row == f_.value_dim;
    const bool streams = f_.fetch < 0 ? !near_ && !has_line_streams() : f_.fetch == 2;
    streams_ = streams && together && rows_ <= Product::streaming;
    if constexpr (Product::alone > 0) {
      using Alone = RowsAlone<Mode, Product>;
      if (Alone::serves(f_, units_)) return Alone(f_, tasks, units_, near_).run();
    }
    char* partials = nullptr;
    i64* done = nullptr;
    if (tasks.partials() > 0) {
      const std::size_t all = static_cast<std::size_t>(tasks.partials()) * each;
      partials = static_cast<char*>(allocate(64, all));
      done = static_cast<i64*>(std::calloc(static_cast<std::size_t>(tasks.groups()), sizeof(i64)));
    }
    const bool room = tasks.partials() == 0 || (partials != nullptr && done != nullptr);
    const Memory sizes(*this, nullptr);
    const bool finished =
        room && for_tasks(f_.threads, tasks.count(), sizes.bytes, [&](i64 task, void* base) {
          const SplitTask t = tasks[task];
          const Memory memory(*this, base);
          pack_queries(t, memory);
          if (t.split < 0 || t.splits == 1) return all_splits(t, memory);
          char* first = partials + static_cast<std::size_t>(t.partial) * each;
          const auto of = [&](i64 split) { return state(first + static_cast<std::size_t>(split) * each); };
          one_split(t, t.split, of(t.split), memory);
          // Whoever comes last merges.
          if (__atomic_add_fetch(&done[t.group], 1, __ATOMIC_ACQ_REL) < t.splits) return;
          for (i64 split = 1; split < t.splits; split++) merge(t, of(0), of(split));
          close(t, of(0));
        });
    release(partials);
    std::free(done);
    return finished;
  }

 private:
  struct Memory {
    Word* q;
    Acc *scores, *chain, *alpha, *peak;
    const Key **keys, **values, **next_keys, **next_values;
    Key *key_rows, *value_rows, *zeros;
    const u8** narrow_rows;
    Acc* factors;
    u64 *bits, *kept;
    MaskedTile* tiles;
    char *expr, *first, *second;
    RowsAhead* ahead;
    Carver carve;
    typename Product::Room room;
    std::size_t bytes;
    Memory(const DecodeKernel& kernel, void* base) : carve(base), room(carve, kernel.rows_, kernel.f_.head_dim) {
      const Forward& f = kernel.f_;
      const i64 rows = kernel.rows_, width = round_up(rows, lanes);
      q = carve.take<Word>(rows * kernel.q_stride_);
      scores = carve.take<Acc>(width * kRoomKeys);
      chain = carve.take<Acc>(kernel.units_.chain ? kFewQueries * kTileQueries : 0);
      alpha = carve.take<Acc>(width);
      peak = carve.take<Acc>(width);
      for (const Key*** array : {&keys, &values}) *array = carve.take<const Key*>(kRoomKeys + kSubKeys);
      for (const Key*** array : {&next_keys, &next_values}) *array = carve.take<const Key*>(kRoomKeys);
      ahead = carve.take<RowsAhead>(1);
      const bool narrow = f.stored != Stored::plain, widened = narrow && !kBytes;
      key_rows = carve.take<Key>(f.k.col != 1 || widened ? kRoomKeys * max(f.head_dim, f.value_dim) : 0);
      value_rows = widened ? key_rows : carve.take<Key>(f.v.col != 1 ? kRoomKeys * f.value_dim : 0);
      narrow_rows = carve.take<const u8*>(widened ? kRoomKeys : 0);
      factors = carve.take<Acc>(narrow ? kRoomKeys : 0);
      zeros = carve.take<Key>(f.value_dim);
      bits = carve.take<u64>(f.mask_length > 0 ? kernel.heads_ * kRoomKeys : 0);
      kept = carve.take<u64>(kRoomKeys + 4);
      tiles = carve.take<MaskedTile>(kernel.heads_);
      expr = carve.take<char>(f.expr_room);
      first = carve.take<char>(static_cast<i64>(kernel.state_bytes_));
      second = carve.take<char>(static_cast<i64>(kernel.state_bytes_));
      bytes = carve.used();
    }
  };

  State state(void* base) const {
    return State(base, rows_, out_stride_, f_.entropy.data != nullptr, f_.top_key.data != nullptr);
  }

  // Whether the mask says the same for all heads.
  static bool heads_alike(const Problem& p) {
    for (int i = 0; i < p.mask_length; i++) {
      const MaskInstr& x = p.mask[i];
      const bool tensor = x.op == MaskOp::dense || x.op == MaskOp::blocks || x.op == MaskOp::tiles;
      if (tensor && x.tensor.head != 0) return false;
      for (int at = 0; x.op == MaskOp::expr && at < x.expr->begin[kExtents]; at++)
        if (x.expr->values[at].op == ExprOp::head) return false;
    }
    return true;
  }

  i64 rows(const SplitTask& t) const { return t.heads * t.seq.queries; }

  void pack_queries(const SplitTask& t, const Memory& memory) const {
    const int m = static_cast<int>(t.seq.queries);
    for (i64 g = 0; g < t.heads; g++) {
      const Elem* from = Mode::at(f_.q.data, view_at(f_.q, t.seq.b, t.first_head + g, t.seq.query_begin));
      Vectors::pack(from, f_.q.row, f_.q.col, m, f_.head_dim, q_stride_, memory.q + g * m * q_stride_);
    }
    std::memset(memory.zeros, 0, static_cast<std::size_t>(f_.value_dim) * sizeof(Key));
    memory.room.open(memory.q, q_stride_, static_cast<int>(rows(t)), f_.head_dim);
    memory.ahead->clear();
  }

  void all_splits(const SplitTask& t, const Memory& memory) const {
    const State whole = state(memory.first), part = state(memory.second);
    one_split(t, 0, whole, memory);
    for (i64 split = 1; split < t.splits; split++) {
      one_split(t, split, part, memory);
      merge(t, whole, part);
    }
    close(t, whole);
  }

  void one_split(const SplitTask& t, i64 split, const State& to, const Memory& memory) const {
    to.open(rows(t), out_stride_);
    const i64 begin = (t.first_block / t.split_blocks + split) * t.split_blocks;
    const i64 end = min(begin + t.split_blocks, t.last_block);
    const i64 last = t.split < 0 ? t.last_block : end;  // of this task
    const KeyBlocks blocks(t.key_limit);
    for (i64 x = max(begin, t.first_block); x < end; x++) {
      // Of the first block nobody has fetched anything.
      if (x == t.first_block || (t.split >= 0 && x == begin)) {
        look_ahead(t, blocks, x, memory);
        memory.ahead->all();
      }
      if (x + 1 < last) look_ahead(t, blocks, x + 1, memory);
      block(t, blocks.begin(x), blocks.end(x), to, memory);
    }
    memory.room.close();
  }

  // Rows that are near, in streams, or copied before they are read, are not fetched.
  void look_ahead(const SplitTask& t, const KeyBlocks& blocks, i64 x, const Memory& memory) const {
    if (near_ || streams_ || f_.k.col != 1 || f_.v.col != 1) return;
    const i64 n0 = blocks.begin(x), n1 = blocks.end(x);
    const int count = static_cast<int>(n1 - n0);
    const auto aim = [&](auto element) {
      const auto** keys = reinterpret_cast<const decltype(element)**>(memory.next_keys);
      const auto** values = reinterpret_cast<const decltype(element)**>(memory.next_values);
      point_rows(f_, f_.k, t.seq, t.kv_head, n0, n1, keys);
      point_rows(f_, f_.v, t.seq, t.kv_head, n0, n1, values);
      memory.ahead->aim(keys, values, count, f_.head_dim, f_.value_dim);
    };
    if (f_.stored == Stored::plain) return aim(Elem{});
    aim(u8{});
    // All at once: they are few bytes.
    constexpr i64 size = sizeof(float);
    for (const View* scales : {&f_.k_scales, &f_.v_scales}) {
      const i64 step = max(1, 64 / max(1, scales->row * size));
      for (i64 n = n0; n < n1;) {
        const KeyRun run = key_run(f_, *scales, t.seq, t.kv_head, n, n1);
        const float* from = static_cast<const float*>(scales->data) + run.at;
        for (i64 j = 0; j < run.count; j += step) __builtin_prefetch(from + j * scales->row, 0, 2);
        n += run.count;
      }
    }
  }

  // Pointers to the rows of keys n0 .. n1 - 1, or to copies of them where their elements lie apart.
  void point(const SplitTask& t, const View& view, i64 n0, i64 n1, Key* copies, i64 width, const Key** to) const {
    if (view.col == 1) return point_rows(f_, view, t.seq, t.kv_head, n0, n1, to);
    for (i64 n = n0; n < n1;) {
      const KeyRun run = key_run(f_, view, t.seq, t.kv_head, n, n1);
      const Key* row = static_cast<const Key*>(view.data) + run.at;
      n += run.count;
      for (i64 i = 0; i < run.count; i++, row += view.row) {
        *to++ = copies;
        for (i64 d = 0; d < width; d++) *copies++ = row[d * view.col];
      }
    }
  }

  Stream<Elem> stream(const SplitTask& t, const View& view, i64 width, i64 n0, i64 n1) const {
    return {Mode::at(view.data, key_run(f_, view, t.seq, t.kv_head, n0, n1).at), width};
  }

  // Rows of keys n0 .. n1 - 1; where the products take no bytes, rows in 8 bits as rows of a wider type, without their
  // scales.
  void find(const SplitTask& t, const View& view, i64 n0, i64 n1, int width, Key* copies, const Key** to,
            const Memory& memory) const {
    if (f_.stored == Stored::plain || kBytes) return point(t, view, n0, n1, copies, width, to);
    if constexpr (!kBytes) {
      const int count = static_cast<int>(n1 - n0);
      point_rows(f_, view, t.seq, t.kv_head, n0, n1, memory.narrow_rows);
      widen_rows(f_.stored, memory.narrow_rows, count, width, copies);
      for (int j = 0; j < count; j++, copies += width) to[j] = copies;
    }
  }

  // The scales of rows in 8 bits multiply scores and probabilities, which are fewer than numbers. So the products are
  // of the numbers as they are, and exact but for their sums.
  // One for each key, zeros behind them up to whole vectors.
  const Acc* scales_of(const SplitTask& t, const View& scales, i64 n0, i64 n1, const Memory& memory) const {
    if constexpr (std::is_same_v<Acc, float>) {
      const KeyRun run = key_run(f_, scales, t.seq, t.kv_head, n0, n1);
      if (run.count == n1 - n0 && scales.row == 1 && run.count % kSubKeys == 0)
        return static_cast<const float*>(scales.data) + run.at;
    }
    row_scales(f_, scales, t.seq, t.kv_head, n0, n1, memory.factors);
    for (i64 j = n1 - n0, padded = round_up(j, kSubKeys); j < padded; j++) memory.factors[j] = 0;
    return memory.factors;
  }
  void scale_scores(const SplitTask& t, i64 n0, i64 n1, int row0, Acc* scores, int rows, const Memory& memory) const {
    const Acc* const factors = scales_of(t, f_.k_scales, n0, n1, memory);
    for (int r = 0; r < rows; r++, scores += kRoomKeys) {
      Vec<Acc> unit = set(Acc{1});
      if constexpr (kIntegers<Mode>) unit = set(Vectors::factor(memory.q + (row0 + r) * q_stride_, q_stride_));
      for (i64 j = 0; j < n1 - n0; j += lanes) store(scores + j, load(scores + j) * (load(factors + j) * unit));
    }
  }
  // Probabilities as the products take them. The row sums have been taken.
  void make_weights(const SplitTask& t, i64 n0, i64 n1, Acc* scores, int rows, const Memory& memory) const {
    const int padded = static_cast<int>(round_up(n1 - n0, kSubKeys));
    const Acc* const factors = f_.stored == Stored::plain ? nullptr : scales_of(t, f_.v_scales, n0, n1, memory);
    if constexpr (kIntegers<Mode>) {
      Vectors::weights(scores, rows, padded, factors);
    } else {
      for (int r = 0; r < rows; r++, scores += kRoomKeys) {
        for (int j = 0; factors != nullptr && j < padded; j += lanes)
          store(scores + j, load(scores + j) * load(factors + j));
        Vectors::weights(scores, padded);
      }
    }
  }

  // Heads that see the same keys of a block go together; keys that a head does not see do not reach it.
  void block(const SplitTask& t, i64 n0, i64 n1, const State& to, const Memory& memory) const {
    const int m = static_cast<int>(t.seq.queries);
    for (i64 g = 0; g < t.heads; g++) {
      if (g > 0 && alike_) {
        memory.tiles[g] = memory.tiles[0];
        continue;
      }
      const Mask mask(f_, t.seq.b, t.first_head + g, t.seq.queries, t.seq.keys, memory.expr, true);
      MaskedTile tile;
      tile.bits = memory.bits + g * kRoomKeys;
      if (!tile.resolve(mask, 0, m, n0, n1)) tile.begin = tile.end = 0;
      memory.tiles[g] = tile;
    }
    for (i64 g = 0, end = 0; g < t.heads; g = end) {
      const MaskedTile& tile = memory.tiles[g];
      end = g + 1;
      while (end < t.heads && memory.tiles[end].begin == tile.begin && memory.tiles[end].end == tile.end) end++;
      if (tile.begin < tile.end) heads(t, g, end, to, memory);
    }
  }

  void heads(const SplitTask& t, i64 g0, i64 g1, const State& to, const Memory& memory) const {
    const i64 n0 = memory.tiles[g0].begin, n1 = memory.tiles[g0].end;
    const int m = static_cast<int>(t.seq.queries), count = static_cast<int>(n1 - n0);
    const int padded = static_cast<int>(round_up(count, kSubKeys));
    const int row0 = static_cast<int>(g0) * m, rows = static_cast<int>(g1 - g0) * m;
    Acc* scores = memory.scores + static_cast<i64>(row0) * kRoomKeys;
    const bool streamed = streams_ && count == padded;
    if (streamed) {
      if constexpr (Product::streaming > 0)
        Product::dots(memory.q + row0 * q_stride_, q_stride_, rows, stream(t, f_.k, f_.head_dim, n0, n1), count,
                      f_.head_dim, scores, kRoomKeys);
    } else {
      find(t, f_.k, n0, n1, f_.head_dim, memory.key_rows, memory.keys, memory);
      for (int j = count; j < padded; j++) memory.keys[j] = memory.keys[count - 1];
      Product::dots(memory.room, memory.q, q_stride_, row0, rows, memory.keys, padded, f_.head_dim, scores, kRoomKeys,
                    *memory.ahead);
    }
    if (f_.stored != Stored::plain) scale_scores(t, n0, n1, row0, scores, rows, memory);
    for (int r = 0; r < rows; r++)
      for (int j = count; j < padded; j++) scores[r * kRoomKeys + j] = -kInfinity;
    for (i64 g = g0; g < g1; g++) head(t, g, to, memory);
    memory.ahead->spread(memory.ahead->left() / 6, 2 * rows);
    softmax(row0, rows, padded, to, memory);
    if (f_.dropout > 0)
      for (i64 g = g0; g < g1; g++) drop(t, g, n0, count, memory);
    make_weights(t, n0, n1, scores, rows, memory);
    const Word* p = reinterpret_cast<const Word*>(scores);
    Acc* out = to.out + row0 * out_stride_;
    if (streamed) {
      if constexpr (Product::streaming > 0)
        Product::sums(p, rows, stream(t, f_.v, f_.value_dim, n0, n1), count, f_.value_dim, out, out_stride_,
                      memory.alpha + row0);
      return;
    }
    find(t, f_.v, n0, n1, f_.value_dim, memory.value_rows, memory.values, memory);
    memory.values[count] = memory.zeros;
    Product::sums(memory.room, p, rows, memory.values, count, f_.value_dim, out, out_stride_, memory.alpha + row0,
                  *memory.ahead);
  }

  // Scores of one head: the score chain, the mask, the top key.
  void head(const SplitTask& t, i64 g, const State& to, const Memory& memory) const {
    const MaskedTile& tile = memory.tiles[g];
    const int m = static_cast<int>(t.seq.queries), count = static_cast<int>(tile.end - tile.begin);
    Acc* scores = memory.scores + g * m * kRoomKeys;
    if (units_.chain) chain(t, g, tile.begin, count, memory);
    if (!tile.plain)
      for (int i = 0; i < m; i++) hide(tile.bits, i, count, scores + i * kRoomKeys);
    if (to.numbers.best == nullptr) return;
    for (int i = 0; i < m; i++) {
      const Acc* row = scores + i * kRoomKeys;
      Acc& best = to.numbers.best[g * m + i];
      if (to.top == nullptr) {  // without a key all that counts is whether one is NaN
        bool odd = false;
        for (int j = 0; j < count; j++) odd |= row[j] != row[j];
        if (odd) best = static_cast<Acc>(__builtin_nan(""));
        continue;
      }
      for (int j = 0; j < count; j++)
        if (beats(row[j], best)) best = row[j], to.top[g * m + i] = tile.begin + j;
    }
  }

  // Scores of pairs whose bit i is not set leave the softmax.
  static void hide(const u64* bits, int i, int count, Acc* scores) {
    static_assert(kSubKeys % lanes == 0);
    for (int j = 0; j < count; j += lanes) {
      u64 seen = 0;
      TW_UNROLL(16)
      for (int x = 0; x < lanes; x++) seen |= (bits[j + x] >> i & 1) << x;
      store(scores + j, select_bits<Acc>(seen, load(scores + j), set(-kInfinity)));
    }
  }

  // The score chain has the keys in its lanes.
  void chain(const SplitTask& t, i64 g, i64 n0, int count, const Memory& memory) const {
    const i64 h = t.first_head + g;
    const int m = static_cast<int>(t.seq.queries);
    const ScoreChain<Acc> steps(f_, t.seq.b, h, t.seq.keys, t.seq.queries, memory.expr, true);
    Acc* scores = memory.scores + g * m * kRoomKeys;
    alignas(kVectorBytes) Acc peak[kTileQueries];
    for (int j = 0; j < count; j += kTileQueries, scores += kTileQueries) {
      const int keys = static_cast<int>(min(kTileQueries, count - j)), width = static_cast<int>(round_up(keys, lanes));
      const std::size_t bytes = static_cast<std::size_t>(keys) * sizeof(Acc);
      for (int i = 0; i < m; i++)
        for (int x = 0; x < width; x += lanes)
          store(memory.chain + i * width + x, load_first(scores + i * kRoomKeys + x, keys - x));
      steps.apply(memory.chain, width, n0 + j, keys, 0, m, {.peak = peak});
      for (int i = 0; i < m; i++) std::memcpy(scores + i * kRoomKeys, memory.chain + i * width, bytes);
    }
  }

  void drop(const SplitTask& t, i64 g, i64 n0, int count, const Memory& memory) const {
    const int m = static_cast<int>(t.seq.queries);
    dropout_bits(f_, t.seq.b, t.first_head + g, 0, static_cast<int>(round_up(m, kLanes<u32>)), n0, count, memory.kept);
    Acc* scores = memory.scores + g * m * kRoomKeys;
    for (int i = 0; i < m; i++)
      for (int j = 0; j < count; j++)
        if ((memory.kept[j] >> i & 1) == 0) scores[i * kRoomKeys + j] = 0;
  }

  // Scores of rows row0 .. row0 + rows - 1 become probabilities relative to the new row maxima.
  void softmax(int row0, int rows, int padded, const State& to, const Memory& memory) const {
    Acc* scores = memory.scores + static_cast<i64>(row0) * kRoomKeys;
    const Acc factor = units_.to_base2;
    each_fold<Largest>(rows, memory.peak, [&](int r) {
      memory.ahead->step();
      Vec<Acc> top = set(-kInfinity);
      for (int j = 0; j < padded; j += lanes) top = vmax(load(scores + r * kRoomKeys + j), top);
      return top;
    });
    alignas(kVectorBytes) Acc tops[kDecodeRows];
    const RowNumbers<Acc>& numbers = to.numbers;
    for (int r = 0; r < rows; r++) {
      const Acc before = numbers.row_max[row0 + r], here = memory.peak[r];
      const Acc now = here > before ? here : before;
      // A row that has seen no key yet has no maximum to subtract.
      tops[r] = now == -kInfinity ? 0 : now;
      numbers.row_max[row0 + r] = now;
      const Acc change = (before - tops[r]) * factor;
      const Acc alpha = before == -kInfinity ? 0 : exp2<5>(set(change), Acc{})[0];
      memory.alpha[row0 + r] = alpha;
      if (numbers.row_moment == nullptr) continue;
      // What was relative to the maximum before becomes relative to the one now.
      const Acc moved = change > kFar<Acc> ? change : kFar<Acc>;
      Acc& moment = numbers.row_moment[row0 + r];
      moment = (moment + moved * numbers.row_sum[row0 + r]) * alpha;
      Vec<Acc> sum{};
      for (int j = 0; j < padded; j += lanes) {
        const Vec<Acc> x = (load(scores + r * kRoomKeys + j) - tops[r]) * factor;
        sum = fused(exp2<Mode::exp2_degree>(x, Acc{}), vmax(set(kFar<Acc>), x), sum);
      }
      memory.peak[r] = 0;
      for (int i = 0; i < lanes; i++) memory.peak[r] += sum[i];
      moment += memory.peak[r];
    }
    each_fold<Sum>(rows, memory.peak, [&](int r) {
      memory.ahead->step();
      Vec<Acc> sum{};
      for (int j = 0; j < padded; j += lanes) {
        Acc* p = scores + r * kRoomKeys + j;
        const Vec<Acc> e = exp2<Mode::exp2_degree>((load(p) - tops[r]) * factor, Acc{});
        sum += e;
        store(p, e);
      }
      return sum;
    });
    for (int r = 0; r < rows; r++) {
      Acc& sum = numbers.row_sum[row0 + r];
      sum = sum * memory.alpha[row0 + r] + memory.peak[r];
    }
  }

  // What a later split left, into what those before it have.
  void merge(const SplitTask& t, const State& to, const State& from) const {
    const RowNumbers<Acc>&a = to.numbers, &b = from.numbers;
    alignas(kVectorBytes) Acc mine[kDecodeRows], theirs[kDecodeRows];
    const int count = static_cast<int>(rows(t));
    for (int i = 0; i < count; i += lanes) {
      const Vec<Acc> x = load(a.row_max + i), y = load(b.row_max + i), now = vmax(y, x);
      const Vec<Acc> safe = now == -kInfinity ? Vec<Acc>{} : now;
      const Vec<Acc> fall = (x - safe) * units_.to_base2, other = (y - safe) * units_.to_base2;
      const Vec<Acc> keep = exp2<5>(fall, Acc{}), take = exp2<5>(other, Acc{});
      store(mine + i, keep);
      store(theirs + i, take);
      if (a.row_moment != nullptr) {
        const Vec<Acc> far = set(kFar<Acc>);
        const Vec<Acc> first = (load(a.row_moment + i) + vmax(far, fall) * load(a.row_sum + i)) * keep;
        const Vec<Acc> second = (load(b.row_moment + i) + vmax(far, other) * load(b.row_sum + i)) * take;
        store(a.row_moment + i, first + second);
      }
      store(a.row_sum + i, fused(load(b.row_sum + i), take, load(a.row_sum + i) * keep));
      store(a.row_max + i, now);
    }
    for (int r = 0; r < count; r++) {
      const Vec<Acc> keep = set(mine[r]), take = set(theirs[r]);
      Acc* out = to.out + r * out_stride_;
      const Acc* more = from.out + r * out_stride_;
      for (i64 d = 0; d < out_stride_; d += lanes)
        store(out + d, fused(load(more + d), take, rounded(load(out + d) * keep, Acc{})));
    }
    for (int r = 0; a.best != nullptr && r < count; r++) {
      if (!beats(b.best[r], a.best[r])) continue;
      a.best[r] = b.best[r];
      if (to.top != nullptr) to.top[r] = from.top[r];
    }
  }

  void close(const SplitTask& t, const State& from) const {
    const int count = static_cast<int>(rows(t)), m = static_cast<int>(t.seq.queries);
    const int width = static_cast<int>(round_up(count, lanes));
    alignas(kVectorBytes) Acc sinks[kTileQueries] = {};
    if (f_.sinks != nullptr)
      for (int r = 0; r < count; r++) sinks[r] = static_cast<const Acc*>(f_.sinks)[t.first_head + r / m];
    const ClosedRows<Acc> closed(from.numbers, width, f_.sinks != nullptr ? sinks : nullptr, f_.dropout, units_);
    for (i64 g = 0; g < t.heads; g++) {
      const i64 h = t.first_head + g, row = t.seq.query_begin;
      const int first = static_cast<int>(g) * m;
      closed.write(f_, from.numbers, first, m, t.seq.b, h, row);
      for (int i = 0; i < m; i++) {
        if (f_.top_key.data) *rows_at<i64>(f_.top_key, t.seq.b, h, row + i) = from.top[first + i];
        write_row<Mode>(f_, closed, first + i, from.out + (first + i) * out_stride_, t.seq.b, h, row + i);
      }
    }
  }

  const Forward& f_;
  ScoreUnits<Acc> units_;
  i64 q_stride_, out_stride_, rows_ = 0, heads_ = 0;
  std::size_t state_bytes_ = 0;
  bool alike_, near_ = false, streams_ = false;
};

}  // namespace tilewise::TILEWISE_ISA
