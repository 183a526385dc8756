// Whether to fetch keys and values ahead: in the caches of a core itself they come as fast without, and to ask for them
// then takes as long as to read them. No result depends on it.
#pragma once

#include "decode/tasks.h"
#include "products/modes.h"

namespace tilewise::TILEWISE_ISA {

#if defined(TILEWISE_X86)
constexpr double kMostNear = 4 << 20;  // bytes
// Eight lines took 2 times as long as when they were read again from the second-level cache, 3 to 8 times with some of
// the third level, and 9 times or more from memory.
constexpr u64 kNear = 6;

// How long it takes to read lines that do not wait for one another.
static inline u64 ticks_to_read(const void* const* lines, int count) {
  _mm_lfence();
  const u64 before = __builtin_ia32_rdtsc();
  _mm_lfence();
  for (int i = 0; i < count; i++) (void)*static_cast<const volatile char*>(lines[i]);
  _mm_lfence();
  return __builtin_ia32_rdtsc() - before;
}

// Of all sequences: with the longest for each, many short ones beside a long one would seem to be far.
static inline i64 all_keys(const Forward& f) {
  if (f.cu_k != nullptr) return f.cu_k[f.batch] - f.cu_k[0];
  if (f.key_lengths == nullptr) return f.batch * f.keys;
  i64 sum = 0;
  for (i64 b = 0; b < f.batch; b++) sum += f.key_lengths[b];
  return sum;
}

// Whether keys and values seem to be there: they are few enough, and some of them, read against the clock, come at
// once. The rows looked at lie inside a sequence: its last one may have just been written. They are read twice, so that
// neither the clock's rate nor what reading it takes matters.
template <class Mode>
static bool lie_near(const Forward& f, const SplitTasks& tasks) {
  if (f.fetch >= 0) return f.fetch == 0;
  const i64 size = f.stored == Stored::plain ? sizeof(typename Mode::Elem) : 1;
  const double rows = static_cast<double>(f.kv_heads) * static_cast<double>(all_keys(f));
  const double bytes = rows * static_cast<double>((f.head_dim + f.value_dim) * size);
  if (bytes > kMostNear) return false;
  const void* lines[8];
  int count = 0;
  for (int i = 0; i < 2; i++) {
    const SplitTask t = tasks[i == 0 ? 0 : tasks.count() - 1];
    if (t.first_block >= t.last_block) continue;  // no keys
    const KeyBlocks blocks(t.key_limit);
    const i64 first = blocks.begin(t.first_block), keys_of_task = blocks.end(t.last_block - 1) - first;
    for (int quarter = 1; quarter <= 3; quarter += 2) {
      const i64 n = first + keys_of_task * quarter / 4;
      for (const View* view : {&f.k, &f.v})
        lines[count++] = static_cast<const char*>(view->data) + key_run(f, *view, t.seq, t.kv_head, n, n + 1).at * size;
    }
  }
  const u64 first_time = ticks_to_read(lines, count), again = ticks_to_read(lines, count);
  return first_time <= kNear * again;
}
#else
template <class Mode>
static bool lie_near(const Forward& f, const SplitTasks&) {
  return f.fetch == 0;
}
#endif

}  // namespace tilewise::TILEWISE_ISA
