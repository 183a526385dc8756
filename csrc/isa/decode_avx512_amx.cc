#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "decode/decode.h"
#include "decode/hybrid.h"

namespace tilewise {
namespace avx512 {
bool few_queries(const Forward& f);
bool long_sequences(const Forward& f);
}  // namespace avx512
namespace avx512_amx {
// Where few heads share their keys, one query is what counts: its values are widened faster than put into tiles, and
// keys too, but for narrow heads of short sequences. Whose a sequence is does not follow from the batch, nor from how
// many of its queries come at once.
bool few_queries(const Forward& f) {
  if (f.dtype != DType::bf16 || f.dots == 0) return avx512::few_queries(f);
  if (f.dots == 1 || f.heads > 2 * f.kv_heads) return DecodeKernel<PairMode, TileProducts>(f).run();
  if (f.heads > f.kv_heads || !HybridProducts::serves(f.head_dim)) return avx512::few_queries(f);
  const bool all_short = KeyBlocks(f.keys).count <= kSplitBlocks;
  return DecodeKernel<PlainMode<Bf16, float>, HybridProducts>(f, Takes::one_split).run() &&
         (all_short || avx512::long_sequences(f));
}
}  // namespace avx512_amx
}  // namespace tilewise
