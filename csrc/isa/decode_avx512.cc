#define TILEWISE_ISA avx512
#define TILEWISE_VECTOR_BYTES 64
#include "decode/by_type.h"

namespace tilewise::avx512 {
bool long_sequences(const Forward& f) { return FewQueries<PlainMode<Bf16, float>>(f, Takes::several_splits).run(); }
}  // namespace tilewise::avx512
