#define TPV_ISA base
#include "attention_rows.h"
#include "dense_rows.h"
