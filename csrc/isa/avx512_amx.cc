// Matrix tiles for few queries in bfloat16; all else is AVX-512.
#include "base/args.h"
#include "base/processor.h"

namespace tilewise {
namespace avx512 {
bool ordinary_forward(const Forward& f);
}
namespace avx512_amx {
bool few_queries(const Forward& f);
}
extern const Kernels kernels_avx512;

namespace {
bool forward(const Forward& f) { return (f.for_backward || avx512_amx::few_queries(f)) && avx512::ordinary_forward(f); }
}  // namespace

const Kernels& kernels_avx512_amx() {
  static const Kernels kernels = [] {
    Kernels all = kernels_avx512;
    all.name = "avx512_amx";
    all.description = "AVX-512 with matrix tiles (AMX) for few queries in bfloat16";
    all.supported = has_tiles;
    all.forward = forward;
    return all;
  }();
  return kernels;
}
}  // namespace tilewise
