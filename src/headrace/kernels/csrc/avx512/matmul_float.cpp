#include "avx2/matmul_float.cpp"
