// K and V in their slots: one record a (head, slot); the formats are in ops.h (record_bytes) and docs/kernels.md.
#pragma once
#include "ops.h"
#include "vec.h"

namespace headrace {
namespace {

// Largest magnitude as bits, so that a NaN or an infinity wins and reaches the scale.
HR_INLINE float largest(const float* x, int n) {
  i8v top = splat_i(0);
  for (int i = 0; i < n; i += 8) {
    const v8 v = i + 8 <= n ? load(x + i) : load_part(x + i, n - i);
    const i8v a = bits_of(abs(v));
    top = a > top ? a : top;
  }
  int32_t best = 0;
  for (int i = 0; i < 8; i++) best = top[i] > best ? top[i] : best;
  float f;
  std::memcpy(&f, &best, 4);
  return f;
}

HR_INLINE void store_half_record(const float* x, int n, uint8_t* record) {
  for (int i = 0; i < n; i++) {
    const float limit = 65504.0f;  // saturate; a NaN stays one
    float v = x[i] > limit ? limit : x[i];
    v = v < -limit ? -limit : v;
    const uint16_t h = float_to_half(v);
    std::memcpy(record + 2 * i, &h, 2);
  }
}

HR_INLINE void store_byte_record(const float* x, int n, uint8_t* record) {
  const int groups = (n + 31) / 32;
  int8_t* q = reinterpret_cast<int8_t*>(record + 2 * groups);
  for (int g = 0; g < groups; g++) {
    const int m = n - 32 * g < 32 ? n - 32 * g : 32;
    const uint16_t h = float_to_half(largest(x + 32 * g, m) / 127.0f);
    std::memcpy(record + 2 * g, &h, 2);
    const float d = half_to_float(h), inverse = d > 0.0f ? 1.0f / d : 0.0f;
    for (int i = 0; i < 32; i += 8) {
      const v8 v = i + 8 <= m ? load(x + 32 * g + i) : i < m ? load_part(x + 32 * g + i, m - i) : splat(0.0f);
      const i8v r = rounded_to_int(min(splat(127.0f), max(splat(-127.0f), v * splat(inverse))));
      for (int j = 0; j < 8; j++) q[32 * g + i + j] = static_cast<int8_t>(r[j]);
    }
  }
}

HR_INLINE void store_nibble_record(const float* x, int n, uint8_t* record) {
  const int groups = (n + 31) / 32;
  uint8_t* q = record + 4 * groups;
  for (int g = 0; g < groups; g++) {
    const int m = n - 32 * g < 32 ? n - 32 * g : 32;
    const float* in = x + 32 * g;
    float low = in[0], high = in[0], odd = 0.0f;
    for (int i = 0; i < m; i++) {
      low = in[i] < low ? in[i] : low;
      high = in[i] > high ? in[i] : high;
      odd += in[i] - in[i];  // NaN if any value isn't finite
    }
    const uint16_t h[2] = {float_to_half((high - low) / 15.0f + odd), float_to_half(low)};
    std::memcpy(record + 4 * g, h, 4);
    const float d = half_to_float(h[0]), base = half_to_float(h[1]), inverse = d > 0.0f ? 1.0f / d : 0.0f;
    uint8_t digit[32];
    for (int i = 0; i < 32; i += 8) {
      const v8 v = i + 8 <= m ? load(in + i) : i < m ? load_part(in + i, m - i) : splat(0.0f);
      const i8v r = rounded_to_int(min(splat(15.0f), max(splat(0.0f), (v - splat(base)) * splat(inverse))));
      for (int j = 0; j < 8; j++) digit[i + j] = i + j < m ? static_cast<uint8_t>(r[j] & 15) : 0;
    }
    for (int i = 0; i < 16; i++) q[16 * g + i] = static_cast<uint8_t>(digit[i] | digit[i + 16] << 4);
  }
}

void store_record_impl(int bits, const float* x, int head_dim, uint8_t* record) {
  if (bits == 16) return store_half_record(x, head_dim, record);
  if (bits == 8) return store_byte_record(x, head_dim, record);
  store_nibble_record(x, head_dim, record);
}

HR_INLINE v8 widen_bytes(const int8_t* q) {
#if defined(__AVX2__)
  return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
#else
  v8 v;
  for (int i = 0; i < 8; i++) v[i] = static_cast<float>(q[i]);
  return v;
#endif
}

// Values of eight nibbles; shift 0 or 4.
HR_INLINE v8 widen_nibbles(const uint8_t* q, int shift) {
#if defined(__AVX2__)
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q));
  bytes = _mm_and_si128(shift ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
  return (v8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
  v8 v;
  for (int i = 0; i < 8; i++) v[i] = static_cast<float>(q[i] >> shift & 15);
  return v;
#endif
}

// Values i .. i + 7 (i a multiple of 8) of a record of bytes or nibbles.
HR_INLINE v8 byte_values(const uint8_t* record, int groups, int i) {
  uint16_t h;
  std::memcpy(&h, record + i / 32 * 2, 2);
  return widen_bytes(reinterpret_cast<const int8_t*>(record + 2 * groups) + i) * splat(half_to_float(h));
}
HR_INLINE v8 nibble_values(const uint8_t* record, int groups, int i) {
  uint16_t h[2];
  std::memcpy(h, record + i / 32 * 4, 4);
  const v8 q = widen_nibbles(record + 4 * groups + i / 32 * 16 + i % 16, i % 32 / 16 * 4);
  return fma(q, splat(half_to_float(h[0])), splat(half_to_float(h[1])));
}

// Eight values i..i+7 of a quantised record go to x, no further than n (the rest of x up to 16 stays zero).
HR_INLINE void put(float* x, int i, int n, v8 v) {
  if (i + 8 <= n) store(x + i, v);
  else if (i < n) store_part(x + i, v, n - i);
}

// x has round_up(head_dim, 16) floats; those past head_dim are left as they are (zeros by contract).
HR_INLINE void load_record_impl(int bits, const uint8_t* record, int n, float* x) {
  const int groups = (n + 31) / 32;
  if (bits == 16) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(record);
    int i = 0;
    for (; i + 8 <= n; i += 8) store(x + i, load_half(h + i));
    for (; i < n; i++) x[i] = half_to_float(h[i]);
  } else if (bits == 8) {
    for (int i = 0; i < n; i += 8) put(x, i, n, byte_values(record, groups, i));
  } else {
    for (int i = 0; i < n; i += 8) put(x, i, n, nibble_values(record, groups, i));
  }
}
void load_record_call(int bits, const uint8_t* record, int n, float* x) { load_record_impl(bits, record, n, x); }

}  // namespace
}  // namespace headrace
