// The passes over float16 and float32 by matrix tiles.
#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "passes/backward.h"
#include "passes/bias_backward.h"
#include "passes/load_backward.h"
#include "products/pieces.h"

namespace tilewise::avx512_amx {
bool few_queries(const Forward& f);  // decode_avx512_amx.cc

namespace {
template <template <class> class Kernel, class Arguments>
bool run_pieces(const Arguments& f) {
  return f.dtype == DType::f16 ? Kernel<PieceMode<Half>>(f).run() : Kernel<PieceMode<float>>(f).run();
}
}  // namespace

bool forward_pieces(const Forward& f) { return (f.for_backward || few_queries(f)) && run_pieces<ForwardKernel>(f); }
bool backward_pieces(const Backward& f) { return run_pieces<BackwardKernel>(f); }
bool key_delta_pieces(const Backward& f) { return run_pieces<KeyDeltaKernel>(f); }
bool bias_backward_pieces(const BiasBackward& f) { return run_pieces<BiasKernel>(f); }
bool load_backward_pieces(const LoadBackward& f) { return run_pieces<LoadKernel>(f); }
}  // namespace tilewise::avx512_amx
