// The bodies of VecOps, included once per instruction set (ops_portable.cpp, avx2/ops.cpp).
#pragma once
#include "draw_impl.h"
#include "kv_impl.h"
#include "ops.h"
#include "vecmath.h"

namespace headrace {
namespace {

// Calls f(offset, count) over n values in eights; count < 8 at the end.
template <class F>
HR_INLINE void by_eights(int64_t n, F f) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) f(i, 8);
  if (i < n) f(i, static_cast<int>(n - i));
}
HR_INLINE v8 load_n(const float* p, int n) { return n == 8 ? load(p) : load_part(p, n); }
HR_INLINE void store_n(float* p, v8 v, int n) { n == 8 ? store(p, v) : store_part(p, v, n); }

// Sum over sixteen lanes of f(offset, count), which adds its part to the lane's accumulator.
template <class F>
HR_INLINE float lane_sum(int64_t n, F f) {
  v8 lo = splat(0.0f), hi = lo;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    lo = f(i, 8, lo);
    hi = f(i + 8, 8, hi);
  }
  if (i < n) lo = f(i, static_cast<int>(n - i < 8 ? n - i : 8), lo);
  if (i + 8 < n) hi = f(i + 8, static_cast<int>(n - i - 8), hi);
  return tree_sum(lo, hi);
}

void norm_impl(const float* x, float* y, int64_t n, const float* w, const float* b, float eps, bool layer) {
  const float count = static_cast<float>(n);
  float mean = 0.0f;
  if (layer) mean = lane_sum(n, [&](int64_t i, int m, v8 acc) { return acc + load_n(x + i, m); }) / count;
  const v8 shift = splat(mean);
  const float squares = lane_sum(n, [&](int64_t i, int m, v8 acc) {
    v8 d = load_n(x + i, m) - shift;
    if (m < 8) d = select(iota() < splat_i(m), d, splat(0.0f));
    return fma(d, d, acc);
  });
  const v8 inverse = splat(1.0f / __builtin_sqrtf(squares / count + eps));
  by_eights(n, [&](int64_t i, int m) {
    const v8 d = (load_n(x + i, m) - shift) * inverse;
    store_n(y + i, b ? fma(d, load_n(w + i, m), load_n(b + i, m)) : d * load_n(w + i, m), m);
  });
}

template <class F>
HR_INLINE void map_with(const float* x, const float* up, float* y, int64_t n, F f) {
  if (up)
    by_eights(n, [&](int64_t i, int m) { store_n(y + i, f(load_n(x + i, m)) * load_n(up + i, m), m); });
  else
    by_eights(n, [&](int64_t i, int m) { store_n(y + i, f(load_n(x + i, m)), m); });
}

void activate_impl(Activation kind, const float* x, const float* up, float* y, int64_t n) {
  switch (kind) {
    case Activation::Silu: return map_with(x, up, y, n, [](v8 v) { return times_sigmoid(v, v); });
    case Activation::GeluTanh: return map_with(x, up, y, n, gelu_tanh8);
    case Activation::GeluErf: return map_with(x, up, y, n, gelu_erf8);
    case Activation::Relu: return map_with(x, up, y, n, relu8);
  }
}

void add_impl(float* y, const float* x, int64_t n) {
  by_eights(n, [&](int64_t i, int m) { store_n(y + i, load_n(y + i, m) + load_n(x + i, m), m); });
}

void scale_impl(float* y, int64_t n, float factor, float softcap) {
  const v8 f = splat(factor), c = splat(softcap);
  by_eights(n, [&](int64_t i, int m) {
    v8 v = load_n(y + i, m) * f;
    if (softcap > 0.0f) v = c * tanh8(v / c);
    store_n(y + i, v, m);
  });
}

void scaled_copy_impl(float* y, const float* x, float s, int64_t n, bool accumulate) {
  const v8 f = splat(s);
  by_eights(n, [&](int64_t i, int m) {
    const v8 v = load_n(x + i, m);
    store_n(y + i, accumulate ? fma(f, v, load_n(y + i, m)) : f * v, m);
  });
}

// (a, b) -> (a cos - b sin, b cos + a sin), each as one product and one fma.
void rope_impl(float* x, int heads, int head_dim, const float* cos_sin, int n, bool interleaved) {
  const float* sines = cos_sin + n;
  for (int h = 0; h < heads; h++, x += head_dim) {
    if (!interleaved) {
      by_eights(n, [&](int64_t i, int m) {
        const v8 a = load_n(x + i, m), b = load_n(x + n + i, m), c = load_n(cos_sin + i, m), s = load_n(sines + i, m);
        store_n(x + i, fma(a, c, -(b * s)), m);
        store_n(x + n + i, fma(b, c, a * s), m);
      });
    } else {
      for (int i = 0; i < n; i++) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos_sin[i], s = sines[i];
        x[2 * i] = __builtin_fmaf(a, c, -(b * s));
        x[2 * i + 1] = __builtin_fmaf(b, c, a * s);
      }
    }
  }
}

void fold_impl(float* max, float* sum, float* acc, float max2, float sum2, const float* acc2, int stride) {
  const float top = max2 > *max ? max2 : *max;
  const v8 e = exp8(v8{*max - top, max2 - top, 0, 0, 0, 0, 0, 0});
  const float a = e[0], b = e[1];
  *max = top;
  *sum = __builtin_fmaf(b, sum2, a * *sum);
  for (int i = 0; i < stride; i += 8) store(acc + i, fma(splat(b), load(acc2 + i), splat(a) * load(acc + i)));
}

void math_impl(int which, const float* x, float* y, int64_t n) {
  map_with(x, nullptr, y, n, [&](v8 v) { return which == 0 ? exp8(v) : which == 1 ? tanh8(v) : erf8(v); });
}

bool scan_impl(const float* x, int64_t n, float* top, int64_t* index) {
  v8 m = splat(-__builtin_inff());
  i8v odd = splat_i(0);
  by_eights(n, [&](int64_t i, int count) {
    v8 v = load_n(x + i, count);
    odd |= (bits_of(v) & splat_i(0x7f800000)) == splat_i(0x7f800000);
    if (count < 8) v = select(iota() < splat_i(count), v, splat(-__builtin_inff()));
    m = max(v, m);
  });
  for (int i = 0; i < 8; i++)
    if (odd[i]) return false;
  *top = max_of(m);
  const v8 wanted = splat(*top);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const i8v equal = load(x + i) == wanted;
    l4 any;
    __builtin_memcpy(&any, &equal, 32);
    if (any[0] | any[1] | any[2] | any[3]) break;
  }
  while (x[i] != *top) i++;
  *index = i;
  return true;
}

uint32_t read_impl(const uint8_t* p, int64_t bytes) {
  i8v a = splat_i(0), b = a, c = a, d = a;
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    // One by one: GCC copies all four at once with `rep movs`, a fifth as fast on some processors.
    const auto part = [&](int at) { return bits_of(load(reinterpret_cast<const float*>(p + i + 32 * at))); };
    a ^= part(0);
    b ^= part(1);
    c ^= part(2);
    d ^= part(3);
  }
  a ^= b ^ c ^ d;
  uint32_t sum = 0;
  for (int i = 0; i < 8; i++) sum ^= static_cast<uint32_t>(a[i]);
  return sum;
}

}  // namespace
}  // namespace headrace
