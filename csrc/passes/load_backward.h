// The gradients of what the expression of the score chain loads: for every pair dS (after the expression) times the
// derivative by the load, added to the element that was read, in double. Where indices say that tiles add to elements
// of their own (by `b`, `h` or `m`), those tiles are the tasks. Else tiles are dealt out to fixed chunks, each with
// sums of its own, which are then added in order of the chunks. Either way no bit depends on threads.
#pragma once

#include "passes/tile_gradients.h"

namespace tilewise::TILEWISE_ISA {

constexpr i64 kMostLoadChunks = 16;
constexpr i64 kLoadSums = i64{1} << 23;  // numbers that all chunks together may keep, if they are more than one

template <class Mode>
class LoadKernel {
  using Acc = typename Mode::Acc;
  using Word = typename Mode::Word;
  using Tiles = TileGradients<Mode>;
  using Run = ExprRun<Acc>;
  static constexpr int lanes = kLanes<Acc>;

 public:
  explicit LoadKernel(const LoadBackward& f) : f_(f), program_(*f.loads), tiles_(f) {}

  bool run() {
    const QueryTasks tasks(f_, kTileQueries);
    if (tasks.count() < 0) return false;
    i64 first[kMaxLoads + 1] = {};  // of each tensor among a chunk's sums
    for (int t = 0; t < f_.tensors; t++) first[t + 1] = first[t] + f_.size[t];
    const i64 size = first[f_.tensors];
    if (size == 0) return true;
    const i64 chunks = max(1, min(min(kMostLoadChunks, kLoadSums / size), tasks.count()));
    const unsigned own = owned();
    const i64 batches = own & 1 ? f_.batch : 1, heads = own & 2 ? f_.heads : 1, tiles = own & 4 ? tile_count() : 1;
    return batches * heads * tiles >= chunks ? run_owned(batches, heads, tiles)
                                             : run_chunks(tasks, first, size, chunks);
  }

 private:
  struct Memory {
    typename Tiles::Memory tile;
    Word *keys, *values;
    Acc *raw, *share;
    double* sums[kMaxLoads] = {};
    Memory(const Backward& f, void* base, std::size_t* bytes = nullptr) : Memory(f, Carver(base), bytes) {}

   private:
    Memory(const Backward& f, Carver carve, std::size_t* bytes) : tile(f, carve) {
      keys = carve.take<Word>(key_room<Mode>(kRoomKeys, f.head_dim));
      values = carve.take<Word>(key_room<Mode>(kRoomKeys, f.value_dim));
      raw = carve.take<Acc>(kRoomKeys * kTileQueries);
      share = carve.take<Acc>(kSubKeys * kTileQueries);
      if (bytes) *bytes = carve.used();
    }
  };

  i64 tile_count() const { return (f_.queries + kTileQueries - 1) / kTileQueries; }

  // By which of b (1), h (2) and m (4) every load has an index of its own, which no clamping makes equal.
  unsigned owned() const {
    unsigned all = 7;
    for (int x = 0; x < program_.loads; x++) {
      const ExprValue& load = program_.load[x];
      unsigned own = 0;
      for (int d = 0; d < load.count; d++) {
        const ExprOp op = program_.values[load.arg[d]].op;
        if (!agreed(x, d)) continue;
        const i64 size = program_.tensors[load.slot].size[d];
        if (op == ExprOp::batch && size >= f_.batch) own |= 1;
        if (op == ExprOp::head && size >= f_.heads) own |= 2;
        if (op == ExprOp::query && size >= f_.queries) own |= 4;
      }
      all &= own;
    }
    return all;
  }

  // Whether all loads from the tensor of load x have the same position for index d.
  bool agreed(int x, int d) const {
    for (int y = 0; y < program_.loads; y++)
      if (f_.tensor[y] == f_.tensor[x] && program_.load[y].arg[d] != program_.load[x].arg[d]) return false;
    return true;
  }

  bool run_owned(i64 batches, i64 heads, i64 tiles) const {
    std::size_t bytes;
    Memory(f_, nullptr, &bytes);
    return for_tasks<typename Mode::Session>(f_.threads, batches * heads * tiles, bytes, [&](i64 task, void* base) {
      Memory memory(f_, base);
      for (int t = 0; t < f_.tensors; t++) memory.sums[t] = f_.grad[t];
      const i64 t = task % tiles, h = task / tiles % heads, b = task / (tiles * heads);
      for (i64 bb = batches > 1 ? b : 0; bb < (batches > 1 ? b + 1 : f_.batch); bb++)
        for (i64 hh = heads > 1 ? h : 0; hh < (heads > 1 ? h + 1 : f_.heads); hh++)
          for (i64 tt = tiles > 1 ? t : 0; tt < (tiles > 1 ? t + 1 : tile_count()); tt++)
            query_tile(bb, hh, tt, memory);
    });
  }

  bool run_chunks(const QueryTasks& tasks, const i64* first, i64 size, i64 chunks) const {
    double* sums = static_cast<double*>(std::calloc(static_cast<std::size_t>(chunks * size), sizeof(double)));
    if (sums == nullptr) return false;
    std::size_t bytes;
    Memory(f_, nullptr, &bytes);
    const bool done = for_tasks<typename Mode::Session>(f_.threads, chunks, bytes, [&](i64 chunk, void* base) {
      Memory memory(f_, base);
      for (int t = 0; t < f_.tensors; t++) memory.sums[t] = sums + chunk * size + first[t];
      for (i64 task = chunk; task < tasks.count(); task += chunks) {
        i64 b, h, tile;
        tasks.locate(task, b, h, tile);
        query_tile(b, h, tile, memory);
      }
    });
    if (done)
      for (int t = 0; t < f_.tensors; t++) add_chunks(sums + first[t], size, chunks, f_.size[t], f_.grad[t]);
    std::free(sums);
    return done;
  }

  static void add_chunks(const double* sums, i64 stride, i64 chunks, i64 size, double* to) {
    for (i64 x = 0; x < size; x++) {
      double sum = sums[x];
      for (i64 c = 1; c < chunks; c++) sum += sums[c * stride + x];
      to[x] = sum;
    }
  }

  void query_tile(i64 b, i64 h, i64 tile, Memory& memory) const {
    const Sequence seq = sequence(f_, b);
    const i64 m0 = tile * kTileQueries;
    if (m0 >= seq.queries) return;
    const int rows = static_cast<int>(min(kTileQueries, seq.queries - m0));
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    const ScoreChain<Acc> chain(f_, b, h, seq.queries, seq.keys, memory.tile.expr);
    Run run(program_, memory.tile.expr);
    run.open(b, h, seq.queries, seq.keys);
    const Range all{0, seq.keys};
    bool begun = false;
    const auto visit = [&](const MaskedTile& masked, Words<Word> keys, Words<Word> values) {
      if (!begun) run.tile(m0, rows);
      begun = true;
      tiles_.template compute<true>(seq, h, masked, keys, values, chain, memory.tile, 1, memory.raw);
      const int count = static_cast<int>(masked.end - masked.begin);
      for (int j = 0; j < count; j += kSubKeys)
        piece(run, masked, j, static_cast<int>(min(kSubKeys, count - j)), memory);
    };
    tiles_.each_block(seq, h, m0, mask, memory, all, visit);
  }

  // Keys masked.begin + j .. + count - 1.
  void piece(Run& run, const MaskedTile& masked, int j, int count, Memory& memory) const {
    const int width = memory.tile.tile.width;
    run.piece(memory.raw + static_cast<i64>(j) * width, masked.begin + j, count);
    for (int x = 0; x < program_.loads; x++) {
      share(run.output(x), memory.tile.grads + static_cast<i64>(j) * width, masked.plain ? nullptr : masked.bits + j,
            count, memory);
      if constexpr (sizeof(Acc) == 8) {
        scatter<i64>(run, x, count, memory);
      } else if (program_.wide) {
        scatter<i64>(run, x, count, memory);
      } else {
        scatter<i32>(run, x, count, memory);
      }
    }
  }

  // dS times the derivative; 0 for pairs that are hidden or not there, whatever the derivative is.
  void share(Operand derivative, const Acc* ds, const u64* bits, int count, Memory& memory) const {
    const int width = memory.tile.tile.width, rows = memory.tile.tile.rows;
    const u64 there = rows == 64 ? ~u64{0} : (u64{1} << rows) - 1;
    for (int j = 0; j < count; j++) {
      const u64 seen = bits ? bits[j] & there : there;
      for (int i = 0; i < width; i += lanes)
        store(memory.share + j * width + i,
              keep_where<Acc>(seen >> i, load(ds + j * width + i) * load(derivative.at<Acc>(j, i))));
    }
  }

  template <class I>
  TW_NOINLINE void scatter(const Run& run, int x, int count, Memory& memory) const {
    const ExprValue& value = program_.load[x];
    const ExprTensor& tensor = program_.tensors[value.slot];
    i64 stride[kMaxRank], size = 1;
    for (int d = tensor.rank; d-- > 0; size *= tensor.size[d]) stride[d] = size;
    if (size == 0) return;
    double* sums = memory.sums[f_.tensor[x]];
    const int width = memory.tile.tile.width, rows = memory.tile.tile.rows;
    const typename Run::template Places<I> places(run, value, stride);
    alignas(kVectorBytes) I at[kTileQueries];
    if (value.extent == per_diagonal) return scatter_diagonals<I>(run, places, count, sums, memory);
    if (value.extent == per_query) {
      for (int i = 0; i < width; i += kLanes<I>) store(at + i, places.vector(places.row(0), 0, i));
      for (int i = 0; i < rows; i++) {
        double sum = 0;
        for (int j = 0; j < count; j++) sum += memory.share[j * width + i];
        sums[at[i]] += sum;
      }
      return;
    }
    for (int j = 0; j < count; j++) {
      const i64 row = places.row(j);
      const Acc* share = memory.share + j * width;
      if (value.extent == whole_tile || value.extent == per_key) {
        double sum = 0;
        for (int i = 0; i < rows; i++) sum += share[i];
        sums[row] += sum;
        continue;
      }
      for (int i = 0; i < width; i += kLanes<I>) store(at + i, places.vector(row, j, i));
      // Neighbours often read the same element: one addition for all of them.
      I last = at[0];
      double sum = share[0];
      for (int i = 1; i < rows; i++) {
        if (at[i] != last) {
          sums[last] += sum;
          last = at[i];
          sum = 0;
        }
        sum += share[i];
      }
      sums[last] += sum;
    }
  }

  // What depends on m - n alone: the sum of a diagonal at a time.
  template <class I, class P>
  void scatter_diagonals(const Run& run, const P& places, int count, double* sums, Memory& memory) const {
    const int width = memory.tile.tile.width, rows = memory.tile.tile.rows;
    double diagonal[kDiagonals + kTileQueries] = {};
    for (int j = 0; j < count; j++) {
      const Acc* share = memory.share + j * width;
      double* to = diagonal + kDiagonals - j;
      for (int i = 0; i < rows; i++) to[i] += share[i];
    }
    alignas(kVectorBytes) I at[kDiagonals + kTileQueries];
    for (int i = 0; i < run.columns(per_diagonal); i += kLanes<I>) store(at + i, places.vector(places.row(0), 0, i));
    for (int i = kDiagonals + 1 - count; i < kDiagonals + rows; i++) sums[at[i]] += diagonal[i];
  }

  const LoadBackward& f_;
  const ExprProgram& program_;
  Tiles tiles_;
};

}  // namespace tilewise::TILEWISE_ISA
