#define TILEWISE_ISA avx512_amx
#define TILEWISE_VECTOR_BYTES 64
#include "decode/decode.h"
#include "decode/hybrid.h"

namespace tilewise {
namespace avx512 {
bool few_queries(const Forward& f);
bool short_sequences(const Forward& f);
}  // namespace avx512
namespace avx512_amx {
// Where no heads share their keys, the few values of a short sequence are widened faster than put into tiles, and the
// keys of wide heads too. Whose a sequence is does not follow from the batch, nor from how many of its queries come at
// once.
bool few_queries(const Forward& f) {
  if (f.dtype != DType::bf16 || f.dots == 0) return avx512::few_queries(f);
  if (f.dots == 1 || f.heads > f.kv_heads) return DecodeKernel<PairMode, TileProducts>(f).run();
  const bool done = HybridProducts::serves(f.head_dim)
                        ? DecodeKernel<PlainMode<Bf16, float>, HybridProducts>(f, Takes::one_split).run()
                        : avx512::short_sequences(f);
  const bool all_short = KeyBlocks(f.keys).count <= kSplitBlocks;
  return done && (all_short || DecodeKernel<PairMode, TileProducts>(f, Takes::several_splits).run());
}
}  // namespace avx512_amx
}  // namespace tilewise
