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

#if TILEWISE_VECTOR_BYTES == 32
template <class E>
static bool few_queries_of_8_bits(const Forward& f) {
  using Int8 = NarrowWords<E, Stored::int8>;
  using E4m3 = NarrowWords<E, Stored::e4m3>;
  return f.stored == Stored::int8 ? FewQueries<Int8>(f).run() : FewQueries<E4m3>(f).run();
}
#endif

bool few_queries(const Forward& f) {
#if TILEWISE_VECTOR_BYTES == 32
  if (f.stored != Stored::plain) {
    if (f.dtype == DType::bf16) return few_queries_of_8_bits<Bf16>(f);
    if (f.dtype == DType::f16) return few_queries_of_8_bits<Half>(f);
    if (f.dtype == DType::f32) return few_queries_of_8_bits<float>(f);
  }
#endif
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
