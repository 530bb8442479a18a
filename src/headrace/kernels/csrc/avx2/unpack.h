// Packed tiles -> registers: a group of 32 codes of 8 rows becomes 8 vectors ("steps") of 8 rows x 4 codes.
#pragma once
#include <immintrin.h>

#include "formats.h"

#define HR_ALWAYS inline __attribute__((always_inline))

namespace headrace {
namespace {

HR_ALWAYS __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
HR_ALWAYS __m256i bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
HR_ALWAYS __m256 load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Shifts that are a no-op at 0; positive is left. Bits that cross into a neighbour byte are masked off by the caller.
template <int N>
HR_ALWAYS __m256i shift(__m256i v) {
  if constexpr (N > 0) return _mm256_slli_epi16(v, N);
  if constexpr (N < 0) return _mm256_srli_epi16(v, -N);
  return v;
}

// One bit of each byte of h, moved to bit To, for step S.
template <int S, int To>
HR_ALWAYS __m256i one_bit(__m256i h) {
  return _mm256_and_si256(shift<To - S>(h), bytes(1 << To));
}

// Two bits of each byte of h (bits 2t, 2t + 1 of step 4i + t), moved to bits To, To + 1.
template <int T, int To>
HR_ALWAYS __m256i two_bits(__m256i h) {
  return _mm256_and_si256(shift<To - 2 * T>(h), bytes(3 << To));
}

template <Format F>
constexpr bool kFiveBits = F == Format::Q5_0 || F == Format::Q5_1 || F == Format::Q5_K;
template <Format F>
constexpr bool kBook = F == Format::IQ4_NL || F == Format::IQ4_XS;

// Steps I and I + 4 of a format with nibbles below; fn(step, codes).
template <Format F, int I, class Fn>
HR_ALWAYS void nibble_steps(const uint8_t* low, const uint8_t* high, Fn&& fn) {
  const __m256i mask = bytes(15), v = load256(low + 32 * I);
  __m256i a = _mm256_and_si256(v, mask), b = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
  if constexpr (kFiveBits<F>) {
    const __m256i h = load256(high);
    a = _mm256_or_si256(a, one_bit<I, 4>(h)), b = _mm256_or_si256(b, one_bit<I + 4, 4>(h));
  }
  if constexpr (F == Format::Q6_K) {
    a = _mm256_or_si256(a, two_bits<I, 4>(load256(high)));
    b = _mm256_or_si256(b, two_bits<I, 4>(load256(high + 32)));
  }
  if constexpr (kBook<F>) {
    const __m256i book = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook)));
    a = _mm256_shuffle_epi8(book, a), b = _mm256_shuffle_epi8(book, b);
  }
  fn(I, a), fn(I + 4, b);
}

// Steps 2I and 2I + 1 of a format with pairs of bits below.
template <Format F, int I, class Fn>
HR_ALWAYS void pair_steps(const uint8_t* low, const uint8_t* high, Fn&& fn) {
  const __m256i v = load256(low + 32 * (I / 2));
  __m256i a = two_bits<2 * I % 4, 0>(v), b = two_bits<2 * I % 4 + 1, 0>(v);
  if constexpr (F == Format::Q3_K) {
    const __m256i h = load256(high);
    a = _mm256_or_si256(a, one_bit<2 * I, 2>(h)), b = _mm256_or_si256(b, one_bit<2 * I + 1, 2>(h));
  }
  fn(2 * I, a), fn(2 * I + 1, b);
}

// A quarter of a group (I in 0 .. 3): calls fn(step, codes) for two steps. Codes are unsigned, or signed for Q8_0 and
// the codebook formats.
template <Format F, int I, class Fn>
HR_ALWAYS void quarter(const uint8_t* low, const uint8_t* high, Fn&& fn) {
  if constexpr (F == Format::Q8_0) {
    fn(2 * I, load256(low + 64 * I)), fn(2 * I + 1, load256(low + 64 * I + 32));
  } else if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    pair_steps<F, I>(low, high, fn);
  } else {
    nibble_steps<F, I>(low, high, fn);
  }
}

// unpack_six_bits (formats.h) for 128 values, 32 at a time.
HR_ALWAYS void six_bits_128(const uint8_t* src, uint8_t* out) {
  const __m256i nibble = bytes(15), mask = bytes(0x30), h = load256(src + 64);
  const __m256i a = load256(src), b = load256(src + 32);
  const auto put = [&](int i, __m256i low, __m256i high) {
    const __m256i v = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high, mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), v);
  };
  put(0, a, shift<4>(h)), put(1, b, shift<2>(h)), put(2, shift<-4>(a), h), put(3, shift<-4>(b), shift<-2>(h));
}

// The same for 64 values.
HR_ALWAYS void six_bits_64(const uint8_t* src, uint8_t* out) {
  const __m256i nibble = bytes(15), mask = bytes(0x30), a = load256(src);
  const __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 32)));
  const auto put = [&](int i, __m256i low, __m256i first, __m256i second) {
    const __m256i high = _mm256_and_si256(_mm256_blend_epi32(first, second, 0xf0), mask);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), _mm256_or_si256(_mm256_and_si256(low, nibble), high));
  };
  put(0, a, shift<4>(h), shift<2>(h)), put(1, shift<-4>(a), h, shift<-2>(h));
}

// 8 bytes, one a row, to the rows' 32-bit lanes: `At` chooses the byte(s) of the lane that get it (bit mask).
template <int At>
HR_ALWAYS __m256i to_lanes(__m128i eight) {
  constexpr auto at = [](int byte, int row) constexpr { return static_cast<char>(At >> byte & 1 ? row : -128); };
  const __m256i pattern = _mm256_setr_epi8(
      at(0, 0), at(1, 0), at(2, 0), at(3, 0), at(0, 1), at(1, 1), at(2, 1), at(3, 1), at(0, 2), at(1, 2), at(2, 2), at(3, 2),
      at(0, 3), at(1, 3), at(2, 3), at(3, 3), at(0, 4), at(1, 4), at(2, 4), at(3, 4), at(0, 5), at(1, 5), at(2, 5), at(3, 5),
      at(0, 6), at(1, 6), at(2, 6), at(3, 6), at(0, 7), at(1, 7), at(2, 7), at(3, 7));
  return _mm256_shuffle_epi8(_mm256_broadcastq_epi64(eight), pattern);
}
HR_ALWAYS __m128i load_eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
HR_ALWAYS __m256 to_floats(__m128i eight) { return _mm256_cvtepi32_ps(to_lanes<1>(eight)); }
HR_ALWAYS __m256i both_halves(__m128i eight) { return to_lanes<5>(eight); }
HR_ALWAYS __m256i both_halves_signed(__m128i eight) { return _mm256_srai_epi16(to_lanes<10>(eight), 8); }

}  // namespace
}  // namespace headrace
