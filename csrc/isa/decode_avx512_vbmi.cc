// Few queries beside keys and values in 8 bits, for processors with tables of bytes and 16-bit integer products.
#define TILEWISE_ISA avx512_vbmi
#define TILEWISE_VECTOR_BYTES 64
#include "decode/by_type.h"
