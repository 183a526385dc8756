// bfloat16 by matrix tiles, and the forward pass of float16 and (where asked) float32; all else is AVX-512. Compiled
// for any processor: the table is made before it is asked whether this one has tiles.
#include "base/args.h"
#include "base/processor.h"

namespace tilewise {
namespace avx512_amx {  // passes_avx512_amx.cc
bool forward(const Forward& f);
bool forward_halves(const Forward& f);  // pieces_avx512_amx.cc
bool forward_floats(const Forward& f);
bool backward(const Backward& f);
bool key_delta(const Backward& f);
bool bias_backward(const BiasBackward& f);
bool load_backward(const LoadBackward& f);
}  // namespace avx512_amx

extern const Kernels kernels_avx512;

namespace {
template <class Arguments, bool (*kTiles)(const Arguments&), bool (*Kernels::*kOther)(const Arguments&)>
bool by_type(const Arguments& f) {
  return f.dtype == DType::bf16 ? kTiles(f) : (kernels_avx512.*kOther)(f);
}
// The backward pass of what has pieces is AVX-512's. It computes the scores again, to the bit as its own forward pass
// has them: else gradients that are exactly 0 would not be, those of the entropy of one key for one.
bool forward(const Forward& f) {
  if (f.dtype == DType::bf16) return avx512_amx::forward(f);
  if (f.dtype == DType::f16 && !f.for_backward) return avx512_amx::forward_halves(f);
  if (f.dtype == DType::f32 && !f.for_backward && f.float_tiles) return avx512_amx::forward_floats(f);
  return kernels_avx512.forward(f);
}
}  // namespace

const Kernels& kernels_avx512_amx() {
  static const Kernels kernels = [] {
    Kernels all = kernels_avx512;
    all.name = "avx512_amx";
    all.description = "AVX-512 with matrix tiles (AMX) for bfloat16 and float16";
    all.supported = has_tiles;
    all.forward = forward;
    all.backward = by_type<Backward, avx512_amx::backward, &Kernels::backward>;
    all.key_delta = by_type<Backward, avx512_amx::key_delta, &Kernels::key_delta>;
    all.bias_backward = by_type<BiasBackward, avx512_amx::bias_backward, &Kernels::bias_backward>;
    all.load_backward = by_type<LoadBackward, avx512_amx::load_backward, &Kernels::load_backward>;
    return all;
  }();
  return kernels;
}
}  // namespace tilewise
