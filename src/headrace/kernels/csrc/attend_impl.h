// Attention of some queries over one chunk of one kv head (AttendTile). Per query, the same arithmetic however many
// queries share the tile (docs/kernels.md, "Attention"):
//   score = sixteen-lane dot of q and k; p = e^(score - max); sum by lane = position mod 16; acc += p v in position order.
#pragma once
#include "kv_impl.h"
#include "ops.h"
#include "vecmath.h"

namespace headrace {
namespace {

constexpr int kVertical = 6;  // from so many queries on, a transposed K tile pays

HR_INLINE void transpose8(const float* src, int stride, float* dst, int pitch) {
#if defined(__AVX2__)
  __m256 r[8], t[8];
  for (int i = 0; i < 4; i++) {  // halves of rows i and i + 4 side by side
    const float *a = src + i * stride, *b = src + (i + 4) * stride;
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
    r[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a + 4)), _mm_loadu_ps(b + 4), 1);
  }
  for (int h = 0; h < 8; h += 4) {
    t[0] = _mm256_unpacklo_ps(r[h], r[h + 1]);
    t[1] = _mm256_unpackhi_ps(r[h], r[h + 1]);
    t[2] = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
    t[3] = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
    _mm256_storeu_ps(dst + (h + 0) * pitch, _mm256_shuffle_ps(t[0], t[2], 0x44));
    _mm256_storeu_ps(dst + (h + 1) * pitch, _mm256_shuffle_ps(t[0], t[2], 0xee));
    _mm256_storeu_ps(dst + (h + 2) * pitch, _mm256_shuffle_ps(t[1], t[3], 0x44));
    _mm256_storeu_ps(dst + (h + 3) * pitch, _mm256_shuffle_ps(t[1], t[3], 0xee));
  }
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) dst[j * pitch + i] = src[i * stride + j];
#endif
}

// Four scores of one query: positions p..p+3 of a natural tile [kPage, stride].
HR_INLINE void dots4(const float* q, const float* k, int stride, float* out) {
  v8 lo[4], hi[4];
  for (int j = 0; j < 4; j++) lo[j] = hi[j] = splat(0.0f);
  for (int i = 0; i < stride; i += 16) {
    const v8 a = load(q + i), b = load(q + i + 8);
    for (int j = 0; j < 4; j++) {
      lo[j] = fma(a, load(k + j * stride + i), lo[j]);
      hi[j] = fma(b, load(k + j * stride + i + 8), hi[j]);
    }
  }
  tree_sum4(lo[0] + hi[0], lo[1] + hi[1], lo[2] + hi[2], lo[3] + hi[3], out);
}

// A block of Q queries by sixteen positions on a transposed tile [stride, kPage]: lanes are positions here, so the
// tree of the sixteen virtual lanes is walked depth first, one chain (elements j, j + 16, ...) at a time.
template <int Q>
struct Block {
  v8 v[Q][2];
};
template <int Q>
HR_INLINE Block<Q> lane_chain(const float* q, const float* k, int stride, int lane) {
  Block<Q> s;
  for (int i = 0; i < Q; i++) s.v[i][0] = s.v[i][1] = splat(0.0f);
  for (int d = lane; d < stride; d += 16) {
    const v8 a = load(k + d * kPage), b = load(k + d * kPage + 8);
    for (int i = 0; i < Q; i++) {
      const v8 x = splat(q[i * stride + d]);
      s.v[i][0] = fma(x, a, s.v[i][0]);
      s.v[i][1] = fma(x, b, s.v[i][1]);
    }
  }
  return s;
}
template <int Q, int Step>
HR_INLINE Block<Q> lane_tree(const float* q, const float* k, int stride, int lane) {
  if constexpr (Step == 16) {
    return lane_chain<Q>(q, k, stride, lane);
  } else {
    Block<Q> s = lane_tree<Q, Step * 2>(q, k, stride, lane);
    const Block<Q> t = lane_tree<Q, Step * 2>(q, k, stride, lane + Step);
    for (int i = 0; i < Q; i++) {
      s.v[i][0] = s.v[i][0] + t.v[i][0];
      s.v[i][1] = s.v[i][1] + t.v[i][1];
    }
    return s;
  }
}
template <int Q>
static inline void scores_block(const float* q, const float* k, int stride, float* scores) {
  const Block<Q> s = lane_tree<Q, 1>(q, k, stride, 0);
  for (int i = 0; i < Q; i++) {
    store(scores + i * kChunk, s.v[i][0]);
    store(scores + i * kChunk + 8, s.v[i][1]);
  }
}

// Scores of every query against the page-sized piece [p0, p0 + kPage) of the chunk.
void scores_of_piece(const AttendTile& t, int p0, const float* natural, float* transposed) {
  if (t.queries < kVertical) {
    for (int i = 0; i < t.queries; i++) {
      const int end = t.hi[i] < p0 + kPage ? t.hi[i] : p0 + kPage;
      const int begin = t.lo[i] > p0 ? (t.lo[i] - p0) & ~3 : 0;
      for (int p = begin; p < end - p0; p += 4)
        dots4(t.q + i * t.stride, natural + p * t.stride, t.stride, t.scores + i * kChunk + p0 + p);
    }
    return;
  }
  for (int p = 0; p < kPage; p += 8)
    for (int d = 0; d < t.stride; d += 8) transpose8(natural + p * t.stride + d, t.stride, transposed + d * kPage + p, kPage);
  for (int p = 0; p < kPage; p += 16) {
    int i = 0;
    for (; i + 4 <= t.queries; i += 4)
      scores_block<4>(t.q + i * t.stride, transposed + p, t.stride, t.scores + i * kChunk + p0 + p);
    for (; i < t.queries; i++)
      scores_block<1>(t.q + i * t.stride, transposed + p, t.stride, t.scores + i * kChunk + p0 + p);
  }
}

// scores -> e^(score - max) in place, zeros around [lo, hi) as far as its blocks of eight reach.
HR_INLINE void soften(float* s, int lo, int hi, float softcap, float* top, float* sum) {
  const int first = lo & ~7;
  v8 best = splat(-__builtin_inff());
  for (int p = first; p < hi; p += 8) {
    v8 v = load(s + p);
    if (softcap > 0.0f) v = splat(softcap) * tanh8(v / splat(softcap));
    const i8v at = iota() + splat_i(p);
    v = select((at >= splat_i(lo)) & (at < splat_i(hi)), v, splat(-__builtin_inff()));
    store(s + p, v);
    best = max(v, best);
  }
  const v8 m = splat(max_of(best));
  v8 lanes[2] = {splat(0.0f), splat(0.0f)};
  for (int p = first; p < hi; p += 8) {
    const v8 v = load(s + p), e = exp8(v - m);
    const i8v at = iota() + splat_i(p);
    const v8 kept = select((at >= splat_i(lo)) & (at < splat_i(hi)), e, splat(0.0f));
    store(s + p, kept);
    lanes[p >> 3 & 1] = lanes[p >> 3 & 1] + kept;
  }
  *top = m[0];
  *sum = tree_sum(lanes[0], lanes[1]);
}

// acc[Q, stride] += p[Q, begin..end) x v, in position order. v: natural piece, row `begin` first.
template <int Q, int D>
HR_INLINE void values_block(const float* p, const float* v, int stride, int count, float* acc) {
  v8 a[Q][D];
  for (int i = 0; i < Q; i++)
    for (int d = 0; d < D; d++) a[i][d] = load(acc + i * stride + 8 * d);
  for (int n = 0; n < count; n++, v += stride) {
    v8 x[D];
    for (int d = 0; d < D; d++) x[d] = load(v + 8 * d);
    for (int i = 0; i < Q; i++) {
      const v8 w = splat(p[i * kChunk + n]);
      for (int d = 0; d < D; d++) a[i][d] = fma(w, x[d], a[i][d]);
    }
  }
  for (int i = 0; i < Q; i++)
    for (int d = 0; d < D; d++) store(acc + i * stride + 8 * d, a[i][d]);
}
template <int Q>
static inline void values_range(const AttendTile& t, int i, int begin, int end, int p0, const float* v) {
  if (begin >= end) return;
  const float* p = t.scores + i * kChunk + begin;
  const float* rows = v + (begin - p0) * t.stride;
  float* acc = t.acc + i * t.stride;
  int d = 0;
  for (; d + 32 <= t.stride; d += 32) values_block<Q, 4>(p, rows + d, t.stride, end - begin, acc + d);
  if (d < t.stride) values_block<Q, 2>(p, rows + d, t.stride, end - begin, acc + d);
}

// A block of queries shares the positions all of it sees; each takes its own before and after by itself, in order.
template <int Q>
static inline void values_of(const AttendTile& t, int i, int p0, const float* v) {
  int begin = p0, end = p0 + kPage;
  for (int j = 0; j < Q; j++) {
    begin = t.lo[i + j] > begin ? t.lo[i + j] : begin;
    end = t.hi[i + j] < end ? t.hi[i + j] : end;
  }
  if (end < begin) end = begin;
  const auto own = [&](int j, int from, int to) {
    from = from > t.lo[j] ? from : t.lo[j];
    to = to < t.hi[j] ? to : t.hi[j];
    values_range<1>(t, j, from, to, p0, v);
  };
  if (begin < end || Q == 1) {
    if (Q > 1)
      for (int j = i; j < i + Q; j++) own(j, p0, begin);
    values_range<Q>(t, i, begin, end, p0, v);
    if (Q > 1)
      for (int j = i; j < i + Q; j++) own(j, end, p0 + kPage);
  } else {
    for (int j = i; j < i + Q; j++) own(j, p0, p0 + kPage);
  }
}

void attend_impl(const AttendTile& t) {
  int first = t.lo[0], last = t.hi[0];
  for (int i = 1; i < t.queries; i++) {
    first = t.lo[i] < first ? t.lo[i] : first;
    last = t.hi[i] > last ? t.hi[i] : last;
  }
  float* natural = t.tile;
  float* transposed = t.tile + kPage * t.stride;
  if (t.head_dim != t.stride) std::memset(natural, 0, sizeof(float) * static_cast<size_t>(kPage * t.stride));
  for (int p0 = first / kPage * kPage; p0 < last; p0 += kPage) {
    const int begin = first > p0 ? first : p0, end = last < p0 + kPage ? last : p0 + kPage;
    for (int p = begin; p < end; p++) load_record_impl(t.k_bits, t.k[p], t.head_dim, natural + (p - p0) * t.stride);
    scores_of_piece(t, p0, natural, transposed);
  }
  for (int i = 0; i < t.queries; i++) soften(t.scores + i * kChunk, t.lo[i], t.hi[i], t.softcap, t.max + i, t.sum + i);
  std::memset(t.acc, 0, sizeof(float) * static_cast<size_t>(t.queries) * static_cast<size_t>(t.stride));
  for (int p0 = first / kPage * kPage; p0 < last; p0 += kPage) {
    const int begin = first > p0 ? first : p0, end = last < p0 + kPage ? last : p0 + kPage;
    for (int p = begin; p < end; p++) load_record_impl(t.v_bits, t.v[p], t.head_dim, natural + (p - p0) * t.stride);
    int i = 0;
    for (; i + 3 <= t.queries; i += 3) values_of<3>(t, i, p0, natural);
    for (; i < t.queries; i++) values_of<1>(t, i, p0, natural);
  }
}

}  // namespace
}  // namespace headrace
