// Whether to fetch keys and values ahead: in the caches of a core itself they come as fast without, and to ask for them
// then takes as long as to read them. No result depends on it.
#pragma once

#include "decode_tasks.h"
#include "modes.h"

namespace tilewise::TILEWISE_ISA {

#if defined(TILEWISE_X86)
constexpr double kMostNear = 4 << 20;  // bytes
// Eight lines at once took some 150 from the second-level cache, up to 560 with some of the third level, and 1300 or
// more from memory.
constexpr u64 kNearTicks = 640;

// Whether keys and values seem to be there: they are few enough, and some of them, read against the clock, come at
// once. Of several threads the caller's clock says little.
template <class Mode>
static bool lie_near(const Forward& f, const SplitTasks& tasks) {
  const double keys = static_cast<double>(f.batch * f.kv_heads) * static_cast<double>(f.keys);
  const double bytes = keys * (f.head_dim + f.value_dim) * sizeof(typename Mode::Elem);
  if (f.threads > 1 || bytes > kMostNear) return bytes <= kMostNear / 4;
  constexpr int kTasks = 2, kRows = 2;
  const void* lines[kTasks][kRows][2];
  for (int i = 0; i < kTasks; i++) {
    const SplitTask t = tasks[i == 0 ? tasks.count() / 2 : tasks.count() - 1];
    if (t.first_block >= t.last_block) return true;
    const KeyBlocks blocks(t.key_limit);
    const i64 first = blocks.begin(t.first_block), last = blocks.end(t.last_block - 1) - 1;
    for (int j = 0; j < kRows; j++) {
      const i64 n = j == 0 ? (first + last) / 2 : last;
      lines[i][j][0] = Mode::at(f.k.data, key_run(f, f.k, t.seq, t.kv_head, n, n + 1).at);
      lines[i][j][1] = Mode::at(f.v.data, key_run(f, f.v, t.seq, t.kv_head, n, n + 1).at);
    }
  }
  _mm_lfence();
  const u64 before = __builtin_ia32_rdtsc();
  _mm_lfence();
  for (const auto& rows : lines)
    for (const auto& row : rows)
      for (const void* line : row) (void)*static_cast<const volatile char*>(line);
  _mm_lfence();
  return __builtin_ia32_rdtsc() - before < kNearTicks;
}
#else
template <class Mode>
static bool lie_near(const Forward&, const SplitTasks&) {
  return false;
}
#endif

}  // namespace tilewise::TILEWISE_ISA
