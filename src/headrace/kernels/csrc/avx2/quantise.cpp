// f32 activations -> 8 bit by groups of 32, 32 values in four registers. The rule is quantise_portable's.
#include <immintrin.h>

#include "avx2/matmul_avx2.h"
#include "matmul.h"

namespace headrace {
namespace {

struct Scales {
  float scale, inverse;
};

Scales scales_of(const __m256* v) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i)
    top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  const uint32_t bits = static_cast<uint32_t>(_mm_cvtsi128_si32(t));
  const float amax = bits_to_float(bits);
  if (bits >= 0x7f800000) return {bits_to_float(0x7fc00000), 0.0f};
  if (amax < kSmallestAmax) return {0.0f, 0.0f};
  return {amax / 127.0f, 127.0f / amax};
}

void quantise_group(const float* x, const QuantView& out, int64_t g, int64_t r) {
  __m256 v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
  const Scales s = scales_of(v);
  __m256i c[4];
  for (int i = 0; i < 4; ++i)  // inverse 0 with infinity or NaN gives INT_MIN: replaced by 0
    c[i] = s.inverse == 0.0f ? _mm256_setzero_si256()
                             : _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(s.inverse)));
  // packs work within 128-bit halves: undo with one permutation of 32-bit lanes
  const __m256i q = _mm256_permutevar8x32_epi32(
      _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3])),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.codes(g, r)), q);
  // 16-bit pair sums, then lane sums: register pair = [first 16 | last 16], even and odd lanes interleaved
  __m256i lanes = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
  lanes = _mm256_add_epi16(lanes, _mm256_shuffle_epi32(lanes, 0x4e));
  lanes = _mm256_add_epi16(lanes, _mm256_shuffle_epi32(lanes, 0xb1));
  const __m128i first = _mm256_castsi256_si128(lanes), last = _mm256_extracti128_si256(lanes, 1);
  const __m128i both = _mm_add_epi16(first, last);
  const auto put = [&](int which, __m128i pair) {
    const int32_t value = _mm_cvtsi128_si32(pair);
    std::memcpy(out.offsets(g, which) + 2 * r, &value, 4);
  };
  const __m128i zero = _mm_setzero_si128();
  put(0, _mm_sub_epi16(zero, _mm_slli_epi16(first, 5)));
  put(1, _mm_sub_epi16(zero, _mm_slli_epi16(last, 5)));
  put(2, _mm_sub_epi16(zero, _mm_slli_epi16(both, 4)));
  put(3, _mm_sub_epi16(zero, _mm_slli_epi16(both, 3)));
  const int sum = _mm_cvtsi128_si32(_mm_madd_epi16(both, _mm_set1_epi16(1)));
  out.scales(g)[r] = s.scale;
  out.sums(g)[r] = s.scale * static_cast<float>(sum);
}

}  // namespace

void quantise_avx2(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1) {
  const QuantView v(out);
  for (int64_t r = row0; r < row1; ++r)
    for (int64_t g = 0; g < out.k / kGroup; ++g) quantise_group(x + r * ldx + g * kGroup, v, g, r);
}

}  // namespace headrace
