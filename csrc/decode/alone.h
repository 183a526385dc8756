// Short sequences of one query whose heads share no keys: a task has several of them, and computes the
// next scores before the last ones become weights, where every step waits for the one before it. Rows get the bits that
// DecodeKernel gives them.
#pragma once

#include "decode/products.h"
#include "decode/state.h"
#include "decode/tasks.h"
#include "variants/score.h"

namespace tilewise::TILEWISE_ISA {

template <class Mode, class Product>
class RowsAlone {
  using Elem = typename Mode::Elem;
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Vectors = typename Product::Vectors;
  using State = RowState<Acc>;
  static constexpr int lanes = kLanes<Acc>;
  static constexpr i64 kRows = 16;  // of a task
  static constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());

 public:
  // What else may be asked for is left to DecodeKernel.
  static bool serves(const Forward& f, const ScoreUnits<Acc>& units) {
    const bool alone = f.queries <= Product::alone && f.heads == f.kv_heads,
               few = KeyBlocks(f.keys).count <= kSplitBlocks,
               plain = !units.chain && f.dropout == 0 && f.stored == Stored::plain,
               asked = f.entropy.data != nullptr || f.top_key.data != nullptr;
    return alone && few && plain && !asked && f.k.col == 1 && f.v.col == 1;
  }

  RowsAlone(const Forward& f, const SplitTasks& tasks, const ScoreUnits<Acc>& units, bool near)
      : f_(f),
        tasks_(tasks),
        units_(units),
        near_(near),
        q_stride_(row_words<Mode, Product>(f.head_dim)),
        out_stride_(round_up(f.value_dim, Vectors::sums * lanes)) {}

  bool run() const {
    const i64 count = tasks_.count(), threads = max(1, f_.threads);
    const i64 most = kRows / f_.queries, each = threads == 1 ? most : min(most, max(1, count / (4 * threads)));
    const Memory sizes(*this, nullptr);
    return for_tasks(f_.threads, (count + each - 1) / each, sizes.bytes, [&](i64 task, void* base) {
      heads(task * each, min(each, count - task * each), Memory(*this, base));
    });
  }

 private:
  struct Memory {
    Word* q;
    Acc* scores[2];
    const Elem **keys, **values, **next_keys, **next_values;
    Elem* zeros;
    u64* bits[2];
    char *expr, *state;
    RowsAhead* ahead;
    Carver carve;
    typename Product::Room room;
    std::size_t bytes;
    Memory(const RowsAlone& kernel, void* base) : carve(base), room(carve, kRows, kernel.f_.head_dim) {
      const Forward& f = kernel.f_;
      q = carve.take<Word>(kRows * kernel.q_stride_);
      for (Acc*& array : scores) array = carve.take<Acc>(kRoomKeys);
      for (const Elem*** array : {&keys, &values, &next_keys, &next_values})
        *array = carve.take<const Elem*>(kRoomKeys + kSubKeys);
      zeros = carve.take<Elem>(f.value_dim);
      for (u64*& array : bits) array = carve.take<u64>(f.mask_length > 0 ? kRoomKeys : 0);
      expr = carve.take<char>(f.expr_room);
      ahead = carve.take<RowsAhead>(1);
      state = carve.take<char>(static_cast<i64>(kernel.state(nullptr).bytes));
      bytes = carve.used();
    }
  };

  struct Row : SplitTask {
    i64 m;  // its query's place in the sequence
    i64 place() const { return seq.query_begin + m; }
  };

  // Keys of one row that are multiplied together: those of a block that it may see.
  struct Piece {
    int row;
    i64 block;
    MaskedTile keys;
    int count() const { return static_cast<int>(keys.end - keys.begin); }
    int padded() const { return static_cast<int>(round_up(count(), kSubKeys)); }
  };

  State state(void* base) const { return State(base, kRows, out_stride_, false, false); }

  void heads(i64 first, i64 tasks, const Memory& memory) const {
    Row t[kRows];
    i64 count = 0;
    for (i64 x = first; x < first + tasks; x++) {
      Row& row = t[count++];
      static_cast<SplitTask&>(row) = tasks_[x];
      row.m = 0;
      for (i64 m = 1; m < row.seq.queries; m++) t[count] = row, t[count++].m = m;
    }
    rows(t, count, memory);
  }

  void rows(const Row* t, i64 count, const Memory& memory) const {
    const State state = this->state(memory.state);
    state.open(count, out_stride_);
    memory.ahead->clear();
    std::memset(memory.zeros, 0, static_cast<std::size_t>(f_.value_dim) * sizeof(Elem));
    for (i64 r = 0; r < count; r++) {
      const i64 at = view_at(f_.q, t[r].seq.b, t[r].first_head, t[r].place());
      Vectors::pack(Mode::at(f_.q.data, at), f_.q.row, f_.q.col, 1, f_.head_dim, q_stride_, memory.q + r * q_stride_);
    }
    memory.room.open(memory.q, q_stride_, 1, f_.head_dim);
    Piece now{-1, 0, {}};
    int turn = 0;
    bool more = next(t, count, memory, turn, now);
    if (more && near_) multiply_keys(t[now.row], now, memory, memory.scores[turn]);
    if (more && !near_) fetch(t[now.row], now, memory), memory.ahead->all();
    while (more) {
      Acc* scores = memory.scores[turn];
      turn = 1 - turn;
      Piece then = now;
      more = next(t, count, memory, turn, then);
      // What is not near comes while this piece is computed, and what is near is multiplied early.
      if (near_) {
        if (more) multiply_keys(t[then.row], then, memory, memory.scores[turn]);
      } else {
        if (more) fetch(t[then.row], then, memory);
        multiply_keys(t[now.row], now, memory, scores);
      }
      const Acc alpha = softmax(now, scores, state.numbers);
      add_values(t[now.row], now, alpha, memory, scores, state.out + now.row * out_stride_);
      now = then;
    }
    memory.room.close();
    close(t, static_cast<int>(count), state);
  }

  bool next(const Row* t, i64 count, const Memory& memory, int turn, Piece& piece) const {
    for (;;) {
      if (piece.row >= 0 && piece.block + 1 < t[piece.row].last_block) {
        piece.block++;
      } else {
        do {
          if (++piece.row >= count) return false;
        } while (t[piece.row].first_block >= t[piece.row].last_block);
        piece.block = t[piece.row].first_block;
      }
      const Row& x = t[piece.row];
      const KeyBlocks blocks(x.key_limit);
      MaskedTile& keys = piece.keys;
      keys.begin = blocks.begin(piece.block), keys.end = blocks.end(piece.block);
      if (f_.mask_length == 0) return true;
      const Mask mask(f_, x.seq.b, x.first_head, x.seq.queries, x.seq.keys, memory.expr, true);
      keys.bits = memory.bits[turn];
      if (keys.resolve(mask, x.m, 1, keys.begin, keys.end) && keys.begin < keys.end) return true;
    }
  }

  void fetch(const Row& t, const Piece& piece, const Memory& memory) const {
    if (t.m > 0) return;
    point_rows(f_, f_.k, t.seq, t.kv_head, piece.keys.begin, piece.keys.end, memory.next_keys);
    point_rows(f_, f_.v, t.seq, t.kv_head, piece.keys.begin, piece.keys.end, memory.next_values);
    memory.ahead->aim(memory.next_keys, memory.next_values, piece.count(), f_.head_dim, f_.value_dim);
  }

  void multiply_keys(const Row& t, const Piece& piece, const Memory& memory, Acc* scores) const {
    const int count = piece.count(), padded = piece.padded();
    const Word* q = memory.q + piece.row * q_stride_;
    const KeyRun run = key_run(f_, f_.k, t.seq, t.kv_head, piece.keys.begin, piece.keys.end);
    if (near_ && count >= kSubKeys && run.count == count) {
      // Instead of a rest of less than kSubKeys keys as many as that are multiplied, some of them again.
      const EvenRows<Elem> keys{Mode::at(f_.k.data, run.at), f_.k.row};
      Product::dot_row(memory.room, q, keys, count / kSubKeys * kSubKeys, f_.head_dim, scores);
      const int last = count - kSubKeys;
      if (count < padded) Product::dot_row(memory.room, q, keys.from(last), kSubKeys, f_.head_dim, scores + last);
    } else {
      point_rows(f_, f_.k, t.seq, t.kv_head, piece.keys.begin, piece.keys.end, memory.keys);
      for (int j = count; j < padded; j++) memory.keys[j] = memory.keys[count - 1];
      Product::dots(memory.room, q, q_stride_, 0, 1, memory.keys, padded, f_.head_dim, scores, kRoomKeys,
                    *memory.ahead);
    }
    for (int j = count; j < padded; j++) scores[j] = -kInfinity;
    if (piece.keys.plain) return;
    for (int j = 0; j < count; j++)
      if ((piece.keys.bits[j] & 1) == 0) scores[j] = -kInfinity;
  }

  // What DecodeKernel::softmax does; returns the factor of the sums so far.
  Acc softmax(const Piece& piece, Acc* scores, const RowNumbers<Acc>& numbers) const {
    const int padded = piece.padded();
    const Acc factor = units_.to_base2;
    Vec<Acc> top = set(-kInfinity);
    for (int j = 0; j < padded; j += lanes) top = vmax(load(scores + j), top);
    const Acc before = numbers.row_max[piece.row], here = fold_vector<Largest, Acc>(top);
    const Acc now = here > before ? here : before, from = now == -kInfinity ? 0 : now;
    const Acc alpha = before == -kInfinity ? 0 : exp2<5>(set((before - from) * factor), Acc{})[0];
    Vec<Acc> sum{};
    for (int j = 0; j < padded; j += lanes) {
      const Vec<Acc> e = exp2<Mode::exp2_degree>((load(scores + j) - from) * factor, Acc{});
      sum += e;
      store(scores + j, e);
    }
    numbers.row_max[piece.row] = now;
    Acc& total = numbers.row_sum[piece.row];
    total = total * alpha + fold_vector<Sum, Acc>(sum);
    Vectors::weights(scores, padded);
    return alpha;
  }

  void add_values(const Row& t, const Piece& piece, Acc alpha, const Memory& memory, const Acc* scores,
                  Acc* out) const {
    const int count = piece.count();
    const Word* p = reinterpret_cast<const Word*>(scores);
    const KeyRun run = key_run(f_, f_.v, t.seq, t.kv_head, piece.keys.begin, piece.keys.end);
    if (near_ && run.count == count && count % Mode::per_word == 0) {
      const EvenRows<Elem> values{Mode::at(f_.v.data, run.at), f_.v.row};
      return Product::sum_row(p, values, count, f_.value_dim, out, alpha);
    }
    point_rows(f_, f_.v, t.seq, t.kv_head, piece.keys.begin, piece.keys.end, memory.values);
    memory.values[count] = memory.zeros;
    Product::sums(memory.room, p, 1, memory.values, count, f_.value_dim, out, out_stride_, &alpha, *memory.ahead);
  }

  void close(const Row* t, int count, const State& state) const {
    const int width = static_cast<int>(round_up(count, lanes));
    alignas(kVectorBytes) Acc sinks[kTileQueries] = {};
    if (f_.sinks != nullptr)
      for (int r = 0; r < count; r++) sinks[r] = static_cast<const Acc*>(f_.sinks)[t[r].first_head];
    const ClosedRows<Acc> closed(state.numbers, width, f_.sinks != nullptr ? sinks : nullptr, 0, units_);
    for (int r = 0; r < count; r++) {
      closed.write(f_, state.numbers, r, 1, t[r].seq.b, t[r].first_head, t[r].place());
      write_row<Mode>(f_, closed, r, state.out + r * out_stride_, t[r].seq.b, t[r].first_head, t[r].place());
    }
  }

  const Forward& f_;
  const SplitTasks& tasks_;
  ScoreUnits<Acc> units_;
  bool near_;
  i64 q_stride_, out_stride_;
};

}  // namespace tilewise::TILEWISE_ISA
