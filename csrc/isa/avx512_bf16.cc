#define TILEWISE_ISA avx512_bf16
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "isa/isa.h"

namespace tilewise {
extern const Kernels kernels_avx512_bf16;
const Kernels kernels_avx512_bf16 = {"avx512_bf16",
                                     "AVX-512 with bfloat16 dot products",
                                     has_avx512_bf16,
                                     avx512_bf16::forward,
                                     avx512_bf16::backward,
                                     avx512_bf16::key_delta,
                                     avx512_bf16::bias_backward,
                                     avx512_bf16::load_backward,
                                     avx512_bf16::covers,
                                     avx512_bf16::cross_entropy,
                                     avx512_bf16::head_rows,
                                     avx512_bf16::gathered_rows,
                                     avx512_bf16::expr_piece,
                                     avx512_bf16::multiply_add_flops<avx512_bf16::PlainDot<float>>,
                                     avx512_bf16::multiply_add_flops<avx512_bf16::PairDot>};
}  // namespace tilewise
