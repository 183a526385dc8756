// Which kernel serves few queries, by storage type.
#pragma once

#include "base/processor.h"
#include "decode/decode.h"

#if TILEWISE_VECTOR_BYTES == 64
// Compiled for more instructions: decode_avx512_vbmi.cc and decode_avx512_vbmi_bf16.cc.
namespace tilewise::avx512_vbmi {
bool few_queries(const Forward& f);
}
namespace tilewise::avx512_vbmi_bf16 {
bool few_queries(const Forward& f);
}
#endif

namespace tilewise::TILEWISE_ISA {

template <class Mode>
using FewQueries = DecodeKernel<Mode, FewRows<Mode>>;

#if TILEWISE_VECTOR_BYTES >= 32
// Keys and values in 8 bits that the products take as they are.
template <class E>
static bool few_queries_of_8_bits(const Forward& f) {
  using Int8 = std::conditional_t<std::is_same_v<E, Bf16>, IntegerMode, NarrowWords<E, Stored::int8>>;
  using E4m3 = NarrowWords<E, Stored::e4m3>;
  return f.stored == Stored::int8 ? FewQueries<Int8>(f).run() : FewQueries<E4m3>(f).run();
}
#endif

bool few_queries(const Forward& f) {
#if defined(TW_PAIRS)
  const bool dots = f.dtype == DType::bf16 && (f.dots < 0 ? has_fast_dots() : f.dots == 1);
#else
  [[maybe_unused]] constexpr bool dots = false;
#endif
#if TILEWISE_VECTOR_BYTES == 64 && !defined(__AVX512VBMI__)
  const bool tables = f.byte_tables < 0 ? has_byte_tables() : f.byte_tables == 1;
  if (tables && dots && f.stored == Stored::e4m3) return avx512_vbmi_bf16::few_queries(f);
  if (tables && f.stored != Stored::plain) return avx512_vbmi::few_queries(f);
#endif
#if TILEWISE_VECTOR_BYTES >= 32
  // Of many rows, and in pairs of bfloat16, they are widened into the cache once for all; but AVX2 is slow at that with
  // bfloat16 (widen_row).
  const bool integers = f.stored == Stored::int8 && f.dtype == DType::bf16,
             slow = kVectorBytes == 32 && f.dtype == DType::bf16;
  const bool few = !dots && (f.queries * f.heads <= 16 * f.kv_heads || slow);
  if (f.stored != Stored::plain && (integers || few)) {
    if (f.dtype == DType::bf16) return few_queries_of_8_bits<Bf16>(f);
    if (f.dtype == DType::f16) return few_queries_of_8_bits<Half>(f);
    if (f.dtype == DType::f32) return few_queries_of_8_bits<float>(f);
  }
#endif
#if defined(TW_PAIRS)
  if (f.dtype == DType::bf16 && !dots) return FewQueries<PlainMode<Bf16, float>>(f).run();
#endif
  return run<FewQueries>(f);
}

}  // namespace tilewise::TILEWISE_ISA
