// Few queries, many keys: the keys of a sequence are cut into splits, whose number and places follow from the sequence
// and its mask alone, and a task is a split for some heads that share the keys; or all splits one after the other,
// where there are tasks enough without. What the splits leave is merged in their order either way.
#pragma once

#include "variants/mask.h"

namespace tilewise::TILEWISE_ISA {

constexpr i64 kSplitBlocks = 4, kMostSplits = 32;  // blocks of keys of the smallest split; splits of a long sequence
constexpr i64 kDecodeRows = kTileQueries;          // of a task

// Pointers to the rows of keys n0 .. n1 - 1.
template <class E>
static void point_rows(const Problem& p, const View& view, const Sequence& seq, i64 kv_head, i64 n0, i64 n1,
                       const E** to) {
  while (n0 < n1) {
    const KeyRun run = key_run(p, view, seq, kv_head, n0, n1);
    const E* row = static_cast<const E*>(view.data) + run.at;
    n0 += run.count;
    for (const E** const end = to + run.count; to < end; row += view.row) *to++ = row;
  }
}

// What a task does.
struct SplitTask {
  Sequence seq;
  i64 kv_head, first_head, heads;  // of the heads that share kv_head
  i64 key_limit, first_block, last_block, split_blocks;
  i64 split, splits;   // split < 0: all of them
  i64 group, partial;  // numbers of the tasks that are merged, and of the first of their partial results
};

class SplitTasks {
 public:
  explicit SplitTasks(const Problem& p) : p_(p), group_size_(p.heads / p.kv_heads) {
    i64 few = 0;
    for (i64 b = 0; b < p.batch; b++) few += of_sequence(sequence(p, b));
    if (few == 0) return;
    items_ = static_cast<Item*>(std::malloc(static_cast<std::size_t>(p.batch + 1) * sizeof(Item)));
    if (items_ == nullptr) {
      count_ = -1;
      return;
    }
    for (i64 b = 0; b < p.batch; b++) items_[b] = item(b);
    for (i64 b = 0; b < p.batch; b++) groups_ += items_[b].groups;
    whole_ = p.threads <= 1 || groups_ >= 4 * p.threads;
    i64 groups = 0;
    for (i64 b = 0; b <= p.batch; b++) {
      Item& x = items_[b];
      x.group = groups, x.task = count_, x.partial = partials_;
      if (b == p.batch) break;
      groups += x.groups;
      count_ += x.groups * (whole_ ? 1 : x.splits);
      if (!whole_ && x.splits > 1) partials_ += x.groups * x.splits;
    }
  }
  ~SplitTasks() { std::free(items_); }
  SplitTasks(const SplitTasks&) = delete;
  SplitTasks& operator=(const SplitTasks&) = delete;

  i64 count() const { return count_; }  // -1 when memory ran out
  i64 groups() const { return groups_; }
  i64 partials() const { return partials_; }
  i64 most_rows() const { return most_rows_; }
  i64 most_heads() const { return most_heads_; }

  SplitTask operator[](i64 task) const {
    i64 low = 0, high = p_.batch - 1;
    while (low < high) {
      const i64 middle = (low + high + 1) / 2;
      if (items_[middle].task <= task)
        low = middle;
      else
        high = middle - 1;
    }
    const Item& x = items_[low];
    // A division takes as long as some keys.
    const i64 at = task - x.task, splits = whole_ ? 1 : x.splits, group = splits == 1 ? at : at / splits;
    SplitTask t{};
    t.seq = sequence(p_, low);
    t.kv_head = x.parts == 1 ? group : group / x.parts;
    const i64 first = (group - t.kv_head * x.parts) * x.heads;
    t.first_head = t.kv_head * group_size_ + first;
    t.heads = min(x.heads, group_size_ - first);
    t.key_limit = x.key_limit, t.first_block = x.first_block, t.last_block = x.last_block;
    t.split_blocks = x.split_blocks, t.splits = x.splits;
    t.split = whole_ ? -1 : at - group * splits;
    t.group = x.group + group;
    t.partial = x.partial + group * x.splits;
    return t;
  }

 private:
  struct Item {
    i64 task, group, partial;  // the first ones
    i64 groups, heads, parts;  // heads: of a task; parts: tasks of a group of heads
    i64 key_limit, first_block, last_block, split_blocks, splits;
  };

  static bool of_sequence(const Sequence& seq) { return seq.queries > 0 && seq.queries <= kFewQueries; }

  Item item(i64 b) {
    const Sequence seq = sequence(p_, b);
    Item x{};
    if (!of_sequence(seq)) return x;
    const Mask mask(p_, b, 0, seq.queries, seq.keys);
    const Range visible = mask.visible(0, seq.queries - 1);
    x.key_limit = mask.key_limit();
    const KeyBlocks blocks(x.key_limit);
    x.split_blocks = max(kSplitBlocks, (blocks.count + kMostSplits - 1) / kMostSplits);
    if (visible.begin < visible.end)
      x.first_block = blocks.containing(visible.begin), x.last_block = blocks.containing(visible.end - 1) + 1;
    const i64 first = x.first_block / x.split_blocks;
    x.splits = max(1, (x.last_block + x.split_blocks - 1) / x.split_blocks - first);
    x.heads = min(group_size_, kDecodeRows / seq.queries);
    x.parts = (group_size_ + x.heads - 1) / x.heads;
    x.groups = p_.kv_heads * x.parts;
    most_rows_ = max(most_rows_, x.heads * seq.queries);
    most_heads_ = max(most_heads_, x.heads);
    return x;
  }

  const Problem& p_;
  i64 group_size_, count_ = 0, groups_ = 0, partials_ = 0, most_rows_ = 0, most_heads_ = 0;
  bool whole_ = true;
  Item* items_ = nullptr;
};

}  // namespace tilewise::TILEWISE_ISA
