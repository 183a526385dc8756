#define TILEWISE_ISA avx512
#define TILEWISE_VECTOR_BYTES 64
#include "decode/by_type.h"
