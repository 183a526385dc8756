// A mask program over one sequence: which keys are visited at all, which tiles are empty, partial or full
// (three-valued logic over the leaves' intervals), and for partial tiles one bit per pair.
#pragma once

#include "expressions/run.h"
#include "variants/tables.h"

namespace tilewise::TILEWISE_ISA {

struct Range {
  i64 begin, end;
};

class Mask {
 public:
  // `room`: the thread's scratch memory for expressions; without it only lengths and ranges may be asked for.
  // `few`: there are no more than kFewQueries queries, and expressions have the keys in their lanes.
  Mask(const Problem& problem, i64 b, i64 h, i64 queries, i64 keys, char* room = nullptr, bool few = false)
      : code_(problem.mask),
        length_(problem.mask_length),
        b_(b),
        h_(h),
        offset_(keys - queries),
        keys_(keys),
        room_(room),
        table_(table_of(problem)) {
    if (problem.expr_room == 0 || room == nullptr) return;
    for (int i = 0; i < length_; i++) {
      if (code_[i].op != MaskOp::expr) continue;
      by_keys_ = few;
      if (few) std::swap(queries, keys);
      if (code_[i].expr->wide_floats)
        ExprRun<double>(program_of(code_[i]), room).open(b, h, queries, keys);
      else
        ExprRun<float>(program_of(code_[i]), room).open(b, h, queries, keys);
      if (few) std::swap(queries, keys);
    }
  }

  bool everything() const { return length_ == 0; }
  // Whether bits cost less for many keys at a time than what says that some of them need none.
  bool at_once() const { return by_keys_ && table_ == nullptr; }

  // The length of this sequence as far as any query may see it: the number of keys, or fewer by a length
  // that bounds the whole mask. What lies beyond is never read.
  i64 key_limit() const {
    i64 limit = keys_;
    for (int i = 0; i < length_; i++)
      if (code_[i].bounds && code_[i].op == MaskOp::below) limit = min(limit, below(code_[i]));
    return max(limit, 0);
  }

  // Keys that queries first .. last may see at all.
  Range visible(i64 first, i64 last) const {
    Range range{0, key_limit()};
    for (int i = 0; i < length_; i++) {
      const MaskInstr& x = code_[i];
      if (!x.bounds || x.op != MaskOp::band) continue;
      const i64 a = x.bottom_right ? offset_ : 0;
      if (x.left >= 0) range.begin = max(range.begin, a + first - x.left);
      if (x.right >= 0) range.end = min(range.end, a + last + x.right + 1);
    }
    range.end = max(range.end, range.begin);
    return range;
  }

  // The part of the keys [n0, n1) that queries first .. last may see, in whole pieces: what a pass reads must not
  // depend on which other queries it serves.
  Range walked(i64 first, i64 last, i64 n0, i64 n1) const {
    const Range range = visible(first, last);
    return {max(n0, range.begin / kSubKeys * kSubKeys), min(n1, round_up(range.end, kSubKeys))};
  }

  // What a table that speaks for the whole mask says of queries m0 .. m1.
  TableRows table(i64 m0, i64 m1) const {
    return table_ != nullptr && m0 <= m1 ? TableRows(*table_, b_, h_, m0, m1) : TableRows();
  }

  // Queries m0 .. m1 against keys n0 .. n1, all inclusive.
  Cover classify(i64 m0, i64 m1, i64 n0, i64 n1) const {
    if (table_ != nullptr) {
      const Cover known = table_cover(*table_, b_, h_, m0, m1, n0, n1);
      if (known != partial) return known;
    }
    int stack[kMaxMask];
    int top = 0;
    for (int i = 0; i < length_; i++) {
      const MaskInstr& x = code_[i];
      switch (x.op) {
        case MaskOp::all:
          top--;
          stack[top - 1] = stack[top] < stack[top - 1] ? stack[top] : stack[top - 1];
          break;
        case MaskOp::any:
          top--;
          stack[top - 1] = stack[top] > stack[top - 1] ? stack[top] : stack[top - 1];
          break;
        case MaskOp::negate:
          stack[top - 1] = full - stack[top - 1];
          break;
        case MaskOp::tiles: {
          const Cover known = &x == table_ ? partial : table_cover(x, b_, h_, m0, m1, n0, n1);
          if (known != partial) stack[top - 1] = known;
          break;
        }
        default:
          stack[top++] = classify_leaf(x, m0, m1, n0, n1);
      }
    }
    return top == 0 ? full : static_cast<Cover>(stack[0]);
  }

  // The same of one leaf of the program.
  Cover classify_leaf(int leaf, i64 m0, i64 m1, i64 n0, i64 n1) const {
    return classify_leaf(code_[leaf], m0, m1, n0, n1);
  }

  // bits[j] for keys n0 + j, j < count <= kKeys: bit i tells whether query m0 + i (i < rows) sees the key.
  template <int kKeys = kSubKeys>
  TW_NOINLINE void bits(i64 m0, int rows, i64 n0, int count, u64* out) const {
    u64 stack[kMaxMask][kKeys];
    int top = 0;
    for (int i = 0; i < length_; i++) {
      const MaskInstr& x = code_[i];
      switch (x.op) {
        case MaskOp::all:
          top--;
          for (int j = 0; j < count; j++) stack[top - 1][j] &= stack[top][j];
          break;
        case MaskOp::any:
          top--;
          for (int j = 0; j < count; j++) stack[top - 1][j] |= stack[top][j];
          break;
        case MaskOp::negate:
          for (int j = 0; j < count; j++) stack[top - 1][j] = ~stack[top - 1][j];
          break;
        case MaskOp::tiles:
          break;
        default:
          leaf_bits(x, m0, rows, n0, count, stack[top++]);
      }
    }
    for (int j = 0; j < count; j++) out[j] = top == 0 ? ~u64{0} : stack[0][j];
  }

 private:
  i64 below(const MaskInstr& x) const { return x.lengths ? x.lengths[b_] : x.length; }
  const unsigned char* pairs(const MaskInstr& x, i64 m, i64 n) const {
    return static_cast<const unsigned char*>(x.tensor.data) + b_ * x.tensor.batch + h_ * x.tensor.head +
           m * x.tensor.row + n * x.tensor.col;
  }

  Cover classify_leaf(const MaskInstr& x, i64 m0, i64 m1, i64 n0, i64 n1) const {
    switch (x.op) {
      case MaskOp::band: {
        const i64 a = x.bottom_right ? offset_ : 0;
        if ((x.left >= 0 && n1 < a + m0 - x.left) || (x.right >= 0 && n0 > a + m1 + x.right)) return empty;
        const bool inside = (x.left < 0 || n0 >= a + m1 - x.left) && (x.right < 0 || n1 <= a + m0 + x.right);
        return inside ? full : partial;
      }
      case MaskOp::below: {
        const i64 length = below(x);
        return n1 < length ? full : n0 >= length ? empty : partial;
      }
      case MaskOp::same_document:
        return classify_documents(x, m0, m1, n0, n1);
      case MaskOp::expr: {
        const i64 queries = keys_ - offset_;
        return static_cast<Cover>(
            expr_cover(*x.expr, {{b_, b_}, {h_, h_}, {m0, m1}, {n0, n1}, {queries, queries}, {keys_, keys_}}));
      }
      case MaskOp::blocks:
        return table_cover(x, b_, h_, m0, m1, n0, n1);
      default:
        return classify_dense(x, m0, m1, n0, n1);
    }
  }

  static void span(const i64* ids, i64 count, i64& low, i64& high) {
    low = high = ids[0];
    for (i64 i = 1; i < count; i++) {
      low = ids[i] < low ? ids[i] : low;
      high = ids[i] > high ? ids[i] : high;
    }
  }
  Cover classify_documents(const MaskInstr& x, i64 m0, i64 m1, i64 n0, i64 n1) const {
    i64 q_low, q_high, k_low, k_high;
    span(x.query_ids + b_ * x.query_batch + m0, m1 - m0 + 1, q_low, q_high);
    span(x.key_ids + b_ * x.key_batch + n0, n1 - n0 + 1, k_low, k_high);
    if (q_high < k_low || k_high < q_low) return empty;
    return q_low == q_high && k_low == k_high && q_low == k_low ? full : partial;
  }

  // Eight booleans as bytes 0 or 1: a view of other numbers may hold any byte for true.
  static u64 truth(u64 bytes) {
    bytes |= bytes >> 4 & 0x0f0f0f0f0f0f0f0fu;
    bytes |= bytes >> 2 & 0x0303030303030303u;
    bytes |= bytes >> 1 & 0x0101010101010101u;
    return bytes & 0x0101010101010101u;
  }

  Cover classify_dense(const MaskInstr& x, i64 m0, i64 m1, i64 n0, i64 n1) const {
    if (x.tensor.row == 0) m1 = m0;
    if (x.tensor.col == 0) n1 = n0;
    const i64 count = n1 - n0 + 1;
    u64 any = 0, all = 0x0101010101010101u;
    for (i64 m = m0; m <= m1; m++) {
      const unsigned char* p = pairs(x, m, n0);
      i64 j = 0;
      if (x.tensor.col == 1) {
        for (; j + 8 <= count; j += 8) {
          u64 word;
          std::memcpy(&word, p + j, 8);
          word = truth(word);
          any |= word;
          all &= word;
        }
      }
      for (; j < count; j++) {
        const u64 word = p[j * x.tensor.col] ? 0x0101010101010101u : 0;
        any |= word;
        all &= word;
      }
    }
    return any == 0 ? empty : all == 0x0101010101010101u ? full : partial;
  }

  void leaf_bits(const MaskInstr& x, i64 m0, int rows, i64 n0, int count, u64* out) const {
    switch (x.op) {
      case MaskOp::band: {
        // Key n is seen by the queries m with n - right - a <= m <= n + left - a.
        const i64 a = x.bottom_right ? offset_ : 0;
        for (int j = 0; j < count; j++) {
          const i64 lowest = x.right < 0 ? 0 : max(n0 + j - x.right - a - m0, 0);
          const i64 beyond = x.left < 0 ? 64 : min(n0 + j + x.left - a - m0 + 1, 64);
          u64 seen = lowest >= 64 || beyond <= 0 ? 0 : ~u64{0} << lowest;
          if (beyond > 0 && beyond < 64) seen &= (u64{1} << beyond) - 1;
          out[j] = seen;
        }
        break;
      }
      case MaskOp::below: {
        const i64 length = below(x);
        for (int j = 0; j < count; j++) out[j] = n0 + j < length ? ~u64{0} : 0;
        break;
      }
      case MaskOp::same_document: {
        const i64* q = x.query_ids + b_ * x.query_batch + m0;
        const i64* k = x.key_ids + b_ * x.key_batch + n0;
        for (int j = 0; j < count; j++) {
          u64 seen = 0;
          for (int i = 0; i < rows; i++) seen |= u64{q[i] == k[j]} << i;
          out[j] = seen;
        }
        break;
      }
      case MaskOp::expr:
        if (x.expr->wide_floats)
          expr_bits<double>(program_of(x), m0, rows, n0, count, out);
        else
          expr_bits<float>(program_of(x), m0, rows, n0, count, out);
        break;
      case MaskOp::blocks:
        table_bits(x, b_, h_, m0, rows, n0, count, out);
        break;
      default:
        dense_bits(x, m0, rows, n0, count, out);
    }
  }

  const ExprProgram& program_of(const MaskInstr& x) const { return by_keys_ ? *x.by_keys : *x.expr; }
  template <class C>
  void expr_bits(const ExprProgram& program, i64 m0, int rows, i64 n0, int count, u64* out) const {
    ExprRun<C> run(program, room_);
    if (by_keys_) {
      run.tile(n0, count);
      run.piece(nullptr, m0, rows);
      const Operand truth = run.output(0);
      for (int j = 0; j < count; j++) out[j] = 0;
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < count; j++) out[j] |= u64{truth.at<SInt<C>>(i, j)[0] != 0} << i;
      return;
    }
    run.tile(m0, rows);
    if (program.compiled != nullptr) {
      ExprFrame frame = run.frame(nullptr, n0, count);
      frame.bits = out;
      return program.compiled(&frame);
    }
    run.piece(nullptr, n0, count);
    const Operand truth = run.output(0);
    for (int j = 0; j < count; j++) {
      u64 seen = 0;
      for (int i = 0; i < rows; i += kLanes<C>) seen |= bits_of_mask<SInt<C>>(load(truth.at<SInt<C>>(j, i))) << i;
      out[j] = seen;
    }
  }

  // Eight rows of eight boolean bytes become eight bytes of eight bits by shifting row r by r and adding up.
  void dense_bits(const MaskInstr& x, i64 m0, int rows, i64 n0, int count, u64* out) const {
    for (int j = 0; j < count; j++) out[j] = 0;
    for (int i = 0; i < rows; i += 8) {
      const int group = static_cast<int>(min(8, rows - i));
      for (int j = 0; j < count; j += 8) {
        const int columns = static_cast<int>(min(8, count - j));
        u64 turned = 0;
        for (int r = 0; r < group; r++) {
          const unsigned char* p = pairs(x, m0 + i + r, n0 + j);
          u64 row = 0;
          if (x.tensor.col == 1) {
            std::memcpy(&row, p, static_cast<std::size_t>(columns));
            row = truth(row);
          } else {
            for (int c = 0; c < columns; c++) row |= u64{p[c * x.tensor.col] != 0} << (8 * c);
          }
          turned |= row << r;
        }
        for (int c = 0; c < columns; c++) out[j + c] |= (turned >> (8 * c) & 0xff) << i;
      }
    }
  }

  const MaskInstr* code_;
  int length_;
  i64 b_, h_, offset_, keys_;
  char* room_;
  const MaskInstr* table_;
  bool by_keys_ = false;
};

// A tile after the mask has been asked: the keys from the first piece that is not empty to the last, and the
// bits of the pieces that are partial.
struct MaskedTile {
  i64 begin = 0, end = 0;  // keys
  bool plain = true;       // every pair counts
  u64* bits = nullptr;     // one word per key from `begin`; room for kRoomKeys

  // Finds the keys of the block [n0, n1) that queries m0 .. m0 + rows - 1 need; false when there are none.
  bool resolve(const Mask& mask, i64 m0, int rows, i64 n0, i64 n1) {
    const Range range = mask.walked(m0, m0 + rows - 1, n0, n1);
    n0 = begin = range.begin;
    n1 = end = range.end;
    plain = true;
    if (n0 >= n1) return false;
    if (mask.everything()) return true;
    const Cover whole = mask.classify(m0, m0 + rows - 1, n0, n1 - 1);
    if (whole != partial) return whole == full;
    begin = end = -1;
    u64 all[kRoomKeys];
    for (i64 n = n0; mask.at_once() && n < n1; n += kTileQueries)
      mask.bits<kTileQueries>(m0, rows, n, static_cast<int>(min(kTileQueries, n1 - n)), all + (n - n0));
    for (i64 n = n0; n < n1; n += kSubKeys) {
      const i64 last = min(n + kSubKeys, n1) - 1;
      const int count = static_cast<int>(last - n + 1);
      const u64* known = all + (n - n0);
      Cover cover = mask.at_once() ? cover_of(known, rows, count) : mask.classify(m0, m0 + rows - 1, n, last);
      if (cover == empty && begin < 0) continue;
      u64* out = begin < 0 ? bits : bits + (n - begin);
      if (cover == partial && mask.at_once()) {
        std::memcpy(out, known, static_cast<std::size_t>(count) * sizeof *out);
      } else if (cover == partial) {
        mask.bits(m0, rows, n, count, out);
        cover = cover_of(out, rows, count);
        if (cover == empty && begin < 0) continue;
      }
      if (begin < 0) begin = n;
      if (cover != partial) {
        for (int j = 0; j < count; j++) out[j] = cover == full ? ~u64{0} : 0;
      }
      if (cover != full) plain = false;
      if (cover != empty) end = last + 1;
    }
    return begin >= 0;
  }

 private:
  static Cover cover_of(const u64* bits, int rows, int count) {
    const u64 all = rows == 64 ? ~u64{0} : (u64{1} << rows) - 1;
    u64 some = 0, every = all;
    for (int j = 0; j < count; j++) some |= bits[j] & all, every &= bits[j];
    return some == 0 ? empty : every == all ? full : partial;
  }
};

}  // namespace tilewise::TILEWISE_ISA
