#define TILEWISE_ISA avx512
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "isa/isa.h"

namespace tilewise {
extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512",
                                "AVX-512",
                                has_avx512,
                                avx512::forward,
                                avx512::backward,
                                avx512::key_delta,
                                avx512::bias_backward,
                                avx512::load_backward,
                                avx512::covers,
                                avx512::cross_entropy,
                                avx512::head_rows,
                                avx512::gathered_rows,
                                avx512::expr_piece,
                                avx512::multiply_add_flops<avx512::PlainDot<float>>,
                                nullptr};
}  // namespace tilewise
