// The forward pass over float16 and float32 by matrix tiles.
#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "passes/forward.h"
#include "products/pieces.h"

namespace tilewise::avx512_amx {
bool few_queries(const Forward& f);  // decode_avx512_amx.cc

// Of calls that no backward pass follows.
bool forward_halves(const Forward& f) { return few_queries(f) && ForwardKernel<PieceMode<Half>>(f).run(); }
bool forward_floats(const Forward& f) { return few_queries(f) && ForwardKernel<PieceMode<float>>(f).run(); }
}  // namespace tilewise::avx512_amx
