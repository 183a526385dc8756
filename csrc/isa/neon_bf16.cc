#define TILEWISE_ISA neon_bf16
#define TILEWISE_VECTOR_BYTES 16
#include "base/processor.h"
#include "isa/isa.h"

namespace tilewise {
extern const Kernels kernels_neon_bf16;
const Kernels kernels_neon_bf16 = {"neon_bf16",
                                   "NEON with bfloat16 matrix and dot products",
                                   has_neon_bf16,
                                   neon_bf16::forward,
                                   neon_bf16::backward,
                                   neon_bf16::key_delta,
                                   neon_bf16::bias_backward,
                                   neon_bf16::load_backward,
                                   neon_bf16::covers,
                                   neon_bf16::cross_entropy,
                                   neon_bf16::head_rows,
                                   neon_bf16::gathered_rows,
                                   neon_bf16::expr_piece,
                                   neon_bf16::multiply_add_flops<neon_bf16::PlainDot<float>>,
                                   neon_bf16::multiply_add_flops<neon_bf16::MatrixDot>};
}  // namespace tilewise
