// Few queries in bfloat16 whose keys and values are in float8, for processors with fast bfloat16 products and tables of
// bytes.
#define TILEWISE_ISA avx512_vbmi_bf16
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "decode/decode.h"

namespace tilewise::avx512_vbmi_bf16 {

bool few_queries(const Forward& f) { return DecodeKernel<NarrowPairs, FewRows<NarrowPairs>>(f).run(); }

}  // namespace tilewise::avx512_vbmi_bf16
