// Which of the instruction sets this processor and its system can run.
#pragma once

namespace tilewise {

#if defined(TILEWISE_ARM)
bool has_neon_bf16();  // FEAT_BF16
#else
bool has_avx2();    // with FMA, F16C and BMI2
bool has_avx512();  // F, BW, DQ, VL
bool has_avx512_bf16();
bool has_tiles();        // AMX with bfloat16; the first call asks the system for leave to use them
bool has_byte_tables();  // AVX512_VBMI, with AVX512_VNNI
#endif
bool tiles_refused();  // whether the processor has such tiles, and the system does not let this process use them
// Whether bfloat16 dot products are faster than widening and multiplying. A Zen 4 or 5 does twice the products of
// float32 in a second; a Sapphire Rapids 0.6 of them (notes/performance-log.md). ARM has them in one speed.
bool has_fast_dots();
// Whether short rows come from memory sooner in their order than a row of each page in turn. On a Zen 4 rows of a line
// or two do, in 0.8 to 0.95 of the time; on a Sapphire Rapids pages in turn are faster (notes/performance-log.md).
bool has_line_streams();

}  // namespace tilewise
