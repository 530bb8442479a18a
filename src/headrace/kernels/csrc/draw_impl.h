// The sampler's loops over a vocabulary (sample.cpp), included once per instruction set.
#pragma once
#include "ops.h"
#include "scalar_math.h"
#include "vec.h"

namespace headrace {
namespace {

typedef uint32_t u8v __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
typedef int64_t l4 __attribute__((vector_size(32)));

// Both halves of eight 32-bit products.
HR_INLINE void multiply(u8v a, uint32_t m, u8v& high, u8v& low) {
#if defined(__AVX2__)
  const __m256i x = (__m256i)a, y = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  low = (u8v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = (u8v)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  for (int i = 0; i < 8; i++) {
    const uint64_t p = static_cast<uint64_t>(a[i]) * m;
    high[i] = static_cast<uint32_t>(p >> 32), low[i] = static_cast<uint32_t>(p);
  }
#endif
}

// sample.cpp, philox(), for eight counters (first + 0 .. 7, choice, position, 0).
HR_INLINE void philox8(uint32_t first, const NoiseKey& n, u8v out[4]) {
  const u8v zero = {0, 0, 0, 0, 0, 0, 0, 0};
  u8v c0 = (u8v)iota() + first, c1 = zero + n.choice, c2 = zero + n.position, c3 = zero, h0, l0, h1, l1;
  uint32_t k0 = static_cast<uint32_t>(n.seed), k1 = static_cast<uint32_t>(n.seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    multiply(c0, 0xD2511F53u, h0, l0);
    multiply(c2, 0xCD9E8D57u, h1, l1);
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

void noise_impl(uint32_t first, const NoiseKey& key, uint32_t* bits) {
  u8v words[4];
  philox8(first, key, words);
  for (int w = 0; w < 4; w++)
    for (int b = 0; b < 8; b++) bits[4 * b + w] = words[w][b];
}

// round(2^40 e^x) for -28 <= x <= 0, 0 below; exp64's operations, four at a time.
HR_INLINE l4 weights4(d4 v, const double* inverse) {
  constexpr double round52 = 6755399441055744.0, two52 = 4503599627370496.0;
  const l4 kept = v >= -28.0;
  v = kept ? v : d4{-28.0, -28.0, -28.0, -28.0};
  const d4 t = v * 1.4426950408889634 + round52, m = t - round52;
  const d4 r = (v - m * 6.93147180369123816490e-01) - m * 1.90821492927058770002e-10;
  d4 s = {inverse[13], inverse[13], inverse[13], inverse[13]};
  for (int k = 12; k >= 0; k--) s = s * r + inverse[k];
  l4 exponent;
  __builtin_memcpy(&exponent, &t, 32);
  exponent = (exponent + (1023 - 0x4338000000000000)) << 52;
  d4 scale;
  __builtin_memcpy(&scale, &exponent, 32);
  const d4 sum = (s * scale) * 1099511627776.0 + two52;
  l4 whole;
  __builtin_memcpy(&whole, &sum, 32);
  return whole & 0xfffffffffffff & kept;
}

void weights_impl(const double* x, int64_t n, uint64_t* w) {
  double inverse[14] = {1.0, 1.0}, factorial = 1.0;
  for (int k = 2; k < 14; k++) factorial *= k, inverse[k] = 1.0 / factorial;
  d4 v = {0.0, 0.0, 0.0, 0.0};
  l4 out;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    __builtin_memcpy(&v, x + i, 32);
    out = weights4(v, inverse);
    __builtin_memcpy(w + i, &out, 32);
  }
  if (i == n) return;
  __builtin_memcpy(&v, x + i, static_cast<size_t>(n - i) * 8);
  out = weights4(v, inverse);
  __builtin_memcpy(w + i, &out, static_cast<size_t>(n - i) * 8);
}

// The largest of each 64 values; the last block may be short.
void block_max_impl(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 64) {
    v8 top = splat(-__builtin_inff());
    for (int64_t j = i; j < i + 64 && j < n; j += 8) {
      v8 v = j + 8 <= n ? load(x + j) : load_part(x + j, static_cast<int>(n - j));
      if (j + 8 > n) v = select(iota() < splat_i(static_cast<int>(n - j)), v, splat(-__builtin_inff()));
      top = max(v, top);
    }
    out[i / 64] = max_of(top);
  }
}

}  // namespace
}  // namespace headrace
