// Parts of the AVX2 path that live in files of their own.
#pragma once
#include "headrace.h"

namespace headrace {

void quantise_avx2(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1);
// The same sources make the AVX-512 path (avx512/), where products are VNNI's and registers wider.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HR_VNNI 1
#define FLOAT_MATMUL float_matmul_avx512
#else
#define HR_VNNI 0
#define FLOAT_MATMUL float_matmul_avx2
#endif
void FLOAT_MATMUL(const Matrix& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy, const float* bias,
                  bool accumulate, int64_t n0, int64_t n1);

}  // namespace headrace
