// The passes over bfloat16 by matrix tiles.
#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "passes/backward.h"
#include "passes/bias_backward.h"
#include "passes/load_backward.h"
#include "products/tiles.h"

namespace tilewise::avx512_amx {
bool few_queries(const Forward& f);  // decode_avx512_amx.cc

bool forward(const Forward& f) { return (f.for_backward || few_queries(f)) && ForwardKernel<TileMode>(f).run(); }
bool backward(const Backward& f) { return BackwardKernel<TileMode>(f).run(); }
bool key_delta(const Backward& f) { return KeyDeltaKernel<TileMode>(f).run(); }
bool bias_backward(const BiasBackward& f) { return BiasKernel<TileMode>(f).run(); }
bool load_backward(const LoadBackward& f) { return LoadKernel<TileMode>(f).run(); }
}  // namespace tilewise::avx512_amx
