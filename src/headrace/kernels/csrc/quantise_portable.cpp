// f32 activations -> 8 bit by groups of 32. The rule (docs/kernels.md): the AVX2 path gives the same bits.
#include <cmath>

#include "matmul.h"

namespace headrace {

void quantise_portable(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1) {
  const QuantView v(out);
  for (int64_t r = row0; r < row1; ++r) {
    for (int64_t g = 0; g < out.k / kGroup; ++g) {
      const float* src = x + r * ldx + g * kGroup;
      uint32_t top = 0;  // as integers, so that NaN is greater than infinity
      for (int i = 0; i < kGroup; ++i) top = std::max(top, float_to_bits(src[i]) & 0x7fffffff);
      const float amax = bits_to_float(top);
      const bool bad = top >= 0x7f800000, zero = amax < kSmallestAmax;
      const float scale = bad ? bits_to_float(0x7fc00000) : zero ? 0.0f : amax / 127.0f;
      const float inverse = bad || zero ? 0.0f : 127.0f / amax;
      int8_t* q = v.codes(g, r);
      int lanes[4] = {};  // even, odd lane of the first 16, then of the last
      for (int i = 0; i < kGroup; ++i) {
        const int c = bad || zero ? 0 : static_cast<int>(std::nearbyintf(src[i] * inverse));
        q[i] = static_cast<int8_t>(c);
        lanes[i / 16 * 2 + i % 4 / 2] += c;
      }
      v.scales(g)[r] = scale;
      v.sums(g)[r] = scale * static_cast<float>(lanes[0] + lanes[1] + lanes[2] + lanes[3]);
      for (int lane = 0; lane < 2; ++lane) {
        const int first = lanes[lane], last = lanes[2 + lane];
        v.offsets(g, 0)[2 * r + lane] = static_cast<int16_t>(-32 * first);
        v.offsets(g, 1)[2 * r + lane] = static_cast<int16_t>(-32 * last);
        v.offsets(g, 2)[2 * r + lane] = static_cast<int16_t>(-16 * (first + last));
        v.offsets(g, 3)[2 * r + lane] = static_cast<int16_t>(-8 * (first + last));
      }
    }
  }
}

}  // namespace headrace
