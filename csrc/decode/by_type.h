// Which kernel serves few queries, by storage type.
#pragma once

#include "decode/decode.h"

#if defined(__AVX512BF16__)
namespace tilewise::avx512_vbmi {
bool few_queries(const Forward& f);  // decode_avx512_vbmi.cc
}
#endif

namespace tilewise::TILEWISE_ISA {

template <class Mode>
using FewQueries = DecodeKernel<Mode, FewRows<Mode>>;

bool few_queries(const Forward& f) {
#if defined(TW_PAIRS)
  const bool dots = f.dots < 0 ? has_fast_dots() : f.dots == 1;
#if defined(__AVX512BF16__)
  if (f.dtype == DType::bf16 && f.stored != Stored::plain && dots && has_byte_tables())
    return avx512_vbmi::few_queries(f);
#endif
  if (f.dtype == DType::bf16 && !dots) return FewQueries<PlainMode<Bf16, float>>(f).run();
#endif
  return run<FewQueries>(f);
}

}  // namespace tilewise::TILEWISE_ISA
