// The integer matmul of one tile (8 outputs): weights of a group are spread into registers once and meet every row.
//
// Tuned on Zen 1, where the multiplier pipe (vpmaddubsw, vpmaddwd: one 256-bit result in two cycles) is the limit:
// 32 products per vpmaddubsw, sums kept in 16 bit over a group, one widening. 16-bit sums may wrap in between; what
// counts is that the final centred sum fits: 8 steps x 2 codes x 127 x 16 (5 bit) = 32512; 4 x 2 x 127 x 32 (6 bit) too.
#pragma once
#include "avx2/matmul_avx2.h"
#include "avx2/unpack.h"

namespace headrace {
namespace {

constexpr bool is(Format f, Format a, Format b) { return f == a || f == b; }
constexpr bool k_quant(Format f) { return f >= Format::Q2_K && f <= Format::Q6_K; }
constexpr bool has_min(Format f) { return is(f, Format::Q4_1, Format::Q5_1) || is(f, Format::Q4_K, Format::Q5_K); }
constexpr bool by_sixteen(Format f) { return is(f, Format::Q3_K, Format::Q6_K) || f == Format::Q2_K; }
constexpr bool signed_codes(Format f) { return f == Format::Q8_0 || f >= Format::IQ4_NL; }

template <Format F>
struct Scales {        // of one group of 8 rows
  __m256 scale, min;   // d (IQ4_XS: * sub-scale); what is added for each activation (Q2_K: dmin / 32)
  __m256i sub[2];      // integer sub-scales in both 16-bit halves: of each 16, or sub[0] of all
  __m256i submin[2];   // Q2_K
};

// Walks one tile of a packed matrix.
template <Format F>
class Tile {
  static constexpr Layout kLayout = kLayouts[static_cast<int>(F)];
  static constexpr int kPer = kLayout.block / kGroup;

 public:
  Tile(const Matrix& w, const Planes& p, int64_t tile)
      : meta_(w.data + tile * p.meta_tile), low_(w.data + p.low_start + tile * p.low_tile),
        high_(w.data + p.high_start + tile * p.high_tile), low_tile_(p.low_tile), high_tile_(p.high_tile),
        meta_tile_(p.meta_tile) {}

  const uint8_t* low(int64_t g) const { return low_ + g * (kLayout.low / kPer); }
  const uint8_t* high(int64_t g) const { return high_ + g * (kLayout.high / kPer); }

  // Asks for what comes some groups later, in this tile or in the one that follows it (`step` tiles on); distances found by
  // trial (docs/log.md).
  HR_ALWAYS void prefetch(int64_t g, int64_t groups, int step) const {
    constexpr int kLow = kLayout.low / kPer, kHigh = kLayout.high / kPer, kAhead = 3072 / kLow;
    const int64_t n = g + kAhead;
    const bool here = n < groups;
    const uint8_t* low = here ? low_ + n * kLow : low_ + step * low_tile_ + (n - groups) * kLow;
    for (int i = 0; i < kLow; i += 64) fetch(low + i);
    if (kHigh) fetch(here ? high_ + n * kHigh : high_ + step * high_tile_ + (n - groups) * kHigh);
    if (kPer == 1) fetch(meta_ + g * kLayout.meta + 2048);
    if (kPer > 1 && g % kPer == 0)
      for (int i = 0; i < kLayout.meta; i += 64) fetch(meta_ + g / kPer * kLayout.meta + 2048 + i);
  }

  // For this tile and the next one side by side: what comes a tile and some later, in the order it lies in memory, as the
  // processor's own prefetching follows one stream better than two short ones. Into L2: a tile may be longer than L1.
  HR_ALWAYS void prefetch_pair(int64_t g) const {
    constexpr int kLow = kLayout.low / kPer, kHigh = kLayout.high / kPer, kAhead = 3072;
    fetch<2 * kLow>(low_ + low_tile_ + kAhead + 2 * g * kLow);
    if constexpr (kHigh > 0) fetch<2 * kHigh>(high_ + high_tile_ + kAhead / 2 + 2 * g * kHigh);
    if (g % kPer == 0) fetch<2 * kLayout.meta>(meta_ + meta_tile_ + kAhead / 2 + 2 * (g / kPer) * kLayout.meta);
  }
  template <int Bytes>
  static HR_ALWAYS void fetch(const uint8_t* p) {
    for (int i = 0; i < Bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
  }

  // Inlined early: as a plain function it has no effect GCC can see, and its calls are dropped.
  static HR_ALWAYS void fetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  // Scales of group g; must be called for g = 0, 1, 2 ... in order.
  HR_ALWAYS void scales(int64_t g, Scales<F>& out) {
    const uint8_t* meta = meta_ + g / kPer * kLayout.meta;
    if constexpr (kPer == 1) {
      out.scale = load_halves(meta);
      if constexpr (has_min(F)) out.min = load_halves(meta + 16);
    } else {
      if (g % kPer == 0) block(meta);
      sub_scales(static_cast<int>(g % kPer), meta, out);
    }
  }

 private:
  HR_ALWAYS void block(const uint8_t* meta) {
    d_ = load_halves(meta);
    if constexpr (has_min(F)) m_ = _mm256_xor_ps(load_halves(meta + 16), _mm256_set1_ps(-0.0f));
    if constexpr (F == Format::Q2_K) m_ = _mm256_mul_ps(load_halves(meta + 16), _mm256_set1_ps(0x1p-5f));
    if constexpr (has_min(F)) six_bits_128(meta + 32, six_);
    if constexpr (F == Format::Q3_K) six_bits_128(meta + 16, six_);
    if constexpr (F == Format::IQ4_XS) six_bits_64(meta + 16, six_);
  }

  HR_ALWAYS void sub_scales(int g, const uint8_t* meta, Scales<F>& out) {
    if constexpr (has_min(F)) {
      out.scale = d_;
      out.sub[0] = both_halves(load_eight(six_ + 8 * g));
      out.min = _mm256_mul_ps(m_, to_floats(load_eight(six_ + 64 + 8 * g)));
    } else if constexpr (F == Format::IQ4_XS) {
      const __m256i s = _mm256_sub_epi32(to_lanes<1>(load_eight(six_ + 8 * g)), _mm256_set1_epi32(32));
      out.scale = _mm256_mul_ps(d_, _mm256_cvtepi32_ps(s));
    } else {
      out.scale = d_, out.min = m_;
      for (int h = 0; h < 2; ++h) {
        const int v = 16 * g + 8 * h;
        if constexpr (F == Format::Q6_K) out.sub[h] = both_halves_signed(load_eight(meta + 16 + v));
        if constexpr (F == Format::Q3_K)
          out.sub[h] = _mm256_sub_epi16(both_halves(load_eight(six_ + v)), _mm256_set1_epi16(32));
        if constexpr (F == Format::Q2_K) {
          const __m256i both = both_halves(load_eight(meta + 32 + v));
          out.sub[h] = _mm256_and_si256(both, _mm256_set1_epi16(15));
          out.submin[h] = _mm256_srli_epi16(both, 4);
        }
      }
    }
  }

  const uint8_t *meta_, *low_, *high_;
  int64_t low_tile_, high_tile_, meta_tile_;
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

HR_ALWAYS __m256i four(const int8_t* q, int step) {
  int32_t v;
  std::memcpy(&v, q + 4 * step, 4);
  return _mm256_set1_epi32(v);
}

// Keeps a chain of additions as written: interleaved over rows it runs at full rate, as the compiler's tree doesn't.
// Fixed: and in its place among the others.
template <bool Fixed>
HR_ALWAYS void keep(__m256i& v) {
  if constexpr (Fixed) asm volatile("" : "+x"(v));
  else asm("" : "+x"(v));
}

HR_ALWAYS __m256i widen(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

#if HR_VNNI
// The exact integer sum of one group, of 8 outputs and one row: four products a lane and instruction, in 32 bit.
// Signed codes are taken 128 higher, and 128 times the activations' sum is taken off.
template <Format F>
struct Sum {
  static constexpr bool kHalves = by_sixteen(F);
  static constexpr bool kLate = false;
  __m256i a, b;  // the sum; with kHalves, of the first and last 16 codes

  static HR_ALWAYS __m256i times(__m256i pairs, int by) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(static_cast<short>(by))); }
  template <class Rows>
  HR_ALWAYS void start(const Rows& rows, int64_t r) {
    a = b = _mm256_setzero_si256();
    if constexpr (F == Format::Q4_0) a = widen(rows.offset(3, r));
    if constexpr (F == Format::Q5_0) a = widen(rows.offset(2, r));
    if constexpr (signed_codes(F)) a = times(rows.offset(2, r), 8);
    if constexpr (F == Format::Q6_K) a = widen(rows.offset(0, r)), b = widen(rows.offset(1, r));
    if constexpr (F == Format::Q3_K)
      a = _mm256_srai_epi32(widen(rows.offset(0, r)), 3), b = _mm256_srai_epi32(widen(rows.offset(1, r)), 3);
  }
  static HR_ALWAYS __m256i code(__m256i w) { return signed_codes(F) ? _mm256_xor_si256(w, bytes(-128)) : w; }
  // w: what ``code`` gave.
  HR_ALWAYS void add(int step, __m256i w, __m256i act) {
    __m256i& sum = kHalves && step >= 4 ? b : a;
    sum = _mm256_dpbusd_epi32(sum, w, act);
  }
  HR_ALWAYS __m256i total(const Scales<F>& w) const {
    if constexpr (by_sixteen(F)) return _mm256_add_epi32(_mm256_mullo_epi32(a, low(w.sub[0])), _mm256_mullo_epi32(b, low(w.sub[1])));
    if constexpr (is(F, Format::Q4_K, Format::Q5_K)) return _mm256_mullo_epi32(a, low(w.sub[0]));
    return a;
  }
  static HR_ALWAYS __m256i low(__m256i halves) { return _mm256_srai_epi32(halves, 16); }
};
#else
// The exact integer sum of one group, of 8 outputs and one row.
//
// Signed codes: |w| * sign(a, w). A pair sum p nearly fills 16 bit (128 * 127 * 2), so eight of them don't fit. Kept
// are a = their sum modulo 2^16 and b = the sum of p >> 8; then a - 256 * b = sum of (p & 255) < 2048 is exact, and so
// is the total. Cheaper than widening each p: shifts and additions have pipes of their own.
template <Format F>
struct Sum {
  static constexpr bool kHalves = by_sixteen(F) || is(F, Format::Q5_1, Format::Q5_K);
  static constexpr bool kLate = true;
  __m256i a, b;  // 16-bit lanes: the sum, or its first and last 16 codes, or low and high parts

  template <class Rows>
  HR_ALWAYS void start(const Rows& rows, int64_t r) {
    a = b = _mm256_setzero_si256();
    if constexpr (F == Format::Q4_0) a = rows.offset(3, r);
    if constexpr (F == Format::Q5_0) a = rows.offset(2, r);
    if constexpr (is(F, Format::Q3_K, Format::Q6_K)) a = rows.offset(0, r), b = rows.offset(1, r);
    if constexpr (F == Format::Q3_K) a = _mm256_srai_epi16(a, 3), b = _mm256_srai_epi16(b, 3);  // centre 4 = 32 / 8
  }

  // A step's products, which may be taken into the sum later.
  static HR_ALWAYS __m256i product(__m256i w, __m256i act) {
    if constexpr (signed_codes(F)) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(act, w));
    return _mm256_maddubs_epi16(w, act);
  }
  template <bool Fixed>
  HR_ALWAYS void take(int step, __m256i p) {
    if constexpr (signed_codes(F)) {
      a = _mm256_add_epi16(a, p), b = _mm256_add_epi16(b, _mm256_srai_epi16(p, 8));
      keep<Fixed>(a), keep<Fixed>(b);
    } else {
      __m256i& sum = kHalves && step >= 4 ? b : a;
      sum = _mm256_add_epi16(sum, p);
      keep<Fixed>(sum);
    }
  }
  static HR_ALWAYS __m256i code(__m256i w) { return w; }
  HR_ALWAYS void add(int step, __m256i w, __m256i act) { take<false>(step, product(w, act)); }

  HR_ALWAYS __m256i total(const Scales<F>& w) const {
    if constexpr (signed_codes(F)) {
      const __m256i rest = _mm256_sub_epi16(a, _mm256_slli_epi16(b, 8));
      return _mm256_add_epi32(_mm256_madd_epi16(b, _mm256_set1_epi16(256)), widen(rest));
    } else if constexpr (by_sixteen(F)) {
      return _mm256_add_epi32(_mm256_madd_epi16(a, w.sub[0]), _mm256_madd_epi16(b, w.sub[1]));
    } else if constexpr (F == Format::Q5_K) {
      return _mm256_add_epi32(_mm256_madd_epi16(a, w.sub[0]), _mm256_madd_epi16(b, w.sub[0]));
    } else if constexpr (F == Format::Q4_K) {
      return _mm256_madd_epi16(a, w.sub[0]);
    } else if constexpr (kHalves) {
      return _mm256_add_epi32(widen(a), widen(b));
    }
    return widen(a);
  }
};
#endif

// acc + the group's share, by the format's formula (docs/kernels.md).
template <Format F, class Rows>
HR_ALWAYS __m256 add_group(const Scales<F>& w, const Rows& a, int64_t r, __m256i sum, __m256 acc) {
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

// The codes of one group, step by step.
template <Format F>
HR_ALWAYS void spread(const Tile<F>& tile, int64_t g, __m256i* w) {
  const auto put = [&](int s, __m256i codes) { w[s] = Sum<F>::code(codes); };
  quarter<F, 0>(tile.low(g), tile.high(g), put), quarter<F, 1>(tile.low(g), tile.high(g), put);
  quarter<F, 2>(tile.low(g), tile.high(g), put), quarter<F, 3>(tile.low(g), tile.high(g), put);
}

// N rows from row r meet the spread codes of one group. Products are taken a step late: Zen 1 issues the oldest operation
// that is ready, and an addition older than a product may take the multiplier's pipe from it.
template <Format F, int N>
HR_ALWAYS void add_rows(const __m256i* w, const Scales<F>& scales, const GroupRows<false>& a, int64_t r, __m256* acc) {
  Sum<F> sum[N];
  for (int i = 0; i < N; ++i) sum[i].start(a, r + i);
  const int8_t* q = a.codes(r);
  if constexpr (!Sum<F>::kLate) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s)
      for (int i = 0; i < N; ++i) sum[i].add(s, w[s], four(q + 32 * i, s));
  } else {
    __m256i late[N];
#pragma GCC unroll 9
    for (int s = 0; s < 9; ++s) {
      __m256i p[N];
      if (s < 8)
        for (int i = 0; i < N; ++i) p[i] = Sum<F>::product(w[s], four(q + 32 * i, s)), keep<true>(p[i]);
      if (s > 0)
        for (int i = 0; i < N; ++i) sum[i].template take<true>(s - 1, late[i]);
      if (s < 8)
        for (int i = 0; i < N; ++i) late[i] = p[i];
    }
  }
  for (int i = 0; i < N; ++i) acc[i] = add_group<F>(scales, a, r + i, sum[i].total(scales), acc[i]);
}

// One row meets T tiles side by side; codes are spread as they are used.
template <Format F, int T, int I>
HR_ALWAYS void add_quarter(const Tile<F>* tile, int64_t g, const int8_t* q, Sum<F>* sum) {
  for (int t = 0; t < T; ++t)
    quarter<F, I>(tile[t].low(g), tile[t].high(g), [&](int s, __m256i w) { sum[t].add(s, Sum<F>::code(w), four(q, s)); });
}

template <Format F, int T>
HR_ALWAYS void add_single(Tile<F>* tile, int64_t g, int64_t groups, const GroupRows<true>& a, __m256* acc) {
  Sum<F> sum[T];
  for (int t = 0; t < T; ++t) sum[t].start(a, 0);
  const int8_t* q = a.codes(0);
  for (int t = 0; t < T; ++t) tile[t].prefetch(g, groups, T);
  add_quarter<F, T, 0>(tile, g, q, sum), add_quarter<F, T, 1>(tile, g, q, sum);
  add_quarter<F, T, 2>(tile, g, q, sum), add_quarter<F, T, 3>(tile, g, q, sum);
  for (int t = 0; t < T; ++t) {
    Scales<F> scales;
    tile[t].scales(g, scales);
    acc[t] = add_group<F>(scales, a, 0, sum[t].total(scales), acc[t]);
  }
}

}  // namespace
}  // namespace headrace
