// Parts of the AVX2 path that live in files of their own.
#pragma once
#include "headrace.h"

namespace headrace {

void quantise_avx2(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1);
void float_matmul_avx2(const Matrix& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
                       const float* bias, bool accumulate, int64_t n0, int64_t n1);

}  // namespace headrace
