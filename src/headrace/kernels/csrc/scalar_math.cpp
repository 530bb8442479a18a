#include "scalar_math.h"

#include <cstdint>
#include <cstring>

namespace headrace {

namespace {

double power_of_two(int n) {  // -1022 <= n <= 1023
  const uint64_t u = static_cast<uint64_t>(n + 1023) << 52;
  double d;
  std::memcpy(&d, &u, 8);
  return d;
}

// 1 / k!, for k up to 19.
struct Reciprocals {
  double of[20];
};
constexpr Reciprocals factorials() {
  Reciprocals r{};
  double f = 1.0;  // exact to 18!
  for (int k = 0; k < 20; k++) {
    f = k > 1 ? f * k : 1.0;
    r.of[k] = 1.0 / f;
  }
  return r;
}
constexpr Reciprocals kInverse = factorials();

constexpr double kRound64 = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;  // ln 2 in two parts

}  // namespace

double exp64(double x) {
  if (!(x < 709.0)) return x != x ? x : 1.7976931348623157e308 * 10.0;
  if (x < -708.0) return 0.0;
  const double n = (x * 1.4426950408889634 + kRound64) - kRound64;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double s = kInverse.of[13];  // Taylor
  for (int k = 12; k >= 0; k--) s = s * r + kInverse.of[k];
  return s * power_of_two(static_cast<int>(n));
}

double log64(double x) {
  uint64_t u;
  std::memcpy(&u, &x, 8);
  int e = 0;
  if (u < 0x0010000000000000u) {  // denormal
    x *= 18014398509481984.0;     // 2^54
    std::memcpy(&u, &x, 8);
    e = -54;
  }
  e += static_cast<int>(u >> 52) - 1023;
  u = (u & 0x000fffffffffffffu) | 0x3ff0000000000000u;
  double m;
  std::memcpy(&m, &u, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  // log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 0.0;
  for (int k = 23; k >= 3; k -= 2) p = (p + 1.0 / k) * z;
  return e * kLn2High + (2.0 * (s + s * p) + e * kLn2Low);
}

void sincos64(double angle, double* sine, double* cosine) {
  // pi / 2 in three parts of 33 bits (Cody & Waite); fma keeps each subtraction exact enough to 2^30.
  const double n = (angle * 0.63661977236758138 + kRound64) - kRound64;
  double r = __builtin_fma(n, -1.57079632673412561417e+00, angle);
  r = __builtin_fma(n, -6.07710050630396597660e-11, r);
  r = __builtin_fma(n, -2.02226624879595063154e-21, r);
  const double z = r * r;
  double s = 0.0, c = 0.0;  // Taylor to r^17 and r^18
  for (int k = 16; k >= 2; k -= 2) s = (kInverse.of[k + 1] - s) * z;
  for (int k = 18; k >= 2; k -= 2) c = (kInverse.of[k] - c) * z;
  s = r - r * s;
  c = 1.0 - c;
  const int64_t quadrant = static_cast<int64_t>(n) & 3;
  const double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
  *sine = quadrant & 2 ? -a : a;
  *cosine = (quadrant == 1 || quadrant == 2) ? -b : b;
}

}  // namespace headrace
