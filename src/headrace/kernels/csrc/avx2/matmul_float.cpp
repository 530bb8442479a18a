// F32, F16, BF16 weights times f32 activations: 16 virtual lanes (two registers, or one of AVX-512), element i in lane
// i mod 16.
#include <immintrin.h>

#include "avx2/matmul_avx2.h"
#include "matmul.h"

namespace headrace {
namespace {

#if HR_VNNI
using Vector = __m512;
constexpr int kParts = 1, kRows = 4, kOutputs = 4;  // registers of 16 lanes; rows and outputs of a block

template <Format F>
inline Vector load(const uint8_t* p) {
  if constexpr (F == Format::F32) return _mm512_loadu_ps(p);
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (F == Format::F16) return _mm512_cvtph_ps(h);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#else
using Vector = __m256;
constexpr int kParts = 2, kRows = 3, kOutputs = 2;

template <Format F>
inline Vector load(const uint8_t* p) {
  if constexpr (F == Format::F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (F == Format::F16) return _mm256_cvtph_ps(h);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#endif

// reduce16 (matmul.h): lane i + lane i + 8, then 4, 2, 1.
inline float reduce(__m256 a, __m256 b) {
  const __m256 eight = _mm256_add_ps(a, b);
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
inline float reduce(const Vector* v) {
#if HR_VNNI
  return reduce(_mm512_castps512_ps256(v[0]), _mm512_extractf32x8_ps(v[0], 1));
#else
  return reduce(v[0], v[1]);
#endif
}

// W outputs times R rows; the last k % 16 elements come from buffers filled up with zeros.
template <Format F, int W, int R>
void block(const uint8_t* const* w, const float* const* x, int64_t k, float (*dot)[R]) {
  constexpr int64_t size = F == Format::F32 ? 4 : 2;
  Vector acc[W][R][kParts];
  for (int i = 0; i < W; ++i)
    for (int r = 0; r < R; ++r)
      for (Vector& v : acc[i][r]) v = zero();
  const auto step = [&](const uint8_t* const* ws, const float* const* xs, int64_t at) {
    for (int h = 0; h < kParts; ++h) {
      Vector a[R];
      for (int r = 0; r < R; ++r) a[r] = load(xs[r] + at + 8 * h);
      for (int i = 0; i < W; ++i) {
        const Vector b = load<F>(ws[i] + (at + 8 * h) * size);
        for (int r = 0; r < R; ++r) acc[i][r][h] = fma(b, a[r], acc[i][r][h]);
      }
    }
  };
  int64_t at = 0;
  for (; at + 16 <= k; at += 16) step(w, x, at);
  if (at < k) {
    uint8_t wt[W][64] = {};
    float xt[R][16] = {};
    const uint8_t* ws[W];
    const float* xs[R];
    for (int i = 0; i < W; ++i) std::memcpy(wt[i], w[i] + at * size, static_cast<size_t>((k - at) * size)), ws[i] = wt[i];
    for (int r = 0; r < R; ++r) std::memcpy(xt[r], x[r] + at, static_cast<size_t>((k - at) * 4)), xs[r] = xt[r];
    step(ws, xs, 0);
  }
  for (int i = 0; i < W; ++i)
    for (int r = 0; r < R; ++r) dot[i][r] = reduce(acc[i][r]);
}

struct Job {
  const Matrix& w;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  const float* bias;
  bool accumulate;
};

template <Format F, int W, int R>
void put_block(const Job& job, int64_t j, int64_t r) {
  const int64_t row_bytes = job.w.k * (F == Format::F32 ? 4 : 2);
  const uint8_t* w[W];
  const float* x[R];
  float dot[W][R];
  for (int i = 0; i < W; ++i) w[i] = job.w.data + (j + i) * row_bytes;
  for (int i = 0; i < R; ++i) x[i] = job.x + (r + i) * job.ldx;
  block<F, W, R>(w, x, job.w.k, dot);
  for (int i = 0; i < W; ++i)
    for (int c = 0; c < R; ++c) {
      float& y = job.y[(r + c) * job.ldy + j + i];
      y = finish(dot[i][c], job.bias, j + i, job.accumulate, y);
    }
}

template <Format F, int W>
void outputs(const Job& job, int64_t j, int64_t r0, int64_t r1) {
  int64_t r = r0;
  for (; r + kRows <= r1; r += kRows) put_block<F, W, kRows>(job, j, r);
  if (r1 - r == 3) put_block<F, W, 3>(job, j, r);
  if (r1 - r == 2) put_block<F, W, 2>(job, j, r);
  if (r1 - r == 1) put_block<F, W, 1>(job, j, r);
}

template <Format F>
void run(const Job& job, int64_t rows, int64_t n0, int64_t n1) {
  const int64_t fit = (192 << 10) / (job.w.k * 4), rows_block = std::max<int64_t>(kRows, fit / kRows * kRows);
  for (int64_t r0 = 0; r0 < rows; r0 += rows_block) {
    const int64_t r1 = std::min(rows, r0 + rows_block);
    int64_t j = n0;
    if (rows == 1)
      for (; j + 4 <= n1; j += 4) outputs<F, 4>(job, j, r0, r1);
    for (; j + kOutputs <= n1; j += kOutputs) outputs<F, kOutputs>(job, j, r0, r1);
    for (; j < n1; ++j) outputs<F, 1>(job, j, r0, r1);
  }
}

}  // namespace

void FLOAT_MATMUL(const Matrix& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
                       const float* bias, bool accumulate, int64_t n0, int64_t n1) {
  const Job job{w, x, ldx, y, ldy, bias, accumulate};
  if (w.format == Format::F32) run<Format::F32>(job, rows, n0, n1);
  if (w.format == Format::F16) run<Format::F16>(job, rows, n0, n1);
  if (w.format == Format::BF16) run<Format::BF16>(job, rows, n0, n1);
}

}  // namespace headrace
