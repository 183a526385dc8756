// Few queries in bfloat16 whose keys and values are in 8 bits, for processors with tables of bytes.
#define TILEWISE_ISA avx512_vbmi
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "decode/decode.h"

namespace tilewise::avx512_vbmi {

template <Stored kStored>
using Kernel = DecodeKernel<NarrowPairs<kStored>, FewRows<NarrowPairs<kStored>>>;

bool few_queries(const Forward& f) {
  return f.stored == Stored::int8 ? Kernel<Stored::int8>(f).run() : Kernel<Stored::e4m3>(f).run();
}

}  // namespace tilewise::avx512_vbmi
