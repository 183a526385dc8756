#define TILEWISE_ISA avx512
#define TILEWISE_VECTOR_BYTES 64
#include "decode/by_type.h"

namespace tilewise::avx512 {
bool short_sequences(const Forward& f) { return FewQueries<PlainMode<Bf16, float>>(f, Takes::one_split).run(); }
}  // namespace tilewise::avx512
