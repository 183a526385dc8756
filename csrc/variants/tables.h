// Tables that say of whole rectangles of pairs what a mask does with them: what a lookup is, and the order of tasks
// that follows from it.
#pragma once

#include "base/order.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

enum Cover : int { empty = 0, partial = 1, full = 2 };

TW_INLINE const unsigned char* table_at(const MaskInstr& x, i64 b, i64 h) {
  return static_cast<const unsigned char*>(x.tensor.data) + b * x.tensor.batch + h * x.tensor.head;
}

// The table of instruction x (`blocks` or `tiles`) over queries m0 .. m1 and keys n0 .. n1, all inclusive.
TW_INLINE Cover table_cover(const MaskInstr& x, i64 b, i64 h, i64 m0, i64 m1, i64 n0, i64 n1) {
  const unsigned char* table = table_at(x, b, h);
  const i64 first = n0 / x.block_keys, last = n1 / x.block_keys;
  const i64 top = m0 / x.block_queries, bottom = m1 / x.block_queries;
  const unsigned char cover = table[top * x.tensor.row + first * x.tensor.col];
  for (i64 t = top; t <= bottom; t++) {
    const unsigned char* row = table + t * x.tensor.row;
    for (i64 c = first; c <= last; c++)
      if (row[c * x.tensor.col] != cover) return partial;
  }
  return static_cast<Cover>(x.op == MaskOp::blocks ? cover * full : cover);
}

// Of a table of booleans: bit i of bits[j] tells whether query m0 + i sees key n0 + j.
TW_INLINE void table_bits(const MaskInstr& x, i64 b, i64 h, i64 m0, int rows, i64 n0, int count, u64* bits) {
  const unsigned char* table = table_at(x, b, h);
  for (int j = 0; j < count; j++) {
    if (j > 0 && (n0 + j) % x.block_keys != 0) {
      bits[j] = bits[j - 1];
      continue;
    }
    const unsigned char* column = table + (n0 + j) / x.block_keys * x.tensor.col;
    u64 seen = 0;
    for (i64 m = m0; m < m0 + rows;) {
      const i64 t = m / x.block_queries, next = min((t + 1) * x.block_queries, m0 + rows);
      const u64 those = next - m == 64 ? ~u64{0} : ((u64{1} << (next - m)) - 1) << (m - m0);
      if (column[t * x.tensor.row]) seen |= those;
      m = next;
    }
    bits[j] = seen;
  }
}

// The table that speaks for a whole mask; null when there is none.
TW_INLINE const MaskInstr* table_of(const Problem& p) {
  if (p.mask_length == 0) return nullptr;
  const MaskInstr& last = p.mask[p.mask_length - 1];
  return last.op == MaskOp::tiles || (last.op == MaskOp::blocks && p.mask_length == 1) ? &last : nullptr;
}

// The rows of a table that some queries are in, to be asked block of keys by block of keys.
class TableRows {
 public:
  TableRows() = default;  // of no table, which knows nothing
  TableRows(const MaskInstr& x, i64 b, i64 h, i64 m0, i64 m1)
      : at_(table_at(x, b, h) + m0 / x.block_queries * x.tensor.row),
        rows_(m1 / x.block_queries - m0 / x.block_queries + 1),
        row_(x.tensor.row),
        col_(x.tensor.col),
        keys_(x.block_keys),
        shift_((keys_ & (keys_ - 1)) == 0 ? __builtin_ctzll(static_cast<u64>(keys_)) : -1) {}

  bool known() const { return rows_ > 0; }
  // Whether no query sees any of the keys n0 .. n1 - 1.
  bool skips(i64 n0, i64 n1) const {
    if (rows_ == 0 || n0 >= n1) return false;
    const i64 first = column(n0), last = column(n1 - 1);
    for (i64 t = 0; t < rows_; t++)
      for (i64 c = first; c <= last; c++)
        if (at_[t * row_ + c * col_] != empty) return false;
    return true;
  }

 private:
  i64 column(i64 key) const { return shift_ < 0 ? key / keys_ : key >> shift_; }

  const unsigned char* at_ = nullptr;
  i64 rows_ = 0, row_ = 0, col_ = 0, keys_ = 1;
  int shift_ = 0;
};

// How many rectangles of the table that are not empty touch queries m0 .. m1 and keys n0 .. n1 - 1.
TW_INLINE i64 table_weight(const MaskInstr& x, i64 b, i64 h, i64 m0, i64 m1, i64 n0, i64 n1) {
  if (m0 > m1 || n0 >= n1) return 0;
  const unsigned char* table = table_at(x, b, h);
  i64 weight = 0;
  for (i64 t = m0 / x.block_queries; t <= m1 / x.block_queries; t++)
    for (i64 c = n0 / x.block_keys; c <= (n1 - 1) / x.block_keys; c++)
      weight += table[t * x.tensor.row + c * x.tensor.col] != 0;
  return weight;
}

// In which order tasks are taken: the heaviest first where a table knows, else (and where there is no memory for it)
// as they come. No result depends on it.
class TaskOrder {
 public:
  // weight(task, table): of a task of the problem's.
  template <class Weight>
  TaskOrder(const Problem& p, i64 tasks, const Weight& weight) {
    const MaskInstr* table = table_of(p);
    if (table == nullptr || tasks < 3) return;
    order_ = static_cast<Weighted*>(std::malloc(static_cast<std::size_t>(tasks) * sizeof(Weighted)));
    if (order_ == nullptr) return;
    for (i64 task = 0; task < tasks; task++) order_[task] = {weight(task, *table), task};
    heaviest_first(order_, tasks);
  }
  ~TaskOrder() { std::free(order_); }
  TaskOrder(const TaskOrder&) = delete;
  TaskOrder& operator=(const TaskOrder&) = delete;
  i64 operator[](i64 task) const { return order_ == nullptr ? task : order_[task].task; }

 private:
  Weighted* order_ = nullptr;
};

}  // namespace tilewise::TILEWISE_ISA
