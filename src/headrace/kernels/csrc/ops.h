// The table of everything but matmul: one per instruction set, the same bits from each (docs/kernels.md).
#pragma once
#include "headrace.h"

namespace headrace {

enum class Activation : int { Silu, GeluTanh, GeluErf, Relu };

constexpr int kPage = 32;    // slots in a page
constexpr int kChunk = 256;  // absolute positions of one attention partial

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Bytes of one (head, slot) record. 16: halves. 8: half scales, then bytes; 4: half (scale, minimum) pairs, then
// nibbles; both by groups of 32 along head_dim, the last one padded.
inline int64_t record_bytes(int bits, int64_t head_dim) {
  const int64_t groups = (head_dim + 31) / 32;
  return bits == 16 ? 2 * head_dim : bits == 8 ? groups * 34 : groups * 20;
}

// One chunk of one kv head, seen by some queries. Positions are relative to the chunk's start.
struct AttendTile {
  enum Stage : int { Whole, Scores, Values };  // Scores: those alone. Values: those are there; only some bring values
  int queries;
  int head_dim, stride;          // stride: head_dim rounded up to 16, zeros between
  int k_bits, v_bits;
  float softcap;                 // 0: none
  const float* q;                // [queries, stride], times the scale
  const int* lo;                 // [queries] query i sees positions [lo[i], hi[i]), never empty
  const int* hi;
  const uint8_t* const* k;       // [kChunk] records; valid in [min lo, max hi) widened to multiples of 4
  const uint8_t* const* v;
  float* scores;                 // [queries, kChunk] scratch
  float* tile;                   // [kPage, stride] scratch
  float* max;                    // [queries] out
  float* sum;                    // [queries] out
  float* acc;                    // [queries, stride] out
  Stage stage = Whole;
  const float* floor = nullptr;  // [queries] Values: the least score that brings its value ...
  const int* own = nullptr;      // [queries] ... beside this position's, if it is in the chunk
};

// What a row's noise depends on, besides the token.
struct NoiseKey {
  uint64_t seed;
  uint32_t choice, position;
};

struct VecOps {
  // y = norm(x) * w (+ b), n values. layer: subtract the mean first.
  void (*norm)(const float* x, float* y, int64_t n, const float* w, const float* b, float eps, bool layer);
  // y = act(x) (* up).
  void (*activate)(Activation kind, const float* x, const float* up, float* y, int64_t n);
  void (*add)(float* y, const float* x, int64_t n);
  // y = y * factor, then softcap * tanh(y / softcap) when softcap > 0.
  void (*scale)(float* y, int64_t n, float factor, float softcap);
  // y (+)= s * x
  void (*scaled_copy)(float* y, const float* x, float s, int64_t n, bool accumulate);
  // Rotate one row of heads in place; cos_sin: n cosines, then n sines.
  void (*rope)(float* x, int heads, int head_dim, const float* cos_sin, int n, bool interleaved);
  void (*store_record)(int bits, const float* x, int head_dim, uint8_t* record);
  void (*load_record)(int bits, const uint8_t* record, int head_dim, float* x);
  void (*attend)(const AttendTile& tile);
  // Merge a partial (max, sum, acc) into a running one.
  void (*fold)(float* max, float* sum, float* acc, float max2, float sum2, const float* acc2, int stride);
  // exp, tanh, erf by name, for tests: 0, 1, 2.
  void (*math)(int which, const float* x, float* y, int64_t n);
  // The largest of n values and its lowest index; false if any is NaN or infinite.
  bool (*scan)(const float* x, int64_t n, float* max, int64_t* index);
  // For the sampler: Philox words of tokens 4 first .. 4 first + 31; round(2^40 e^x) for x <= 0 (0 below -28);
  // the largest of each 64 values.
  void (*noise)(uint32_t first, const NoiseKey& key, uint32_t* bits);
  void (*weights)(const double* x, int64_t n, uint64_t* w);
  void (*block_max)(const float* x, int64_t n, float* out);
  // Reads bytes (a multiple of 256) and returns a checksum: the bandwidth probe.
  uint32_t (*read)(const uint8_t* p, int64_t bytes);
};

extern const VecOps portable_ops;
extern const VecOps avx2_ops;

}  // namespace headrace
