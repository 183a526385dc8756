// Serves every processor, NEON on aarch64 included.
#define TILEWISE_ISA portable
#define TILEWISE_VECTOR_BYTES 16
#include "isa/isa.h"

namespace tilewise {
static bool supported() { return true; }
extern const Kernels kernels_portable;
const Kernels kernels_portable = {"portable",
                                  "128-bit vectors, any processor",
                                  supported,
                                  portable::forward,
                                  portable::backward,
                                  portable::key_delta,
                                  portable::bias_backward,
                                  portable::load_backward,
                                  portable::covers,
                                  portable::cross_entropy,
                                  portable::head_rows,
                                  portable::gathered_rows,
                                  portable::expr_piece,
                                  portable::multiply_add_flops<portable::PlainDot<float>>,
                                  nullptr};
}  // namespace tilewise
