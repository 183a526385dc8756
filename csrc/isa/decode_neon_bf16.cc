#define TILEWISE_ISA neon_bf16
#define TILEWISE_VECTOR_BYTES 16
#include "base/processor.h"
#include "decode/by_type.h"
