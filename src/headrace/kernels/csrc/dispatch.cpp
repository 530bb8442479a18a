#include "dispatch.h"

#include <stdexcept>

namespace headrace {

namespace {

bool has_avx2() {
#if defined(HEADRACE_HAVE_AVX2)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(HEADRACE_HAVE_AVX2)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace

Paths choose_paths(const std::string& name) {
  if (!name.empty() && name != "portable" && name != "avx2" && name != "avx512")
    throw std::invalid_argument("'" + name + "' is no CPU path; there are: portable, avx2, avx512");
  if (name == "avx2" && !has_avx2())
    throw std::invalid_argument("this CPU or this build has no AVX2 with FMA, F16C and BMI2");
  if (name == "avx512" && !has_avx512())
    throw std::invalid_argument("this CPU or this build has no AVX-512 with BW, DQ, VL and VNNI");
#if defined(HEADRACE_HAVE_AVX2)
  if ((name.empty() || name == "avx512") && has_avx512()) return {&avx512_path, &avx2_ops};
  if (name != "portable" && has_avx2()) return {&avx2_path, &avx2_ops};
#endif
  return {&portable_path, &portable_ops};
}

}  // namespace headrace
