// The integer matmul of one tile (8 outputs): weights of a group are spread into registers once and meet every row.
//
// Tuned on Zen 1, where the multiplier pipe (vpmaddubsw, vpmaddwd: one 256-bit result in two cycles) is the limit:
// 32 products per vpmaddubsw, sums kept in 16 bit over a group, one widening. 16-bit sums may wrap in between; what
// counts is that the final centred sum fits: 8 steps x 2 codes x 127 x 16 (5 bit) = 32512; 4 x 2 x 127 x 32 (6 bit) too.
#pragma once
#include "avx2/unpack.h"

namespace headrace {
namespace {

constexpr bool is(Format f, Format a, Format b) { return f == a || f == b; }
constexpr bool k_quant(Format f) { return f >= Format::Q2_K && f <= Format::Q6_K; }
constexpr bool has_min(Format f) { return is(f, Format::Q4_1, Format::Q5_1) || is(f, Format::Q4_K, Format::Q5_K); }
constexpr bool by_sixteen(Format f) { return is(f, Format::Q3_K, Format::Q6_K) || f == Format::Q2_K; }
constexpr bool signed_codes(Format f) { return f == Format::Q8_0 || f >= Format::IQ4_NL; }

template <Format F>
struct Group {
  __m256i w[8];
  __m256 scale, min;   // of 8 rows: d (* sub-scale); what is added for each activation (Q2_K: dmin / 32)
  __m256i sub[2];      // by 16: sub-scales in both 16-bit halves
  __m256i submin[2];   // Q2_K
};

// Walks one tile of a packed matrix.
template <Format F>
class Tile {
 public:
  Tile(const Matrix& w, const Planes& p, int64_t tile)
      : meta_(w.data + tile * p.meta_tile), low_(w.data + p.low_start + tile * p.low_tile),
        high_(w.data + p.high_start + tile * p.high_tile) {}

  // Group g; must be called for g = 0, 1, 2 ... in order.
  void load(int64_t g, Group<F>& out) {
    constexpr Layout l = kLayouts[static_cast<int>(F)];
    constexpr int per = l.block / kGroup, low_step = l.low / per, high_step = l.high / per;
    load_codes<F>(low_ + g * low_step, high_ + g * high_step, out.w);
    const uint8_t* meta = meta_ + g / per * l.meta;
    if constexpr (per == 1) {
      out.scale = load_halves(meta);
      if constexpr (has_min(F)) out.min = load_halves(meta + 16);
    } else {
      if (g % per == 0) block(meta);
      sub_scales(static_cast<int>(g % per), meta, out);
    }
  }

 private:
  void block(const uint8_t* meta) {
    d_ = load_halves(meta);
    if constexpr (has_min(F) || F == Format::Q2_K) m_ = load_halves(meta + 16);
    if constexpr (has_min(F)) six_bits_128(meta + 32, six_);
    if constexpr (F == Format::Q3_K) six_bits_128(meta + 16, six_);
    if constexpr (F == Format::IQ4_XS) unpack_six_bits(meta + 16, 64, six_);
  }

  void sub_scales(int g, const uint8_t* meta, Group<F>& out) {
    if constexpr (has_min(F)) {
      out.scale = _mm256_mul_ps(d_, _mm256_cvtepi32_ps(load_bytes(six_ + 8 * g)));
      const __m256 m = _mm256_mul_ps(m_, _mm256_cvtepi32_ps(load_bytes(six_ + 64 + 8 * g)));
      out.min = _mm256_xor_ps(m, _mm256_set1_ps(-0.0f));
    } else if constexpr (F == Format::IQ4_XS) {
      const __m256i s = _mm256_sub_epi32(load_bytes(six_ + 8 * g), _mm256_set1_epi32(32));
      out.scale = _mm256_mul_ps(d_, _mm256_cvtepi32_ps(s));
    } else {
      out.scale = d_;
      for (int h = 0; h < 2; ++h) {
        const int v = 16 * g + 8 * h;
        if constexpr (F == Format::Q6_K) out.sub[h] = both_halves(load_signed_bytes(meta + 16 + v));
        if constexpr (F == Format::Q3_K)
          out.sub[h] = both_halves(_mm256_sub_epi32(load_bytes(six_ + v), _mm256_set1_epi32(32)));
        if constexpr (F == Format::Q2_K) {
          const __m256i both = load_bytes(meta + 32 + v);
          out.sub[h] = both_halves(_mm256_and_si256(both, _mm256_set1_epi32(15)));
          out.submin[h] = both_halves(_mm256_srli_epi32(both, 4));
        }
      }
      if constexpr (F == Format::Q2_K) out.min = _mm256_mul_ps(m_, _mm256_set1_ps(0x1p-5f));
    }
  }

  const uint8_t *meta_, *low_, *high_;
  __m256 d_ = _mm256_setzero_ps(), m_ = _mm256_setzero_ps();
  alignas(32) uint8_t six_[128];
};

// The activations of one group, all rows. Single: there is but one row, so that every offset is a constant.
template <bool Single>
struct GroupRows {
  const uint8_t* base;
  int64_t rows;

  GroupRows(const QuantView& v, int64_t g) : base(v.base + g * QuantView::kBytes * (Single ? 1 : v.rows)), rows(v.rows) {}
  int64_t count() const { return Single ? 1 : rows; }
  const int8_t* codes(int64_t r) const { return reinterpret_cast<const int8_t*>(base) + 32 * r; }
  const float* field(int which) const { return reinterpret_cast<const float*>(base + (32 + 4 * which) * count()); }
  __m256 scale(int64_t r) const { return _mm256_broadcast_ss(field(0) + r); }
  __m256 sum(int64_t r) const { return _mm256_broadcast_ss(field(1) + r); }
  __m256i offset(int which, int64_t r) const { return _mm256_castps_si256(_mm256_broadcast_ss(field(2 + which) + r)); }
};

inline __m256i four(const int8_t* q, int step) {
  int32_t v;
  std::memcpy(&v, q + 4 * step, 4);
  return _mm256_set1_epi32(v);
}

// Keeps a chain of additions as written: interleaved over rows it runs at full rate, as the compiler's tree doesn't.
inline void keep(__m256i& v) { asm("" : "+x"(v)); }

inline __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

// Steps [First, Last) of N rows, added to 16-bit lanes. Fresh: the sums start with the first step.
template <int First, int Last, bool Fresh, int N>
inline void steps(const __m256i* w, const int8_t* q, __m256i* sum) {
  for (int s = First; s < Last; ++s)
    for (int i = 0; i < N; ++i) {
      const __m256i p = _mm256_maddubs_epi16(w[s], four(q + 32 * i, s));
      sum[i] = Fresh && s == First ? p : _mm256_add_epi16(sum[i], p);
      keep(sum[i]);
    }
}

// Half a group (16 codes) of N rows: 16-bit sums, widened; `scale` multiplies (all ones, or the sub-scales).
template <Format F, int Half, int N, class Rows>
inline void half_sums(const Group<F>& w, const Rows& a, int64_t r, __m256i scale, __m256i* wide) {
  __m256i sum[N];
  constexpr bool centred = is(F, Format::Q3_K, Format::Q6_K);
  if constexpr (centred)
    for (int i = 0; i < N; ++i) {
      sum[i] = a.offset(Half, r + i);
      if constexpr (F == Format::Q3_K) sum[i] = _mm256_srai_epi16(sum[i], 3);  // centre 4 = 32 / 8
    }
  steps<4 * Half, 4 * Half + 4, !centred, N>(w.w, a.codes(r), sum);
  for (int i = 0; i < N; ++i) {
    const __m256i v = _mm256_madd_epi16(sum[i], scale);
    wide[i] = Half ? _mm256_add_epi32(wide[i], v) : v;
  }
}

// Signed codes: |w| * sign(a, w). A pair sum p nearly fills 16 bit (128 * 127 * 2), so eight of them don't fit. Kept
// are low = their sum modulo 2^16 and high = the sum of p >> 8; then low - 256 * high = sum of (p & 255) < 2048 is
// exact, and so is the total. Cheaper than widening each p: shifts and additions have pipes of their own.
template <Format F, int N, class Rows>
inline void signed_sums(const Group<F>& w, const Rows& a, int64_t r, __m256i* wide) {
  const int8_t* q = a.codes(r);
  __m256i low[N], high[N];
  for (int s = 0; s < 8; ++s) {
    const __m256i magnitude = _mm256_abs_epi8(w.w[s]);
    for (int i = 0; i < N; ++i) {
      const __m256i p = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four(q + 32 * i, s), w.w[s]));
      low[i] = s ? _mm256_add_epi16(low[i], p) : p;
      const __m256i top = _mm256_srai_epi16(p, 8);
      high[i] = s ? _mm256_add_epi16(high[i], top) : top;
      keep(low[i]), keep(high[i]);
    }
  }
  for (int i = 0; i < N; ++i) {
    const __m256i rest = _mm256_sub_epi16(low[i], _mm256_slli_epi16(high[i], 8));
    wide[i] = _mm256_add_epi32(_mm256_madd_epi16(high[i], _mm256_set1_epi16(256)), widen(rest));
  }
}

// The exact integer sums of one group for rows r .. r + N - 1.
template <Format F, int N, class Rows>
inline void group_sums(const Group<F>& w, const Rows& a, int64_t r, __m256i* wide) {
  if constexpr (signed_codes(F)) {
    signed_sums<F, N>(w, a, r, wide);
  } else if constexpr (by_sixteen(F)) {
    half_sums<F, 0, N>(w, a, r, w.sub[0], wide);
    half_sums<F, 1, N>(w, a, r, w.sub[1], wide);
  } else if constexpr (is(F, Format::Q5_1, Format::Q5_K)) {
    half_sums<F, 0, N>(w, a, r, _mm256_set1_epi16(1), wide);
    half_sums<F, 1, N>(w, a, r, _mm256_set1_epi16(1), wide);
  } else {
    constexpr bool centred = is(F, Format::Q4_0, Format::Q5_0);
    __m256i sum[N];
    if constexpr (centred)
      for (int i = 0; i < N; ++i) sum[i] = a.offset(F == Format::Q4_0 ? 3 : 2, r + i);
    steps<0, 8, !centred, N>(w.w, a.codes(r), sum);
    for (int i = 0; i < N; ++i) wide[i] = widen(sum[i]);
  }
}

// acc + the group's share, by the format's formula (docs/kernels.md).
template <Format F, class Rows>
inline __m256 add_group(const Group<F>& w, const Rows& a, int64_t r, __m256i sum, __m256 acc) {
  const __m256 s = _mm256_cvtepi32_ps(sum), da = a.scale(r);
  if constexpr (F == Format::Q2_K) {
    const __m256i minima = _mm256_add_epi32(_mm256_madd_epi16(a.offset(0, r), w.submin[0]),
                                            _mm256_madd_epi16(a.offset(1, r), w.submin[1]));  // * -32
    const __m256 m = _mm256_mul_ps(w.min, _mm256_cvtepi32_ps(minima));
    return _mm256_fmadd_ps(_mm256_fmadd_ps(w.scale, s, m), da, acc);
  }
  acc = _mm256_fmadd_ps(s, _mm256_mul_ps(w.scale, da), acc);
  if constexpr (has_min(F)) acc = _mm256_fmadd_ps(w.min, a.sum(r), acc);
  return acc;
}

template <Format F, int N, class Rows>
inline void add_rows(const Group<F>& w, const Rows& a, int64_t r, __m256* acc) {
  __m256i sum[N];
  group_sums<F, N>(w, a, r, sum);
  for (int i = 0; i < N; ++i) acc[i] = add_group<F>(w, a, r + i, sum[i], acc[i]);
}

}  // namespace
}  // namespace headrace
