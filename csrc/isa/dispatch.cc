#include "isa/dispatch.h"

#include "base/processor.h"

#include <cstring>
#include <initializer_list>
#include <utility>

namespace tilewise {

#if defined(TILEWISE_X86)
extern const Kernels kernels_avx512_bf16, kernels_avx512, kernels_avx2;
#endif
#if defined(TILEWISE_AMX)
const Kernels& kernels_avx512_amx();
#endif
#if defined(TILEWISE_ARM)
extern const Kernels kernels_neon_bf16;
#endif
extern const Kernels kernels_portable;

namespace {

struct Table {
  const Kernels* kernels[5];
  int count = 0;
  Table() {
#if defined(TILEWISE_AMX)
    if (kernels_avx512_amx().supported()) kernels[count++] = &kernels_avx512_amx();
#endif
#if defined(TILEWISE_X86)
    // Where dot products are slow, widened bfloat16 is multiplied faster.
    const Kernels *best = &kernels_avx512_bf16, *next = &kernels_avx512;
    if (!has_fast_dots()) std::swap(best, next);
    for (const Kernels* k : {best, next, &kernels_avx2})
      if (k->supported()) kernels[count++] = k;
#endif
#if defined(TILEWISE_ARM)
    if (kernels_neon_bf16.supported()) kernels[count++] = &kernels_neon_bf16;
#endif
    kernels[count++] = &kernels_portable;
  }
};

const Table& table() {
  static const Table found;
  return found;
}

const Kernels* chosen = nullptr;

}  // namespace

const Kernels* const* available(int& count) {
  count = table().count;
  return table().kernels;
}

const Kernels& active() {
  const Kernels* kernels = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  return kernels == nullptr ? *table().kernels[0] : *kernels;
}

bool choose(const char* name) {
  for (int i = 0; i < table().count; i++) {
    if (std::strcmp(table().kernels[i]->name, name) != 0) continue;
    __atomic_store_n(&chosen, table().kernels[i], __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

}  // namespace tilewise
