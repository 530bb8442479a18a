// Double precision exp, log, sine and cosine without libm: plain IEEE operations, so the same bits everywhere.
#pragma once

namespace headrace {

// Within 1 ulp or so. No fused operations, so that tests/reference_sample.py repeats them exactly in Python.
double exp64(double x);
double log64(double x);  // x > 0

// |angle| < 2^30; error well below half an ulp of f32.
void sincos64(double angle, double* sine, double* cosine);

}  // namespace headrace
