// Two tiles (16 outputs) side by side in 512-bit registers, for many rows: half the instructions and broadcasts.
#pragma once
#include "avx2/matmul_tile.h"

namespace headrace {
namespace {

HR_ALWAYS __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }
HR_ALWAYS __m512 join(__m256 a, __m256 b) { return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1); }
HR_ALWAYS __m512i widen(__m512i pairs, int by) {
  return _mm512_madd_epi16(pairs, _mm512_set1_epi16(static_cast<short>(by)));
}

// What one group of both tiles is: its codes step by step, and its scales (matmul_tile.h; sub-scales in 32 bit).
template <Format F>
struct Pair {
  __m512i w[8], sub[2], submin[2];
  __m512 scale, min;

  HR_ALWAYS Pair(Tile<F>* tile, int64_t g) {
    __m256i a[8], b[8];
    spread<F>(tile[0], g, a), spread<F>(tile[1], g, b);
    for (int s = 0; s < 8; ++s) w[s] = join(a[s], b[s]);
    Scales<F> x, y;
    tile[0].scales(g, x), tile[1].scales(g, y);
    scale = join(x.scale, y.scale);
    if constexpr (has_min(F) || F == Format::Q2_K) min = join(x.min, y.min);
    constexpr int kSubs = by_sixteen(F) ? 2 : is(F, Format::Q4_K, Format::Q5_K) ? 1 : 0;
    for (int h = 0; h < kSubs; ++h) sub[h] = _mm512_srai_epi32(join(x.sub[h], y.sub[h]), 16);
    if constexpr (F == Format::Q2_K)
      for (int h = 0; h < 2; ++h) submin[h] = join(x.submin[h], y.submin[h]);
  }
};

struct WideRows {
  const GroupRows<false>& rows;
  HR_ALWAYS __m512i offset(int which, int64_t r) const { return _mm512_castps_si512(_mm512_set1_ps(rows.field(2 + which)[r])); }
  HR_ALWAYS __m512 scale(int64_t r) const { return _mm512_set1_ps(rows.field(0)[r]); }
  HR_ALWAYS __m512 sum(int64_t r) const { return _mm512_set1_ps(rows.field(1)[r]); }
};

// Sum and add_group (matmul_tile.h), 16 outputs wide.
template <Format F>
struct WideSum {
  __m512i a, b;

  HR_ALWAYS void start(const WideRows& rows, int64_t r) {
    a = b = _mm512_setzero_si512();
    if constexpr (F == Format::Q4_0) a = widen(rows.offset(3, r), 1);
    if constexpr (F == Format::Q5_0) a = widen(rows.offset(2, r), 1);
    if constexpr (signed_codes(F)) a = widen(rows.offset(2, r), 8);
    if constexpr (is(F, Format::Q3_K, Format::Q6_K)) a = widen(rows.offset(0, r), 1), b = widen(rows.offset(1, r), 1);
    if constexpr (F == Format::Q3_K) a = _mm512_srai_epi32(a, 3), b = _mm512_srai_epi32(b, 3);
  }
  HR_ALWAYS void add(int step, __m512i w, int32_t act) {
    __m512i& sum = by_sixteen(F) && step >= 4 ? b : a;
    sum = _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(act));
  }
  HR_ALWAYS __m512i total(const Pair<F>& p) const {
    if constexpr (by_sixteen(F)) return _mm512_add_epi32(_mm512_mullo_epi32(a, p.sub[0]), _mm512_mullo_epi32(b, p.sub[1]));
    if constexpr (is(F, Format::Q4_K, Format::Q5_K)) return _mm512_mullo_epi32(a, p.sub[0]);
    return a;
  }
  HR_ALWAYS __m512 onto(const Pair<F>& p, const WideRows& rows, int64_t r, __m512 acc) const {
    const __m512 s = _mm512_cvtepi32_ps(total(p)), da = rows.scale(r);
    if constexpr (F == Format::Q2_K) {
      const __m512i minima = _mm512_add_epi32(_mm512_madd_epi16(rows.offset(0, r), p.submin[0]),
                                              _mm512_madd_epi16(rows.offset(1, r), p.submin[1]));  // * -32
      return _mm512_fmadd_ps(_mm512_fmadd_ps(p.scale, s, _mm512_mul_ps(p.min, _mm512_cvtepi32_ps(minima))), da, acc);
    }
    acc = _mm512_fmadd_ps(s, _mm512_mul_ps(p.scale, da), acc);
    if constexpr (has_min(F)) acc = _mm512_fmadd_ps(p.min, rows.sum(r), acc);
    return acc;
  }
};

// N rows from row r meet both tiles' group.
template <Format F, int N>
HR_ALWAYS void add_wide(const Pair<F>& p, const GroupRows<false>& group, int64_t r, __m512* acc) {
  const WideRows rows{group};
  WideSum<F> sum[N];
  for (int i = 0; i < N; ++i) sum[i].start(rows, r + i);
  const int8_t* q = group.codes(r);
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s)
    for (int i = 0; i < N; ++i) {
      int32_t act;
      std::memcpy(&act, q + 32 * i + 4 * s, 4);
      sum[i].add(s, p.w[s], act);
    }
  for (int i = 0; i < N; ++i) acc[i] = sum[i].onto(p, rows, r + i, acc[i]);
}

}  // namespace
}  // namespace headrace
