// Work and memory of a call: sequences, tasks handed out one by one, scratch memory cut into arrays.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "base/parallel.h"
#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

constexpr int kBlockKeys = 128;                // keys of a block; part of the rounding contract
constexpr int kRoomKeys = kBlockKeys * 3 / 2;  // the last block of a sequence takes a short rest with it

struct Sequence {
  i64 b, query_begin, key_begin, queries, keys;
};
TW_INLINE Sequence sequence(const Problem& p, i64 b) {
  Sequence seq = {b, 0, 0, p.queries, p.keys};
  if (p.cu_q != nullptr) seq.query_begin = p.cu_q[b], seq.queries = p.cu_q[b + 1] - p.cu_q[b];
  if (p.cu_k != nullptr) seq.key_begin = p.cu_k[b], seq.keys = p.cu_k[b + 1] - p.cu_k[b];
  if (p.page_size != 0) seq.keys = p.key_lengths[b];
  return seq;
}

// Blocks of keys of a sequence: a function of its own length alone, so that a row's sums are cut at the same
// places whatever else is in the call.
struct KeyBlocks {
  i64 limit, size, count;
  explicit KeyBlocks(i64 key_limit, i64 block_keys = kBlockKeys)
      : limit(key_limit), size(block_keys), count(max(1, (key_limit + size / 2) / size)) {}
  i64 begin(i64 block) const { return block * size; }
  i64 end(i64 block) const { return block + 1 == count ? limit : (block + 1) * size; }
  i64 containing(i64 key) const { return min(key / size, count - 1); }
};

TW_INLINE i64 view_at(const View& v, i64 b, i64 h, i64 row) { return b * v.batch + h * v.head + row * v.row; }

// Rows of keys or values that lie one after the other: the one of key n0 and those behind it, of n1 at most.
struct KeyRun {
  i64 at, count;  // at: elements from the start of the tensor
};
TW_INLINE KeyRun key_run(const Problem& p, const View& v, const Sequence& seq, i64 kv_head, i64 n0, i64 n1) {
  if (p.page_size == 0) return {view_at(v, seq.b, kv_head, seq.key_begin + n0), n1 - n0};
  const i64 slot = n0 / p.page_size, row = n0 - slot * p.page_size;
  return {view_at(v, p.block_table[seq.b * p.page_slots + slot], kv_head, row), min(n1 - n0, p.page_size - row)};
}

template <class C>
TW_INLINE C* rows_at(const Rows& r, i64 b, i64 h, i64 row) {
  return static_cast<C*>(r.data) + b * r.batch + h * r.head + row;
}

// Arrays one after the other, each on its own cache line; with a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(i64 count) {
    char* p = base_ + used_;
    used_ += round_up(count * static_cast<i64>(sizeof(T)), 64);
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  char* base_;
  i64 used_ = 0;
};

// What a thread keeps while it has tasks. Results below the normal range are 0 meanwhile (x86): a probability there
// would cost 150 cycles in every product that it meets, and with ALiBi many are. ARM takes them at full speed.
struct Session {
#if defined(TILEWISE_X86)
  Session() : control(_mm_getcsr()) { _mm_setcsr(control | 0x8000); }
  ~Session() { _mm_setcsr(control); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  unsigned control;
#else
  Session() {}
#endif
};

// Runs work(task, memory) for every task, on up to `threads` threads, each with `bytes` of scratch memory and a
// session, which work(task, memory, session) is given. Which thread takes which task has no influence on any result.
// False when memory ran out. The caller takes the last of many tasks: the first thread at the barrier goes to sleep
// there, and waking the caller, who has to go on, is what a short call cannot afford.
template <class Kept = Session, class Work>
static bool for_tasks(int threads, i64 tasks, std::size_t bytes, const Work& work) {
  struct Shared {
    const Work* work;
    i64 tasks, next;
    std::size_t bytes;
    int failed;
    i64 for_caller;
    const void* caller;
  } shared{&work, tasks, 0, bytes, 0, tasks >= 16 * threads, this_thread()};
  if (tasks < threads) threads = static_cast<int>(max(1, tasks));
  auto body = [](void* context) {
    Shared& s = *static_cast<Shared*>(context);
    void* memory = scratch(s.bytes);
    if (memory == nullptr) {
      __atomic_store_n(&s.failed, 1, __ATOMIC_RELAXED);
      return;
    }
    Kept session;
    const i64 end = this_thread() == s.caller ? s.tasks : s.tasks - s.for_caller;
    i64 task = __atomic_load_n(&s.next, __ATOMIC_RELAXED);
    while (task < end) {
      if (!__atomic_compare_exchange_n(&s.next, &task, task + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
      if constexpr (std::is_invocable_v<Work, i64, void*, Kept&>)
        (*s.work)(task, memory, session);
      else
        (*s.work)(task, memory);
      task = __atomic_load_n(&s.next, __ATOMIC_RELAXED);
    }
    trim_scratch();
  };
  run_team(threads, body, &shared);
  return shared.failed == 0;
}

// Which (sequence, head, block of queries) a task is; the last block, the heaviest under a causal mask, first.
// Sequences of `fewest` queries or less have none.
class QueryTasks {
 public:
  QueryTasks(const Problem& p, i64 queries_per_task, i64 fewest = 0) : p_(p), size_(queries_per_task), fewest_(fewest) {
    if (p.cu_q == nullptr) {
      per_head_ = of_queries(p.queries);
      count_ = p.batch * p.heads * per_head_;
      return;
    }
    first_ = static_cast<i64*>(std::malloc(static_cast<std::size_t>(p.batch + 1) * sizeof(i64)));
    if (first_ == nullptr) {
      count_ = -1;
      return;
    }
    first_[0] = 0;
    for (i64 b = 0; b < p.batch; b++) first_[b + 1] = first_[b] + p.heads * blocks(b);
    count_ = first_[p.batch];
  }
  ~QueryTasks() { std::free(first_); }
  QueryTasks(const QueryTasks&) = delete;
  QueryTasks& operator=(const QueryTasks&) = delete;

  i64 count() const { return count_; }  // -1 when memory ran out
  void locate(i64 task, i64& b, i64& h, i64& block) const {
    i64 per_head = per_head_;
    if (first_ == nullptr) {
      b = task / (p_.heads * per_head);
      task -= b * p_.heads * per_head;
    } else {
      i64 low = 0, high = p_.batch - 1;
      while (low < high) {
        const i64 middle = (low + high + 1) / 2;
        if (first_[middle] <= task)
          low = middle;
        else
          high = middle - 1;
      }
      b = low;
      task -= first_[b];
      per_head = blocks(b);
    }
    h = task / per_head;
    block = per_head - 1 - task % per_head;
  }

 private:
  i64 of_queries(i64 queries) const { return queries <= fewest_ ? 0 : (queries + size_ - 1) / size_; }
  i64 blocks(i64 b) const { return of_queries(p_.cu_q[b + 1] - p_.cu_q[b]); }

  const Problem& p_;
  i64 size_, fewest_, per_head_ = 0, count_ = 0;
  i64* first_ = nullptr;
};

}  // namespace tilewise::TILEWISE_ISA
