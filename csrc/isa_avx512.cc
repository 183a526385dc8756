#define TILEWISE_ISA avx512
#define TILEWISE_VECTOR_BYTES 64
#include "isa.h"

namespace tilewise {
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512",
                            "AVX-512",
                            supported,
                            avx512::forward,
                            avx512::backward,
                            avx512::bias_backward,
                            avx512::multiply_add_flops<avx512::PlainDot<float>>,
                            nullptr};
}  // namespace tilewise
