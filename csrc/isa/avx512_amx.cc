// bfloat16 and float16 by matrix tiles, and float32 where it is asked for; all else is AVX-512. Compiled for any
// processor: the table is made before it is asked whether this one has tiles.
#include "base/args.h"
#include "base/processor.h"

namespace tilewise {
namespace avx512_amx {  // passes_avx512_amx.cc, pieces_avx512_amx.cc
bool forward(const Forward& f);
bool forward_pieces(const Forward& f);
bool backward(const Backward& f);
bool backward_pieces(const Backward& f);
bool key_delta(const Backward& f);
bool key_delta_pieces(const Backward& f);
bool bias_backward(const BiasBackward& f);
bool bias_backward_pieces(const BiasBackward& f);
bool load_backward(const LoadBackward& f);
bool load_backward_pieces(const LoadBackward& f);
}  // namespace avx512_amx

extern const Kernels kernels_avx512;

namespace {
template <class Arguments>
using Pass = bool (*)(const Arguments&);

template <class Arguments, Pass<Arguments> kTiles, Pass<Arguments> kPieces, Pass<Arguments> Kernels::* kOther>
bool by_type(const Arguments& f) {
  if (f.dtype == DType::bf16) return kTiles(f);
  if (f.dtype == DType::f16 || (f.dtype == DType::f32 && f.float_tiles)) return kPieces(f);
  return (kernels_avx512.*kOther)(f);
}
}  // namespace

const Kernels& kernels_avx512_amx() {
  static const Kernels kernels = [] {
    Kernels all = kernels_avx512;
    all.name = "avx512_amx";
    all.description = "AVX-512 with matrix tiles (AMX) for bfloat16 and float16";
    all.supported = has_tiles;
    all.forward = by_type<Forward, avx512_amx::forward, avx512_amx::forward_pieces, &Kernels::forward>;
    all.backward = by_type<Backward, avx512_amx::backward, avx512_amx::backward_pieces, &Kernels::backward>;
    all.key_delta = by_type<Backward, avx512_amx::key_delta, avx512_amx::key_delta_pieces, &Kernels::key_delta>;
    all.bias_backward =
        by_type<BiasBackward, avx512_amx::bias_backward, avx512_amx::bias_backward_pieces, &Kernels::bias_backward>;
    all.load_backward =
        by_type<LoadBackward, avx512_amx::load_backward, avx512_amx::load_backward_pieces, &Kernels::load_backward>;
    return all;
  }();
  return kernels;
}
}  // namespace tilewise
