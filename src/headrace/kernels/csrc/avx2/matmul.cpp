// The AVX2 path's integer matmul: blocks of rows, tiles of 8 outputs, and the table entry.
#include <type_traits>

#include "avx2/matmul_avx2.h"
#include "avx2/matmul_tile.h"
#include "matmul.h"
#if HR_VNNI
#include "avx512/pairs.h"
#endif

namespace headrace {
namespace {

constexpr int64_t kMaxRows = 64;           // of a block: accumulators in L1
constexpr int64_t kBlockBytes = 256 << 10; // of activations: they stay in L2 while the tiles go by

// acc of one row, 8 outputs (the first `live` are real) -> y.
void store(__m256 acc, int live, const float* bias, bool accumulate, float* y) {
  if (live == kTile) {
    if (bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(bias));
    if (accumulate) acc = _mm256_add_ps(acc, _mm256_loadu_ps(y));
    _mm256_storeu_ps(y, acc);
    return;
  }
  alignas(32) float out[kTile];
  _mm256_store_ps(out, acc);
  for (int i = 0; i < live; ++i) y[i] = finish(out[i], bias, i, accumulate, y[i]);
}

struct Job {
  const Matrix& w;
  QuantView q;
  int64_t rows;
  float* y;
  int64_t ldy;
  const float* bias;
  bool accumulate;
  int64_t n0, n1;
};

void store_row(const Job& job, int64_t r, int64_t j, __m256 acc) {
  const int live = static_cast<int>(std::min<int64_t>(kTile, job.n1 - j));
  store(acc, live, job.bias ? job.bias + j : nullptr, job.accumulate, job.y + r * job.ldy + j);
}

// T tiles from output j on meet the only row.
template <Format F, int T>
void single_row(const Job& job, const Planes& planes, int64_t j) {
  Tile<F> tile[2] = {{job.w, planes, j / kTile}, {job.w, planes, j / kTile + T - 1}};
  __m256 acc[T];
  for (__m256& v : acc) v = _mm256_setzero_ps();
  const int64_t groups = job.w.k / kGroup;
  for (int64_t g = 0; g < groups; ++g) add_single<F, T>(tile, g, groups, GroupRows<true>(job.q, g), acc);
  for (int t = 0; t < T; ++t) store_row(job, 0, j + t * kTile, acc[t]);
}

// One tile meets rows [r0, r0 + 4 * quads + Rest).
template <Format F, int Rest>
void tile_rows(const Job& job, const Planes& planes, int64_t j, int64_t r0, int64_t quads) {
  Tile<F> tile(job.w, planes, j / kTile);
  Scales<F> scales;
  __m256i w[8];
  __m256 acc[kMaxRows], rest[Rest ? Rest : 1];
  for (int64_t r = 0; r < 4 * quads; ++r) acc[r] = _mm256_setzero_ps();
  for (__m256& v : rest) v = _mm256_setzero_ps();
  const int64_t r1 = r0 + 4 * quads;
  const int64_t groups = job.w.k / kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    if (quads <= 2) tile.prefetch(g, groups, 1);
    spread<F>(tile, g, w);
    tile.scales(g, scales);
    const GroupRows<false> rows(job.q, g);
    for (int64_t r = 0; r < 4 * quads; r += 4) add_rows<F, 4>(w, scales, rows, r0 + r, acc + r);
    if constexpr (Rest > 0) add_rows<F, Rest>(w, scales, rows, r1, rest);
  }
  for (int64_t r = 0; r < 4 * quads; ++r) store_row(job, r0 + r, j, acc[r]);
  for (int r = 0; r < Rest; ++r) store_row(job, r1 + r, j, rest[r]);
}

// Calls fn with count % 4 as a constant.
template <class Fn>
void with_rest(int64_t count, Fn fn) {
  switch (count % 4) {
    case 0: return fn(std::integral_constant<int, 0>());
    case 1: return fn(std::integral_constant<int, 1>());
    case 2: return fn(std::integral_constant<int, 2>());
    default: return fn(std::integral_constant<int, 3>());
  }
}

#if HR_VNNI
// Two tiles meet rows [r0, r0 + 4 * quads + Rest).
template <Format F, int Rest>
void pair_rows(const Job& job, const Planes& planes, int64_t j, int64_t r0, int64_t quads) {
  Tile<F> tile[2] = {{job.w, planes, j / kTile}, {job.w, planes, j / kTile + 1}};
  __m512 acc[kMaxRows], rest[Rest ? Rest : 1];
  for (int64_t r = 0; r < 4 * quads; ++r) acc[r] = _mm512_setzero_ps();
  for (__m512& v : rest) v = _mm512_setzero_ps();
  const int64_t r1 = r0 + 4 * quads;
  const int64_t groups = job.w.k / kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    tile[0].prefetch_pair(g);
    const Pair<F> pair(tile, g);
    const GroupRows<false> rows(job.q, g);
    for (int64_t r = 0; r < 4 * quads; r += 4) add_wide<F, 4>(pair, rows, r0 + r, acc + r);
    if constexpr (Rest > 0) add_wide<F, Rest>(pair, rows, r1, rest);
  }
  const auto put = [&](int64_t r, __m512 v) {
    store_row(job, r, j, _mm512_castps512_ps256(v)), store_row(job, r, j + kTile, _mm512_extractf32x8_ps(v, 1));
  };
  for (int64_t r = 0; r < 4 * quads; ++r) put(r0 + r, acc[r]);
  for (int r = 0; r < Rest; ++r) put(r1 + r, rest[r]);
}
#endif

template <Format F>
void integer_matmul(const Job& job) {
  const Planes planes(F, job.w.n, job.w.k);
  if (job.q.rows == 1) {
    int64_t j = job.n0;
    // Two tiles at once hide the products' latency on Zen 1; VNNI's chain is short, and one stream of memory is faster.
    if constexpr (!HR_VNNI)
      for (; j + kTile < job.n1; j += 2 * kTile) single_row<F, 2>(job, planes, j);
    for (; j < job.n1; j += kTile) single_row<F, 1>(job, planes, j);
    return;
  }
  const int64_t fit = kBlockBytes / (job.w.k / kGroup * QuantView::kBytes);
  const int64_t block = std::clamp<int64_t>(fit / 4 * 4, 16, kMaxRows);
  for (int64_t r0 = 0; r0 < job.rows; r0 += block) {
    const int64_t count = std::min(job.rows - r0, block);
    with_rest(count, [&](auto rest) {
      int64_t j = job.n0;
#if HR_VNNI
      for (; j + kTile < job.n1; j += 2 * kTile) pair_rows<F, decltype(rest)::value>(job, planes, j, r0, count / 4);
#endif
      for (; j < job.n1; j += kTile) tile_rows<F, decltype(rest)::value>(job, planes, j, r0, count / 4);
    });
  }
}

void matmul(const Matrix& w, const QuantRows* q, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
            const float* bias, bool accumulate, int64_t n0, int64_t n1) {
  if (is_float(w.format)) return FLOAT_MATMUL(w, x, ldx, rows, y, ldy, bias, accumulate, n0, n1);
  const Job job{w, QuantView(*q), rows, y, ldy, bias, accumulate, n0, n1};
  switch (w.format) {
    case Format::Q4_0: return integer_matmul<Format::Q4_0>(job);
    case Format::Q4_1: return integer_matmul<Format::Q4_1>(job);
    case Format::Q5_0: return integer_matmul<Format::Q5_0>(job);
    case Format::Q5_1: return integer_matmul<Format::Q5_1>(job);
    case Format::Q8_0: return integer_matmul<Format::Q8_0>(job);
    case Format::Q2_K: return integer_matmul<Format::Q2_K>(job);
    case Format::Q3_K: return integer_matmul<Format::Q3_K>(job);
    case Format::Q4_K: return integer_matmul<Format::Q4_K>(job);
    case Format::Q5_K: return integer_matmul<Format::Q5_K>(job);
    case Format::Q6_K: return integer_matmul<Format::Q6_K>(job);
    case Format::IQ4_NL: return integer_matmul<Format::IQ4_NL>(job);
    case Format::IQ4_XS: return integer_matmul<Format::IQ4_XS>(job);
    default: return;
  }
}

}  // namespace

#if HR_VNNI
const Path avx512_path = {"avx512", quantise_avx2, matmul};
#else
const Path avx2_path = {"avx2", quantise_avx2, matmul};
#endif

}  // namespace headrace
