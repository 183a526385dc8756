#define TILEWISE_ISA avx2
#define TILEWISE_VECTOR_BYTES 32
#include "base/processor.h"
#include "isa/isa.h"

namespace tilewise {
extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = {"avx2",
                              "AVX2 with FMA",
                              has_avx2,
                              avx2::forward,
                              avx2::backward,
                              avx2::key_delta,
                              avx2::bias_backward,
                              avx2::load_backward,
                              avx2::covers,
                              avx2::cross_entropy,
                              avx2::head_rows,
                              avx2::gathered_rows,
                              avx2::expr_piece,
                              avx2::multiply_add_flops<avx2::PlainDot<float>>,
                              nullptr};
}  // namespace tilewise
