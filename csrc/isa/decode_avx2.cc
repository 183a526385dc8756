#define TILEWISE_ISA avx2
#define TILEWISE_VECTOR_BYTES 32
#include "decode/by_type.h"
