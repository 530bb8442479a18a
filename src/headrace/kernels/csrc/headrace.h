// The kernel interface: everything a path (portable, AVX2, AVX-512, later NEON) must provide.
// A path is one table of function pointers, chosen once at start (dispatch.cpp); all paths give the same bits.
// Formulas and layouts: docs/kernels.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

// Storage formats by file type. Layout in memory is interleaved by eight output rows (docs/kernels.md).
enum class Format : uint8_t {
  F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, Count
};

// Float formats multiply the f32 activations themselves; all others read QuantRows.
inline bool is_float(Format f) { return f <= Format::BF16; }

// One weight matrix [n, k] in packed layout; n outputs, k inputs. data: packed_bytes, aligned to 64.
struct Matrix {
  Format format;
  int64_t n, k;
  const uint8_t* data;
};

// Activations quantised to 8 bit, per row and group of 32 along k; range +-127. k is a multiple of 32.
// The inside is the matmul kernels' own (QuantGroup in numerics.h): [k / 32, rows] records, group-major,
// so `rows` is fixed when the memory is handed out. A row's bits don't depend on the other rows.
struct QuantRows {
  int64_t rows, k;
  uint8_t* data;  // quant_bytes(rows, k), aligned to 64
};

// Bytes of a QuantRows.
int64_t quant_bytes(int64_t rows, int64_t k);

// Elements (of one output row) and file bytes of one block of a format; k must be a multiple of `elements`.
struct BlockSize {
  int64_t elements, bytes;
};
BlockSize block_size(Format format);

// Bytes of a packed [n, k] matrix: the file's, plus n rounded up to 8 rows (integer formats) and 64-byte alignment.
int64_t packed_bytes(Format format, int64_t n, int64_t k);

// File bytes (rows one after the other) to packed layout. out: packed_bytes, every byte written. Thread-safe.
void pack(Format format, int64_t n, int64_t k, const uint8_t* raw, uint8_t* out);
// A part of it: `count` rows from `first` on (a multiple of 8, as is `count` unless it ends with row n); raw: these rows
// only. The part with row 0 comes before the others, and writes every byte that is no row's.
void pack_rows(Format format, int64_t n, int64_t k, int64_t first, int64_t count, const uint8_t* raw, uint8_t* out);

// out[0, k): the file's exact values of one row (what Gather reads); the same on every path.
void dequantise_row(const Matrix& w, int64_t row, float* out);

struct Path {
  const char* name;
  // x: rows [row0, row1) with row stride ldx (x is row 0's address) -> the same rows of out.
  // Threads may quantise disjoint row ranges. A group with NaN or infinity becomes NaN in every output.
  void (*quantise)(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1);
  // y[r, j] (+)= sum_k w[j, k] x[r, k] (+ bias[j]) for rows [0, rows) and outputs [n0, n1); n0 a multiple of 8,
  // n1 a multiple of 8 or n. y[r, j] is y[r * ldy + j]; nothing outside [n0, n1) is touched.
  // Integer formats read q (x may be null), float formats x (q may be null). The order of the last two
  // additions: ((dot + bias) + y). Threads may do disjoint output ranges; every split gives the same bits.
  // Good chunks: about 64 KiB of weights for up to 8 rows, 32 to 64 outputs for more.
  void (*matmul)(const Matrix& w, const QuantRows* q, const float* x, int64_t ldx, int64_t rows,
                 float* y, int64_t ldy, const float* bias, bool accumulate, int64_t n0, int64_t n1);
};

// Path tables. Those of AVX exist only where HEADRACE_HAVE_AVX2 is defined.
extern const Path portable_path;
extern const Path avx2_path;
extern const Path avx512_path;

}  // namespace headrace
