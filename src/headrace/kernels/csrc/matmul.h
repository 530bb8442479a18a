// What the matmul and quantise paths share beyond the layout.
#pragma once
#include <algorithm>

#include "formats.h"

namespace headrace {

// A group whose largest magnitude is below this is taken as zero, so that 127 / amax stays finite.
constexpr float kSmallestAmax = 0x1p-100f;

// The last step of every dot product.
inline float finish(float dot, const float* bias, int64_t j, bool accumulate, float y) {
  if (bias) dot += bias[j];
  return accumulate ? dot + y : dot;
}

// The fixed tree over the 16 virtual lanes of a floating dot product: 16 -> 8 -> 4 -> 2 -> 1, lane i + lane i + half.
inline float reduce16(float* lane) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

void quantise_portable(const float* x, int64_t ldx, QuantRows& out, int64_t row0, int64_t row1);

}  // namespace headrace
