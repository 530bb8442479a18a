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

// The activations of one group, all rows.
struct GroupRows {
  const int8_t* codes;
  const float *scales, *sums;
  const int32_t* offsets;  // four arrays of `rows` pairs
  int64_t rows;

  GroupRows(const QuantView& v, int64_t g)
      : codes(v.codes(g, 0)), scales(v.scales(g)), sums(v.sums(g)),
        offsets(reinterpret_cast<const int32_t*>(v.offsets(g, 0))), rows(v.rows) {}
  __m256i offset(int which, int64_t r) const { return _mm256_set1_epi32(offsets[which * rows + r]); }
};

inline __m256i four(const int8_t* q, int step) {
  int32_t v;
  std::memcpy(&v, q + 4 * step, 4);
  return _mm256_set1_epi32(v);
}

// Sum of steps [First, Last) in 16-bit lanes, on top of `start`.
template <int First, int Last>
inline __m256i steps(const __m256i* w, const int8_t* q, __m256i start) {
  for (int s = First; s < Last; ++s) start = _mm256_add_epi16(start, _mm256_maddubs_epi16(w[s], four(q, s)));
  return start;
}
template <int First, int Last>
inline __m256i steps(const __m256i* w, const int8_t* q) {
  return steps<First + 1, Last>(w, q, _mm256_maddubs_epi16(w[First], four(q, First)));
}

inline __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

// The exact integer sum of one group of one row.
template <Format F>
inline __m256i group_sum(const Group<F>& w, const GroupRows& a, int64_t r) {
  const int8_t* q = a.codes + 32 * r;
  if constexpr (F == Format::Q4_0) return widen(steps<0, 8>(w.w, q, a.offset(3, r)));
  if constexpr (F == Format::Q5_0) return widen(steps<0, 8>(w.w, q, a.offset(2, r)));
  if constexpr (is(F, Format::Q4_1, Format::Q4_K)) return widen(steps<0, 8>(w.w, q));
  if constexpr (is(F, Format::Q5_1, Format::Q5_K))
    return _mm256_add_epi32(widen(steps<0, 4>(w.w, q)), widen(steps<4, 8>(w.w, q)));
  if constexpr (by_sixteen(F)) {
    __m256i first, last;
    if constexpr (F == Format::Q2_K) {
      first = steps<0, 4>(w.w, q), last = steps<4, 8>(w.w, q);
    } else if constexpr (F == Format::Q3_K) {  // centre 4 = 32 / 8
      first = steps<0, 4>(w.w, q, _mm256_srai_epi16(a.offset(0, r), 3));
      last = steps<4, 8>(w.w, q, _mm256_srai_epi16(a.offset(1, r), 3));
    } else {
      first = steps<0, 4>(w.w, q, a.offset(0, r)), last = steps<4, 8>(w.w, q, a.offset(1, r));
    }
    return _mm256_add_epi32(_mm256_madd_epi16(first, w.sub[0]), _mm256_madd_epi16(last, w.sub[1]));
  }
}

// acc + the group's share, by the format's formula (docs/kernels.md).
template <Format F>
inline __m256 add_group(const Group<F>& w, const GroupRows& a, int64_t r, __m256i sum, __m256 acc) {
  const __m256 s = _mm256_cvtepi32_ps(sum), da = _mm256_broadcast_ss(a.scales + r);
  if constexpr (F == Format::Q2_K) {
    const __m256i minima = _mm256_add_epi32(_mm256_madd_epi16(a.offset(0, r), w.submin[0]),
                                            _mm256_madd_epi16(a.offset(1, r), w.submin[1]));  // * -32
    const __m256 m = _mm256_mul_ps(w.min, _mm256_cvtepi32_ps(minima));
    return _mm256_fmadd_ps(_mm256_fmadd_ps(w.scale, s, m), da, acc);
  }
  acc = _mm256_fmadd_ps(s, _mm256_mul_ps(w.scale, da), acc);
  if constexpr (has_min(F)) acc = _mm256_fmadd_ps(w.min, _mm256_broadcast_ss(a.sums + r), acc);
  return acc;
}

// Signed codes: |w| * sign(a, w); one pair sum nearly fills 16 bit (127 * 128 * 2), so each step is widened.
template <Format F, int N>
inline void signed_rows(const Group<F>& w, const GroupRows& a, int64_t r, __m256* acc) {
  const int8_t* q = a.codes + 32 * r;
  __m256i sum[N];
  for (int s = 0; s < 8; ++s) {
    const __m256i magnitude = _mm256_abs_epi8(w.w[s]);
    for (int i = 0; i < N; ++i) {
      const __m256i p = widen(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four(q + 32 * i, s), w.w[s])));
      sum[i] = s ? _mm256_add_epi32(sum[i], p) : p;
    }
  }
  for (int i = 0; i < N; ++i) acc[i] = add_group<F>(w, a, r + i, sum[i], acc[i]);
}

template <Format F>
inline void all_rows(const Group<F>& w, const GroupRows& a, int64_t r0, int64_t r1, __m256* acc) {
  if constexpr (signed_codes(F)) {
    int64_t r = r0;
    for (; r + 4 <= r1; r += 4) signed_rows<F, 4>(w, a, r, acc + (r - r0));
    for (; r < r1; ++r) signed_rows<F, 1>(w, a, r, acc + (r - r0));
  } else {
    for (int64_t r = r0; r < r1; ++r) acc[r - r0] = add_group<F>(w, a, r, group_sum<F>(w, a, r), acc[r - r0]);
  }
}

}  // namespace
}  // namespace headrace
