// The matmul kernels by themselves: for each format, Gweights/s and GB/s of one row from memory beside a read loop in the
// same run, what four rows cost, and Gop/s of 64 rows. One thread, thread CPU time (a busy machine matters less), medians.
//   S=src/headrace/kernels/csrc; F="-std=c++17 -O3 -ffp-contract=off -fno-math-errno -mavx2 -mfma -mf16c -mbmi2 -I$S"
//   P="$(echo $S/{pack,matmul_portable,quantise_portable}.cpp) $(echo $S/avx2/{matmul,matmul_float,quantise}.cpp)"
//   g++ $F -o /tmp/kernels benchmarks/kernels_matmul.cpp $P && /tmp/kernels [Q4_0 Q8_0 ...]
#include <immintrin.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "headrace.h"

using namespace headrace;

namespace {

constexpr int64_t kBytes = 192 << 20, kInputs = 4096;
const char* const kNames[] = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                              "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"};
volatile long long sink;

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void read(const uint8_t* p, int64_t n) {
  __m256i sum[4] = {};
  for (int64_t i = 0; i + 128 <= n; i += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(p + i + 512), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p + i + 576), _MM_HINT_T0);
    for (int j = 0; j < 4; ++j)
      sum[j] = _mm256_add_epi64(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
  }
  sink = _mm256_extract_epi64(_mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])), 0);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Inputs {
  std::vector<float> x;
  uint8_t* data;
  QuantRows q;
  explicit Inputs(int64_t rows) : x(static_cast<size_t>(rows * kInputs)) {
    for (float& v : x) v = static_cast<float>(rand()) / 1e9f - 1;
    data = static_cast<uint8_t*>(aligned_alloc(64, static_cast<size_t>((quant_bytes(rows, kInputs) + 63) / 64 * 64)));
    q = {rows, kInputs, data};
    avx2_path.quantise(x.data(), kInputs, q, 0, rows);
  }
  ~Inputs() { free(data); }
};

double seconds(const Matrix& w, const Inputs& in, std::vector<float>& y) {
  const double start = cpu_seconds();
  avx2_path.matmul(w, &in.q, in.x.data(), kInputs, in.q.rows, y.data(), w.n, nullptr, false, 0, w.n);
  return cpu_seconds() - start;
}

void measure(Format f, const uint8_t* memory) {
  int64_t n = 65536;
  while (packed_bytes(f, n, kInputs) > kBytes) n /= 2;
  const Matrix big{f, n, kInputs, memory}, part{f, 512, kInputs, memory};
  const Inputs one(1), four(4), many(64);
  std::vector<float> y(static_cast<size_t>(4 * n));
  std::vector<double> reading, single, quad, batch;
  const int64_t bytes = packed_bytes(f, n, kInputs);
  for (int i = 0; i < 7; ++i) {
    const double start = cpu_seconds();
    read(memory, bytes);
    reading.push_back(cpu_seconds() - start);
    single.push_back(seconds(big, one, y)), quad.push_back(seconds(big, four, y));
    batch.push_back(seconds(part, many, y));
  }
  const double t = median(single), weights = static_cast<double>(n * kInputs), gb = static_cast<double>(bytes) / 1e9;
  printf("%-7s read %5.1f GB/s | 1 row %5.1f GB/s, %5.1f Gweights/s | 4 rows take %.2f times 1 | 64 rows %5.1f Gop/s\n",
         kNames[static_cast<int>(f)], gb / median(reading), gb / t, weights / t / 1e9, median(quad) / t,
         2.0 * 64 * 512 * kInputs / median(batch) / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  uint8_t* memory = static_cast<uint8_t*>(aligned_alloc(2 << 20, kBytes + (2 << 20)));
  madvise(memory, kBytes, MADV_HUGEPAGE);
  for (int64_t i = 0; i < kBytes; ++i) memory[i] = static_cast<uint8_t>(i * 2654435761u >> 13) & 0x3f;  // finite scales
  for (int f = 0; f < static_cast<int>(Format::Count); ++f)
    if (argc == 1 || std::find(argv + 1, argv + argc, std::string(kNames[f])) != argv + argc)
      measure(static_cast<Format>(f), memory);
  free(memory);
}
