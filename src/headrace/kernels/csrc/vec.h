// Eight floats at a time, with one meaning on every path: where AVX2 is on, its instructions; elsewhere the compiler's
// generic vectors and fmaf (correctly rounded by definition). Everything has internal linkage, because this header is
// compiled once per instruction set and the linker must never mix the copies.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define HR_INLINE static inline __attribute__((always_inline, unused))
#define HR_INLINE_MEMBER inline __attribute__((always_inline))

namespace headrace {
namespace {

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8v __attribute__((vector_size(32)));

HR_INLINE v8 load(const float* p) { v8 v; __builtin_memcpy(&v, p, 32); return v; }
HR_INLINE void store(float* p, v8 v) { __builtin_memcpy(p, &v, 32); }
HR_INLINE v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }
HR_INLINE i8v splat_i(int32_t x) { return i8v{x, x, x, x, x, x, x, x}; }
HR_INLINE i8v bits_of(v8 v) { i8v i; __builtin_memcpy(&i, &v, 32); return i; }
HR_INLINE v8 from_bits(i8v i) { v8 v; __builtin_memcpy(&v, &i, 32); return v; }
HR_INLINE i8v iota() { return i8v{0, 1, 2, 3, 4, 5, 6, 7}; }

// a * b + c with one rounding.
HR_INLINE v8 fma(v8 a, v8 b, v8 c) {
#if defined(__FMA__)
  return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  v8 r;
  for (int i = 0; i < 8; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

// a > b ? a : b and a < b ? a : b: the second operand when either is NaN, as in SSE.
HR_INLINE v8 max(v8 a, v8 b) {
#if defined(__AVX2__)
  return (v8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
HR_INLINE v8 min(v8 a, v8 b) {
#if defined(__AVX2__)
  return (v8)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
HR_INLINE v8 select(i8v mask, v8 yes, v8 no) { return mask ? yes : no; }
HR_INLINE v8 abs(v8 x) { return from_bits(bits_of(x) & splat_i(0x7fffffff)); }
HR_INLINE v8 with_sign_of(v8 magnitude, v8 sign) {
  return from_bits(bits_of(magnitude) | (bits_of(sign) & splat_i(INT32_MIN)));
}

// Adding 1.5 * 2^23 rounds to the nearest integer (ties to even) for |x| < 2^22, in the low bits of the sum.
constexpr float kRound = 12582912.0f;
HR_INLINE v8 rounded(v8 x) { return (x + splat(kRound)) - splat(kRound); }
HR_INLINE i8v rounded_to_int(v8 x) { return bits_of(x + splat(kRound)) - splat_i(0x4b400000); }

// The first n (1..7) values, zeros after them; and the way back.
HR_INLINE v8 load_part(const float* p, int n) {
  v8 v = splat(0.0f);
  __builtin_memcpy(&v, p, sizeof(float) * static_cast<size_t>(n));
  return v;
}
HR_INLINE void store_part(float* p, v8 v, int n) { __builtin_memcpy(p, &v, sizeof(float) * static_cast<size_t>(n)); }

// The one tree: sixteen lanes (lo: 0..7, hi: 8..15) fold by 8, 4, 2, 1.
HR_INLINE float tree_sum(v8 lo, v8 hi) {
  v8 s = lo + hi;
#if defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)s), _mm256_extractf128_ps((__m256)s, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
#else
  float a = s[0] + s[4], b = s[1] + s[5], c = s[2] + s[6], d = s[3] + s[7];
  return (a + c) + (b + d);
#endif
}

// Four such trees side by side, in two steps, a to d being lo + hi. Step one leaves two values of each of two trees.
typedef float v4 __attribute__((vector_size(16)));
HR_INLINE v4 fold_pair(v8 a, v8 b) {
#if defined(__AVX2__)
  const auto fold = [](v8 s) { return _mm_add_ps(_mm256_castps256_ps128((__m256)s), _mm256_extractf128_ps((__m256)s, 1)); };
  const __m128 x = fold(a), y = fold(b);
  return (v4)_mm_add_ps(_mm_movelh_ps(x, y), _mm_movehl_ps(y, x));
#else
  return v4{(a[0] + a[4]) + (a[2] + a[6]), (a[1] + a[5]) + (a[3] + a[7]),
            (b[0] + b[4]) + (b[2] + b[6]), (b[1] + b[5]) + (b[3] + b[7])};
#endif
}
HR_INLINE v4 fold_quad(v4 ab, v4 cd) {
#if defined(__AVX2__)
  return (v4)_mm_add_ps(_mm_shuffle_ps((__m128)ab, (__m128)cd, 0x88), _mm_shuffle_ps((__m128)ab, (__m128)cd, 0xdd));
#else
  return v4{ab[0] + ab[1], ab[2] + ab[3], cd[0] + cd[1], cd[2] + cd[3]};
#endif
}

HR_INLINE float max_of(v8 v) {
  float m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// IEEE half <-> single, round to nearest even; the same as F16C for every input that isn't a NaN.
HR_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
  uint32_t u;
  if (magnitude >= 0x7c00) {
    u = 0x7f800000u | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x0400) {
    u = (magnitude << 13) + 0x38000000u;
  } else {
    const float f = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24, exact
    std::memcpy(&u, &f, 4);
  }
  u |= sign;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}
HR_INLINE uint16_t float_to_half(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, 0);
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000u) return sign | 0x7e00;
  if (u >= 0x477ff000u) return sign | 0x7c00;  // 65520 and up round to infinity
  if (u < 0x38800000u) {                       // below 2^-14: adding 0.5 leaves the half's bits in the last places
    float a;
    std::memcpy(&a, &u, 4);
    a += 0.5f;
    std::memcpy(&u, &a, 4);
    return sign | static_cast<uint16_t>(u - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((u + 0xfff + (u >> 13 & 1) - 0x38000000u) >> 13);
#endif
}
HR_INLINE v8 load_half(const uint16_t* p) {
#if defined(__F16C__)
  return (v8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  v8 v;
  for (int i = 0; i < 8; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

}  // namespace
}  // namespace headrace
