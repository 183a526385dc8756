// Which of the instruction sets this processor and its system can run (x86-64).
#pragma once

namespace tilewise {

bool has_avx2();    // with FMA, F16C and BMI2
bool has_avx512();  // F, BW, DQ, VL
bool has_avx512_bf16();

}  // namespace tilewise
