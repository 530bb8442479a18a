// exp, tanh, erf and the activations on eight floats. No branches, no tables, no libm: the same bits on every path.
// Polynomials: least maximum error (Lawson's iteration) for this project; errors in ulps are in tests/test_kernels_math.py.
#pragma once
#include "vec.h"

namespace headrace {
namespace {

// e^x: x = n ln 2 + r, |r| <= ln 2 / 2 (Cody & Waite), e^r = 1 + r + r^2 q(r). exp(0) is 1 exactly; overflow gives
// infinity, underflow denormals and then 0, NaN stays NaN.
HR_INLINE v8 exp8(v8 x) {
  const v8 c = min(splat(89.0f), max(splat(-104.0f), x));
  const v8 t = fma(c, splat(1.44269504088896341f), splat(kRound));
  const v8 n = t - splat(kRound);
  v8 r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  v8 q = splat(1.3814466888527593e-3f);
  q = fma(q, r, splat(8.368780414564346e-3f));
  q = fma(q, r, splat(4.1668394214301685e-2f));
  q = fma(q, r, splat(1.6666520107782898e-1f));
  q = fma(q, r, splat(4.999999341248515e-1f));
  const v8 y = fma(r * r, q, r) + splat(1.0f);
  // 2^n in two factors, so that neither leaves the range of normal numbers.
  const i8v exponent = bits_of(t) - splat_i(0x4b400000), half = exponent >> 1;
  const v8 a = from_bits((half + splat_i(127)) << 23), b = from_bits((exponent - half + splat_i(127)) << 23);
  return y * a * b;
}

HR_INLINE v8 tanh8(v8 x) {
  const v8 a = abs(x), t = x * x;
  v8 p = splat(-5.372416611725381e-3f);
  p = fma(p, t, splat(2.03345283375143e-2f));
  p = fma(p, t, splat(-5.364476100222912e-2f));
  p = fma(p, t, splat(1.3330294663983783e-1f));
  p = fma(p, t, splat(-3.3333239809484444e-1f));
  const v8 small = fma(x * t, p, x);
  const v8 large = splat(1.0f) - splat(2.0f) / (exp8(a + a) + splat(1.0f));
  return select(a < splat(0.625f), small, with_sign_of(large, x));
}

// Below 0.98 an odd polynomial, above it 1 - e^p(|x|), where p approximates log erfc.
HR_INLINE v8 erf8(v8 x) {
  const v8 a = min(splat(4.0f), abs(x)), t = a * a;
  v8 s = splat(7.889087966816977e-5f);
  s = fma(s, t, splat(-8.020830953695129e-4f));
  s = fma(s, t, splat(5.189534038534407e-3f));
  s = fma(s, t, splat(-2.685444380412319e-2f));
  s = fma(s, t, splat(1.1283600153017229e-1f));
  s = fma(s, t, splat(-3.761262713301926e-1f));
  s = fma(s, t, splat(1.1283791659126807f));
  v8 p = splat(-2.1686766876971575e-5f);
  p = fma(p, a, splat(4.4133534435164545e-4f));
  p = fma(p, a, splat(-4.2045564651597145e-3f));
  p = fma(p, a, splat(2.5208241260402442e-2f));
  p = fma(p, a, splat(-1.0841855119272176e-1f));
  p = fma(p, a, splat(-6.332199191464003e-1f));
  p = fma(p, a, splat(-1.129578410070035f));
  p = fma(p, a, splat(1.8803696974760745e-4f));
  const v8 large = splat(1.0f) - exp8(p);
  return with_sign_of(select(a < splat(0.98f), a * s, large), x);
}

// x / (1 + e^-y): silu for y = x; the tanh form of gelu for y = 2 u, as (1 + tanh u) / 2 = 1 / (1 + e^-2u).
HR_INLINE v8 times_sigmoid(v8 x, v8 y) { return x / (splat(1.0f) + exp8(-y)); }

HR_INLINE v8 gelu_tanh8(v8 x) {
  // Hendrycks & Gimpel (2016): u = sqrt(2 / pi) (x + 0.044715 x^3).
  const v8 twice_u = splat(1.5957691216057308f) * fma(splat(0.044715f) * x, x * x, x);
  return times_sigmoid(x, twice_u);
}
HR_INLINE v8 gelu_erf8(v8 x) {
  const v8 e = erf8(x * splat(0.70710678118654752f));
  const v8 h = splat(0.5f) * x;
  return fma(h, e, h);
}
HR_INLINE v8 relu8(v8 x) { return max(splat(0.0f), x); }

}  // namespace
}  // namespace headrace
