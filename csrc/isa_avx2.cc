#define TILEWISE_ISA avx2
#define TILEWISE_VECTOR_BYTES 32
#include "isa.h"

namespace tilewise {
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = {"avx2",
                            "AVX2 with FMA",
                            supported,
                            avx2::forward,
                            avx2::backward,
                            avx2::bias_backward,
                            avx2::multiply_add_flops<avx2::PlainDot<float>>,
                            nullptr};
}  // namespace tilewise
