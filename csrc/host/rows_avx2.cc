// Compiled for AVX2 and FMA.
#define TPV_ISA avx2
#include "attention_rows.h"
#include "dense_rows.h"
