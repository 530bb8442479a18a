// The AVX-512 path's integer matmul: the AVX2 one with the products of VNNI (HR_VNNI in matmul_tile.h).
#include "avx2/matmul.cpp"
