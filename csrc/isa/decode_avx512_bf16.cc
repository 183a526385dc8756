#define TILEWISE_ISA avx512_bf16
#define TILEWISE_VECTOR_BYTES 64
#include "base/processor.h"
#include "decode/by_type.h"
