// The kernel interface: everything a path (portable, AVX2, later AVX-512 and NEON) must provide.
// A path is one table of function pointers, chosen once at start (dispatch.cpp); all paths give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

// Storage formats by file type. Layout in memory is interleaved by eight output rows (docs/kernels.md).
enum class Format : uint8_t {
  F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, Count
};

// One weight matrix [n, k] in packed layout; n outputs, k inputs.
struct Matrix {
  Format format;
  int64_t n, k;
  const uint8_t* data;
};

// Activations quantised to 8 bit, per row and group of 32 along k; range +-127.
struct QuantRows {
  int rows;
  int64_t k;
  int8_t* q;      // [rows, k]
  float* scale;   // [rows, k / 32]
  int32_t* sum;   // [rows, k / 16] exact sums of each 16 values of q
};

struct Path {
  const char* name;
  // x: [rows, k] with row stride ldx -> out; exact rule in docs/kernels.md.
  void (*quantise)(const float* x, int64_t ldx, QuantRows& out, int row0, int row1);
  // y[r, j] (+)= sum_k w[j, k] x[r, k] (+ bias[j]) for rows [0, rows) and outputs [n0, n1), n0 a multiple of 8.
  // Integer formats read q, float formats read x.
  void (*matmul)(const Matrix& w, const QuantRows* q, const float* x, int64_t ldx, int rows,
                 float* y, int64_t ldy, const float* bias, bool accumulate, int64_t n0, int64_t n1);
};

// Path tables of matmul kernels. avx2_path exists only where HEADRACE_HAVE_AVX2 is defined.
extern const Path portable_path;
extern const Path avx2_path;

// Packed layout, the same for every path. raw: the file's rows one after the other; out: packed_bytes, 64-aligned.
int64_t packed_bytes(Format format, int64_t n, int64_t k);
void pack(Format format, int64_t n, int64_t k, const uint8_t* raw, uint8_t* out);
// The k values of one row, exactly the file's.
void dequantise_row(const Matrix& w, int64_t row, float* out);

}  // namespace headrace
