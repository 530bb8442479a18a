// Attention of some queries over one chunk of one kv head (AttendTile). Per query, the same arithmetic however many
// queries share the tile (docs/kernels.md, "Attention"):
//   score = sixteen-lane dot of q and k; p = e^(score - max); sum by lane = position mod 16; acc += p v in position order.
#pragma once
#include "kv_impl.h"
#include "ops.h"
#include "vecmath.h"

namespace headrace {
namespace {

constexpr int kDirect = 4;  // up to so many queries, records are widened in registers; beyond, once into a tile

// Where K or V of a position comes from: at(p, i) is elements i .. i + 7.
struct TileRows {
  const float* tile;  // position p0 first
  int stride, p0;
  HR_INLINE_MEMBER v8 at(int p, int i) const { return load(tile + (p - p0) * stride + i); }
};
struct HalfRows {
  const uint8_t* const* record;
  HR_INLINE_MEMBER v8 at(int p, int i) const { return load_half(reinterpret_cast<const uint16_t*>(record[p]) + i); }
};
struct ByteRows {
  const uint8_t* const* record;
  int groups;
  HR_INLINE_MEMBER v8 at(int p, int i) const { return byte_values(record[p], groups, i); }
};
struct NibbleRows {
  const uint8_t* const* record;
  int groups;
  HR_INLINE_MEMBER v8 at(int p, int i) const { return nibble_values(record[p], groups, i); }
};

// Scores of Q queries at positions p .. p + 3, two positions at a time: the 4 Q sums stay in registers.
template <int Q, class Rows>
HR_INLINE void dots2(const float* q, const Rows& k, int stride, int p, v4* folded) {
  v8 lo[Q][2], hi[Q][2];
  for (int i = 0; i < Q; i++) lo[i][0] = lo[i][1] = hi[i][0] = hi[i][1] = splat(0.0f);
  for (int d = 0; d < stride; d += 16) {
    const v8 a = k.at(p, d), b = k.at(p + 1, d);
    for (int i = 0; i < Q; i++) {
      const v8 x = load(q + i * stride + d);
      lo[i][0] = fma(x, a, lo[i][0]);
      lo[i][1] = fma(x, b, lo[i][1]);
    }
    const v8 c = k.at(p, d + 8), e = k.at(p + 1, d + 8);
    for (int i = 0; i < Q; i++) {
      const v8 x = load(q + i * stride + d + 8);
      hi[i][0] = fma(x, c, hi[i][0]);
      hi[i][1] = fma(x, e, hi[i][1]);
    }
  }
  for (int i = 0; i < Q; i++) folded[i] = fold_pair(lo[i][0] + hi[i][0], lo[i][1] + hi[i][1]);
}
template <int Q, class Rows>
HR_INLINE void dots4(const float* q, const Rows& k, int stride, int p, float* scores) {
  v4 ab[Q], cd[Q];
  dots2<Q>(q, k, stride, p, ab);
  dots2<Q>(q, k, stride, p + 2, cd);
  for (int i = 0; i < Q; i++) {
    const v4 s = fold_quad(ab[i], cd[i]);
    __builtin_memcpy(scores + i * kChunk + p, &s, 16);
  }
}

// Scores of one query of 64 dimensions, which stay in registers, at the n positions (a multiple of four) from k on.
HR_INLINE void scores64(const float* q, const float* k, int n, float* scores) {
  v8 x[8];
  for (int j = 0; j < 8; j++) x[j] = load(q + 8 * j);
  const auto dot = [&](int p) {
    v8 lo = splat(0.0f), hi = lo;
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      lo = fma(x[j], load(k + 64 * p + 8 * j), lo);
      hi = fma(x[j + 1], load(k + 64 * p + 8 * j + 8), hi);
    }
    return lo + hi;
  };
  for (int p = 0; p < n; p += 4) {
    const v4 s = fold_quad(fold_pair(dot(p), dot(p + 1)), fold_pair(dot(p + 2), dot(p + 3)));
    __builtin_memcpy(scores + p, &s, 16);
  }
}

// Scores of queries i .. i + Q - 1 within [from, to); a few positions more, up to multiples of four.
template <int Q, class Rows>
static inline void scores_of(const AttendTile& t, const Rows& k, int i, int from, int to) {
  int begin = t.lo[i], end = t.hi[i];
  for (int j = 1; j < Q; j++) {
    begin = t.lo[i + j] < begin ? t.lo[i + j] : begin;
    end = t.hi[i + j] > end ? t.hi[i + j] : end;
  }
  begin = begin > from ? begin : from;
  end = end < to ? end : to;
  if constexpr (std::is_same_v<Rows, TileRows>) {
    begin &= ~3;
    if (t.stride == 64 && begin < end) {
      for (int j = i; j < i + Q; j++)
        scores64(t.q + j * 64, k.tile + (begin - k.p0) * 64, (end - begin + 3) & ~3, t.scores + j * kChunk + begin);
      return;
    }
  }
  for (int p = begin & ~3; p < end; p += 4) dots4<Q>(t.q + i * t.stride, k, t.stride, p, t.scores + i * kChunk);
}

// Positions p .. p + 7 of v within [lo, hi), `other` elsewhere.
HR_INLINE v8 within(v8 v, int p, int lo, int hi, float other) {
  if (p >= lo && p + 8 <= hi) return v;
  const i8v at = iota() + splat_i(p);
  return select((at >= splat_i(lo)) & (at < splat_i(hi)), v, splat(other));
}

// scores -> e^(score - max) in place, zeros around [lo, hi) as far as its blocks of sixteen reach.
HR_INLINE void soften(float* s, int lo, int hi, float softcap, float* top, float* sum) {
  const int first = lo & ~15;
  v8 best = splat(-__builtin_inff());
  for (int p = first; p < hi; p += 8) {
    v8 v = load(s + p);
    if (softcap > 0.0f) {
      v = splat(softcap) * tanh8(v / splat(softcap));
      store(s + p, v);
    }
    best = max(within(v, p, lo, hi, -__builtin_inff()), best);
  }
  const v8 m = splat(max_of(best));
  const auto one = [&](int p) {
    const v8 e = within(exp8(load(s + p) - m), p, lo, hi, 0.0f);
    store(s + p, e);
    return e;
  };
  v8 even = splat(0.0f), odd = even;
  for (int p = first; p < hi; p += 16) {
    even = even + one(p);
    odd = odd + one(p + 8);
  }
  *top = m[0];
  *sum = tree_sum(even, odd);
}

// acc[Q][8 D] += p[Q, begin..end) x v[begin..end), in position order, from dimension d on.
template <int Q, int D, class Rows>
HR_INLINE void values_block(const float* p, const Rows& v, int stride, int begin, int end, int d, float* acc) {
  v8 a[Q][D];
  for (int i = 0; i < Q; i++)
    for (int j = 0; j < D; j++) a[i][j] = load(acc + i * stride + d + 8 * j);
  for (int n = begin; n < end; n++) {
    v8 x[D];
    for (int j = 0; j < D; j++) x[j] = v.at(n, d + 8 * j);
    for (int i = 0; i < Q; i++) {
      const v8 w = splat(p[i * kChunk + n]);
      for (int j = 0; j < D; j++) a[i][j] = fma(w, x[j], a[i][j]);
    }
  }
  for (int i = 0; i < Q; i++)
    for (int j = 0; j < D; j++) store(acc + i * stride + d + 8 * j, a[i][j]);
}
template <int Q, class Rows>
static inline void values_range(const AttendTile& t, const Rows& v, int i, int begin, int end) {
  if (begin >= end) return;
  constexpr int D = Q > 3 ? 2 : 4;
  const float* p = t.scores + i * kChunk;
  float* acc = t.acc + i * t.stride;
  int d = 0;
  for (; d + 8 * D <= t.stride; d += 8 * D) values_block<Q, D>(p, v, t.stride, begin, end, d, acc);
  if (d < t.stride) values_block<Q, 2>(p, v, t.stride, begin, end, d, acc);
}

// A block of queries shares the positions all of it sees; each takes its own before and after by itself, in order.
template <int Q, class Rows>
static inline void values_of(const AttendTile& t, const Rows& v, int i, int from, int to) {
  const auto own = [&](int j, int a, int b) {
    values_range<1>(t, v, j, a > t.lo[j] ? a : t.lo[j], b < t.hi[j] ? b : t.hi[j]);
  };
  int begin = from, end = to;
  for (int j = i; j < i + Q; j++) {
    begin = t.lo[j] > begin ? t.lo[j] : begin;
    end = t.hi[j] < end ? t.hi[j] : end;
  }
  if (end < begin) begin = end = to;
  if (Q > 1)
    for (int j = i; j < i + Q; j++) own(j, from, begin);
  values_range<Q>(t, v, i, begin, end);
  if (Q > 1)
    for (int j = i; j < i + Q; j++) own(j, end, to);
}

struct Span {
  int first, last;
};
HR_INLINE Span span_of(const AttendTile& t) {
  Span s{t.lo[0], t.hi[0]};
  for (int i = 1; i < t.queries; i++) {
    s.first = t.lo[i] < s.first ? t.lo[i] : s.first;
    s.last = t.hi[i] > s.last ? t.hi[i] : s.last;
  }
  return s;
}

// Calls f(block size as a constant, first query) over all queries.
template <class F>
HR_INLINE void by_blocks(int queries, F f) {
  int i = 0;
  if (queries == kDirect) return f(std::integral_constant<int, kDirect>(), 0);
  for (; i + 3 <= queries; i += 3) f(std::integral_constant<int, 3>(), i);
  if (queries - i == 2) f(std::integral_constant<int, 2>(), i);
  if (queries - i == 1) f(std::integral_constant<int, 1>(), i);
}

void soften_all(const AttendTile& t) {
  for (int i = 0; i < t.queries; i++) soften(t.scores + i * kChunk, t.lo[i], t.hi[i], t.softcap, t.max + i, t.sum + i);
  std::memset(t.acc, 0, sizeof(float) * static_cast<size_t>(t.queries) * static_cast<size_t>(t.stride));
}

// f gets the records' reader for a storage width.
template <class F>
HR_INLINE void with_records(int bits, const uint8_t* const* records, int head_dim, F f) {
  const int groups = (head_dim + 31) / 32;
  if (bits == 16) f(HalfRows{records});
  else if (bits == 8) f(ByteRows{records, groups});
  else f(NibbleRows{records, groups});
}

void attend_few(const AttendTile& t) {
  with_records(t.k_bits, t.k, t.head_dim, [&](const auto& k) {
    by_blocks(t.queries, [&](auto n, int i) { scores_of<decltype(n)::value>(t, k, i, 0, kChunk); });
  });
  if (t.stage == AttendTile::Scores) return;
  soften_all(t);
  with_records(t.v_bits, t.v, t.head_dim, [&](const auto& v) {
    by_blocks(t.queries, [&](auto n, int i) { values_of<decltype(n)::value>(t, v, i, 0, kChunk); });
  });
}

void attend_many(const AttendTile& t) {
  const Span s = span_of(t);
  if (t.head_dim != t.stride) std::memset(t.tile, 0, sizeof(float) * static_cast<size_t>(kPage * t.stride));
  const auto pieces = [&](int bits, const uint8_t* const* records, auto f) {
    for (int p0 = s.first / kPage * kPage; p0 < s.last; p0 += kPage) {
      const int begin = s.first > p0 ? s.first : p0, end = s.last < p0 + kPage ? s.last : p0 + kPage;
      for (int p = begin; p < end; p++) load_record_impl(bits, records[p], t.head_dim, t.tile + (p - p0) * t.stride);
      const TileRows rows{t.tile, t.stride, p0};
      by_blocks(t.queries, [&](auto n, int i) { f(n, i, rows, p0); });
    }
  };
  pieces(t.k_bits, t.k, [&](auto n, int i, const TileRows& k, int p0) {
    scores_of<decltype(n)::value>(t, k, i, p0, p0 + kPage);
  });
  if (t.stage == AttendTile::Scores) return;
  soften_all(t);
  pieces(t.v_bits, t.v, [&](auto n, int i, const TileRows& v, int p0) {
    values_of<decltype(n)::value>(t, v, i, p0, p0 + kPage);
  });
}

// sum and acc of the chosen positions alone; max is of all.
void attend_chosen(const AttendTile& t) {
  bool chosen[kChunk];
  std::memset(t.tile, 0, sizeof(float) * static_cast<size_t>(t.stride));
  for (int i = 0; i < t.queries; i++) {
    float *p = t.scores + i * kChunk, *acc = t.acc + i * t.stride;
    for (int n = t.lo[i]; n < t.hi[i]; n++) chosen[n] = p[n] >= t.floor[i] || n == t.own[i];
    soften(p, t.lo[i], t.hi[i], t.softcap, t.max + i, t.sum + i);
    const bool finite = t.sum[i] - t.sum[i] == 0.0f;
    std::memset(acc, 0, sizeof(float) * static_cast<size_t>(t.stride));
    for (int n = t.lo[i]; n < t.hi[i]; n++) {
      if (!chosen[n]) {
        p[n] = 0.0f;
        continue;
      }
      load_record_impl(t.v_bits, t.v[n], t.head_dim, t.tile);
      const v8 w = splat(p[n]);
      for (int d = 0; d < t.stride; d += 8) store(acc + d, fma(w, load(t.tile + d), load(acc + d)));
    }
    v8 lanes[2] = {splat(0.0f), splat(0.0f)};
    for (int n = t.lo[i] & ~7; n < t.hi[i]; n += 8) lanes[n >> 3 & 1] = lanes[n >> 3 & 1] + load(p + n);
    if (finite) t.sum[i] = tree_sum(lanes[0], lanes[1]);
  }
}

void attend_impl(const AttendTile& t) {
  if (t.stage == AttendTile::Values) return attend_chosen(t);
  if (t.queries <= kDirect && t.head_dim == t.stride) attend_few(t);
  else attend_many(t);
}

}  // namespace
}  // namespace headrace
