// AVX2, FMA and F16C (compiled with those flags; reached only after dispatch.cpp has looked at the CPU).
#define HEADRACE_OPS avx2_ops
#include "ops_table.h"
