// Serves every processor, NEON on aarch64 included.
#define TILEWISE_ISA portable
#define TILEWISE_VECTOR_BYTES 16
#include "decode/by_type.h"
