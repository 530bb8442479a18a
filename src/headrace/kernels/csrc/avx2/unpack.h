// Packed tiles -> registers: a group of 32 codes of 8 rows becomes 8 vectors ("steps") of 8 rows x 4 codes.
#pragma once
#include <immintrin.h>

#include "formats.h"

namespace headrace {
namespace {

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
inline __m256 load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Shifts that are a no-op at 0; positive is left. Bits that cross into a neighbour byte are masked off by the caller.
template <int N>
inline __m256i shift(__m256i v) {
  if constexpr (N > 0) return _mm256_slli_epi16(v, N);
  if constexpr (N < 0) return _mm256_srli_epi16(v, -N);
  return v;
}

inline void low_nibbles(const uint8_t* p, __m256i* w) {
  const __m256i mask = bytes(15);
  for (int i = 0; i < 4; ++i) {
    const __m256i v = load256(p + 32 * i);
    w[i] = _mm256_and_si256(v, mask);
    w[i + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
  }
}

inline void low_pairs(const uint8_t* p, __m256i* w) {
  const __m256i mask = bytes(3);
  for (int i = 0; i < 2; ++i) {
    const __m256i v = load256(p + 32 * i);
    w[4 * i] = _mm256_and_si256(v, mask);
    w[4 * i + 1] = _mm256_and_si256(shift<-2>(v), mask);
    w[4 * i + 2] = _mm256_and_si256(shift<-4>(v), mask);
    w[4 * i + 3] = _mm256_and_si256(shift<-6>(v), mask);
  }
}

template <int S, int To>
inline void or_bit(__m256i h, __m256i* w) {  // bit S of each byte of h -> bit To of step S
  w[S] = _mm256_or_si256(w[S], _mm256_and_si256(shift<To - S>(h), bytes(1 << To)));
}

template <int To>
inline void high_bits(const uint8_t* p, __m256i* w) {
  const __m256i h = load256(p);
  or_bit<0, To>(h, w), or_bit<1, To>(h, w), or_bit<2, To>(h, w), or_bit<3, To>(h, w);
  or_bit<4, To>(h, w), or_bit<5, To>(h, w), or_bit<6, To>(h, w), or_bit<7, To>(h, w);
}

inline void high_pairs(const uint8_t* p, __m256i* w) {
  const __m256i mask = bytes(0x30);
  for (int i = 0; i < 2; ++i) {
    const __m256i h = load256(p + 32 * i);
    const auto put = [&](int s, __m256i v) { w[s] = _mm256_or_si256(w[s], _mm256_and_si256(v, mask)); };
    put(4 * i, shift<4>(h)), put(4 * i + 1, shift<2>(h)), put(4 * i + 2, h), put(4 * i + 3, shift<-2>(h));
  }
}

// The codes of one group: unsigned, or signed for Q8_0 and the codebook formats.
template <Format F>
inline void load_codes(const uint8_t* low, const uint8_t* high, __m256i* w) {
  if constexpr (F == Format::Q8_0) {
    for (int i = 0; i < 8; ++i) w[i] = load256(low + 32 * i);
  } else if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    low_pairs(low, w);
  } else {
    low_nibbles(low, w);
  }
  if constexpr (F == Format::Q5_0 || F == Format::Q5_1 || F == Format::Q5_K) high_bits<4>(high, w);
  if constexpr (F == Format::Q3_K) high_bits<2>(high, w);
  if constexpr (F == Format::Q6_K) high_pairs(high, w);
  if constexpr (F == Format::IQ4_NL || F == Format::IQ4_XS) {
    const __m256i book = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook)));
    for (int i = 0; i < 8; ++i) w[i] = _mm256_shuffle_epi8(book, w[i]);
  }
}

// unpack_six_bits (formats.h) for 128 values, 32 at a time.
inline void six_bits_128(const uint8_t* src, uint8_t* out) {
  const __m256i nibble = bytes(15), mask = bytes(0x30), h = load256(src + 64);
  const __m256i a = load256(src), b = load256(src + 32);
  const auto put = [&](int i, __m256i low, __m256i high) {
    const __m256i v = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high, mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), v);
  };
  put(0, a, shift<4>(h)), put(1, b, shift<2>(h)), put(2, shift<-4>(a), h), put(3, shift<-4>(b), shift<-2>(h));
}

// 8 bytes -> 8 floats; 8 bytes -> each in both 16-bit halves of a 32-bit lane.
inline __m256i load_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i load_signed_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i both_halves(__m256i v) {  // |v| < 2^15
  return _mm256_blend_epi16(_mm256_slli_epi32(v, 16), v, 0x55);
}

}  // namespace
}  // namespace headrace
