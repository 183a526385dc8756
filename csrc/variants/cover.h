// The table of a mask (Covers): for each row of rectangles every leaf of the program answers by intervals, the
// connectives combine the answers, and what is then neither empty nor full for certain is evaluated until both a
// visible and a hidden pair are found. Documents are summed up first, so that a rectangle costs a comparison.
#pragma once

#include "variants/mask.h"

namespace tilewise::TILEWISE_ISA {

class CoverKernel {
 public:
  explicit CoverKernel(const Covers& f) : f_(f) {}
  ~CoverKernel() { std::free(spans_); }
  CoverKernel(const CoverKernel&) = delete;
  CoverKernel& operator=(const CoverKernel&) = delete;

  bool run() {
    if (!sum_up_documents()) return false;
    Memory sizes(f_, nullptr);
    const i64 tasks = f_.columns == 0 ? 0 : f_.batches * f_.heads_apart * f_.rows;  // no keys: no table to fill
    // A small table is done before a team of threads has started.
    const int threads = tasks * f_.columns < kSmallTable ? 1 : f_.threads;
    return for_tasks(threads, tasks, sizes.bytes, [&](i64 task, void* base) {
      const i64 t = task % f_.rows, h = task / f_.rows % f_.heads_apart, b = task / (f_.rows * f_.heads_apart);
      row(b, h, t, f_.table + task * f_.columns, Memory(f_, base));
    });
  }

 private:
  static constexpr i64 kSmallTable = 2048;
  static constexpr i64 kGroup = 8;  // rectangles along the keys that an expression is asked for at once

  struct Memory {
    char* expr;
    unsigned char* stack;
    std::size_t bytes;
    Memory(const Covers& f, void* base) {
      Carver carve(base);
      expr = carve.take<char>(f.expr_room);
      stack = carve.take<unsigned char>(max(f.mask_length, 1) * f.columns);
      bytes = carve.used();
    }
  };

  // The lowest and highest ids of each rectangle's queries or keys.
  struct Spans {
    i64 *low, *high;
  };
  i64 spans_per_document() const { return 2 * (f_.rows + f_.columns); }
  Spans query_spans(int document, i64 b) const {
    i64* at = spans_ + (document * f_.batches + b) * spans_per_document();
    return {at, at + f_.rows};
  }
  Spans key_spans(int document, i64 b) const {
    i64* at = spans_ + (document * f_.batches + b) * spans_per_document() + 2 * f_.rows;
    return {at, at + f_.columns};
  }

  bool sum_up_documents() {
    int documents = 0;
    for (int i = 0; i < f_.mask_length; i++) documents += f_.mask[i].op == MaskOp::same_document;
    const i64 size = documents * f_.batches * spans_per_document();
    if (size == 0) return true;
    spans_ = static_cast<i64*>(std::malloc(static_cast<std::size_t>(size) * sizeof(i64)));
    if (spans_ == nullptr) return false;
    documents = 0;
    for (int i = 0; i < f_.mask_length; i++) {
      const MaskInstr& x = f_.mask[i];
      if (x.op != MaskOp::same_document) continue;
      for (i64 b = 0; b < f_.batches; b++) {
        const Sequence seq = sequence(f_, b);
        sum_up(x.query_ids + b * x.query_batch, seq.queries, f_.block_queries, query_spans(documents, b));
        sum_up(x.key_ids + b * x.key_batch, seq.keys, f_.block_keys, key_spans(documents, b));
      }
      documents++;
    }
    return true;
  }
  static void sum_up(const i64* ids, i64 count, i64 block, Spans to) {
    for (i64 first = 0, t = 0; first < count; first += block, t++) {
      i64 low = ids[first], high = ids[first];
      for (i64 i = first + 1; i < min(first + block, count); i++) {
        low = ids[i] < low ? ids[i] : low;
        high = ids[i] > high ? ids[i] : high;
      }
      to.low[t] = low;
      to.high[t] = high;
    }
  }

  // Row t of rectangles.
  void row(i64 b, i64 h, i64 t, unsigned char* to, const Memory& memory) const {
    const Sequence seq = sequence(f_, b);
    const i64 m0 = t * f_.block_queries, m1 = min(m0 + f_.block_queries, seq.queries) - 1;
    const i64 columns = m0 > m1 ? 0 : min(f_.columns, (seq.keys + f_.block_keys - 1) / f_.block_keys);
    std::memset(to + columns, empty, static_cast<std::size_t>(f_.columns - columns));
    if (columns == 0) return;
    const Mask mask(f_, b, h, seq.queries, seq.keys, memory.expr);
    unsigned char* stack = memory.stack;
    int top = 0, document = 0;
    for (int i = 0; i < f_.mask_length; i++) {
      const MaskInstr& x = f_.mask[i];
      unsigned char* last = stack + (top - 1) * columns;
      unsigned char* before = stack + (top - 2) * columns;
      switch (x.op) {
        case MaskOp::all:
          for (i64 c = 0; c < columns; c++) before[c] = before[c] < last[c] ? before[c] : last[c];
          top--;
          break;
        case MaskOp::any:
          for (i64 c = 0; c < columns; c++) before[c] = before[c] > last[c] ? before[c] : last[c];
          top--;
          break;
        case MaskOp::negate:
          for (i64 c = 0; c < columns; c++) last[c] = static_cast<unsigned char>(full - last[c]);
          break;
        case MaskOp::tiles:
          for (i64 c = 0; c < columns; c++) {
            const Cover known = table_cover(x, b, h, m0, m1, key(c), beyond(c, seq) - 1);
            if (known != partial) last[c] = static_cast<unsigned char>(known);
          }
          break;
        case MaskOp::same_document:
          documents(query_spans(document, b), key_spans(document, b), t, columns, stack + top * columns);
          document++, top++;
          break;
        default:
          leaf(mask, i, m0, m1, seq, columns, stack + top * columns);
          top++;
      }
    }
    for (i64 c = 0; c < columns; c++) {
      Cover cover = top == 0 ? full : static_cast<Cover>(stack[c]);
      if (cover == partial) cover = evaluated(mask, m0, m1, key(c), beyond(c, seq));
      to[c] = static_cast<unsigned char>(cover);
    }
  }

  i64 key(i64 column) const { return column * f_.block_keys; }
  i64 beyond(i64 column, const Sequence& seq) const { return min(key(column + 1), seq.keys); }

  static void documents(Spans queries, Spans keys, i64 t, i64 columns, unsigned char* to) {
    const i64 low = queries.low[t], high = queries.high[t];
    for (i64 c = 0; c < columns; c++) {
      const bool apart = high < keys.low[c] || keys.high[c] < low;
      const bool same = low == high && keys.low[c] == low && keys.high[c] == low;
      to[c] = static_cast<unsigned char>(apart ? empty : same ? full : partial);
    }
  }

  void leaf(const Mask& mask, int i, i64 m0, i64 m1, const Sequence& seq, i64 columns, unsigned char* to) const {
    const i64 group = f_.mask[i].op == MaskOp::expr ? kGroup : 1;
    for (i64 c = 0; c < columns; c += group) {
      const i64 end = min(c + group, columns);
      const Cover all = mask.classify_leaf(i, m0, m1, key(c), beyond(end - 1, seq) - 1);
      for (i64 x = c; x < end; x++) {
        const bool again = all == partial && end - c > 1;
        to[x] = static_cast<unsigned char>(again ? mask.classify_leaf(i, m0, m1, key(x), beyond(x, seq) - 1) : all);
      }
    }
  }

  // The cover of queries m0 .. m1 and keys n0 .. n1 - 1, by looking at the pairs.
  static Cover evaluated(const Mask& mask, i64 m0, i64 m1, i64 n0, i64 n1) {
    bool some = false, every = true;
    for (i64 m = m0; m <= m1; m += kTileQueries) {
      const int rows = static_cast<int>(min(kTileQueries, m1 + 1 - m));
      const u64 there = rows == 64 ? ~u64{0} : (u64{1} << rows) - 1;
      for (i64 n = n0; n < n1; n += kSubKeys) {
        const int count = static_cast<int>(min(kSubKeys, n1 - n));
        const Cover cover = mask.classify(m, m + rows - 1, n, n + count - 1);
        some |= cover == full;
        every &= cover != empty;
        if (cover == partial) {
          u64 bits[kSubKeys];
          mask.bits(m, rows, n, count, bits);
          for (int j = 0; j < count; j++) some |= (bits[j] & there) != 0, every &= (~bits[j] & there) == 0;
        }
        if (some && !every) return partial;
      }
    }
    return every ? full : empty;
  }

  const Covers& f_;
  i64* spans_ = nullptr;
};

}  // namespace tilewise::TILEWISE_ISA
