#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "decode.h"
#include "decode_tiles.h"

namespace tilewise {
namespace avx512 {
bool few_queries(const Forward& f);
}
namespace avx512_amx {
bool few_queries(const Forward& f) {
  if (f.dtype != DType::bf16 || f.dots == 0) return avx512::few_queries(f);
  return DecodeKernel<PairMode, TileProducts>(f).run();
}
}  // namespace avx512_amx
}  // namespace tilewise
