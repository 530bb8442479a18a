// Portable path: the compiler's generic vectors and fmaf.
#define HEADRACE_OPS portable_ops
#include "ops_table.h"
