#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "decode/decode.h"
#include "decode/tiles.h"

namespace tilewise {
namespace avx512 {
bool few_queries(const Forward& f);
}
namespace avx512_amx {
// Where no heads share their keys, the values are widened faster than put into tiles. It may not depend on how many of
// a sequence's queries come at once.
bool few_queries(const Forward& f) {
  const bool tiles = f.dots == 1 || (f.dots < 0 && f.heads > f.kv_heads);
  if (f.dtype != DType::bf16 || !tiles) return avx512::few_queries(f);
  return DecodeKernel<PairMode, TileProducts>(f).run();
}
}  // namespace avx512_amx
}  // namespace tilewise
