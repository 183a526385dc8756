#define TILEWISE_ISA avx512_bf16
#define TILEWISE_VECTOR_BYTES 64
#include "processor.h"
#include "few_queries.h"
