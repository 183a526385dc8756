// bfloat16 by matrix tiles; all else is AVX-512.
#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "passes/backward.h"
#include "passes/bias_backward.h"
#include "passes/load_backward.h"
#include "products/tiles.h"

namespace tilewise {
extern const Kernels kernels_avx512;

namespace avx512_amx {
bool few_queries(const Forward& f);  // decode_avx512_amx.cc

namespace {
bool forward(const Forward& f) {
  if (f.dtype != DType::bf16) return kernels_avx512.forward(f);
  return (f.for_backward || few_queries(f)) && ForwardKernel<TileMode>(f).run();
}
bool backward(const Backward& f) {
  return f.dtype == DType::bf16 ? BackwardKernel<TileMode>(f).run() : kernels_avx512.backward(f);
}
bool key_delta(const Backward& f) {
  return f.dtype == DType::bf16 ? KeyDeltaKernel<TileMode>(f).run() : kernels_avx512.key_delta(f);
}
bool bias_backward(const BiasBackward& f) {
  return f.dtype == DType::bf16 ? BiasKernel<TileMode>(f).run() : kernels_avx512.bias_backward(f);
}
bool load_backward(const LoadBackward& f) {
  return f.dtype == DType::bf16 ? LoadKernel<TileMode>(f).run() : kernels_avx512.load_backward(f);
}
}  // namespace
}  // namespace avx512_amx

const Kernels& kernels_avx512_amx() {
  static const Kernels kernels = [] {
    Kernels all = kernels_avx512;
    all.name = "avx512_amx";
    all.description = "AVX-512 with matrix tiles (AMX) for bfloat16";
    all.supported = has_tiles;
    all.forward = avx512_amx::forward;
    all.backward = avx512_amx::backward;
    all.key_delta = avx512_amx::key_delta;
    all.bias_backward = avx512_amx::bias_backward;
    all.load_backward = avx512_amx::load_backward;
    return all;
  }();
  return kernels;
}
}  // namespace tilewise
