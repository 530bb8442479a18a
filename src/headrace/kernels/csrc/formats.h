// What all matmul paths share: the packed layout, conversions, the inside of QuantRows. docs/kernels.md says why.
#pragma once
#include <cstring>

#include "headrace.h"

namespace headrace {

constexpr int kTile = 8;    // output rows interleaved in a tile
constexpr int kGroup = 32;  // activations that share a scale

// A packed integer matrix is three planes, each [tiles, k / block] records: `meta` (scales), `low` and `high` code
// bits. Bytes of one record of each; their sum is 8 times the file's block.
struct Layout {
  int block, meta, low, high;
};

constexpr Layout kLayouts[] = {
    {1, 0, 0, 0},        {1, 0, 0, 0},        {1, 0, 0, 0},        // F32 F16 BF16: rows as in the file
    {32, 16, 128, 0},    {32, 32, 128, 0},                         // Q4_0: d; Q4_1: d, m
    {32, 16, 128, 32},   {32, 32, 128, 32},                        // Q5_0, Q5_1
    {32, 16, 256, 0},                                              // Q8_0
    {256, 160, 512, 0},  {256, 112, 512, 256},                     // Q2_K: d, dmin, 16x8 (sc | m << 4); Q3_K: d, 6-bit sc
    {256, 128, 1024, 0}, {256, 128, 1024, 256},                    // Q4_K, Q5_K: d, dmin, 6-bit (sc, m)
    {256, 144, 1024, 512},                                         // Q6_K: d, int8 sc
    {32, 16, 128, 0},    {256, 64, 1024, 0},                       // IQ4_NL; IQ4_XS: d, 6-bit sc
};
static_assert(sizeof(kLayouts) / sizeof(Layout) == static_cast<size_t>(Format::Count));

inline const Layout& layout(Format f) { return kLayouts[static_cast<int>(f)]; }
constexpr int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where the planes of a packed matrix begin, and the bytes of one tile in each.
struct Planes {
  int64_t blocks;  // along k
  int64_t meta_tile, low_tile, high_tile;
  int64_t low_start, high_start, total;

  Planes(Format f, int64_t n, int64_t k) {
    const Layout& l = layout(f);
    const int64_t tiles = (n + kTile - 1) / kTile;
    blocks = k / l.block;
    meta_tile = blocks * l.meta, low_tile = blocks * l.low, high_tile = blocks * l.high;
    low_start = align64(tiles * meta_tile);
    high_start = low_start + align64(tiles * low_tile);
    total = high_start + align64(tiles * high_tile);
  }
};

// The inside of QuantRows: for each group g of 32, `rows` records of every field, field by field.
// Lanes: a 16-bit lane of the kernels holds the codes with k % 4 in {0, 1} (even) or {2, 3} (odd).
struct QuantView {
  static constexpr int64_t kBytes = 32 + 6 * 4;  // of one (group, row)
  uint8_t* base;
  int64_t rows;

  explicit QuantView(const QuantRows& q) : base(q.data), rows(q.rows) {}
  uint8_t* group(int64_t g) const { return base + g * rows * kBytes; }
  int8_t* codes(int64_t g, int64_t r) const { return reinterpret_cast<int8_t*>(group(g)) + r * 32; }
  float* scales(int64_t g) const { return reinterpret_cast<float*>(group(g) + rows * 32); }
  float* sums(int64_t g) const { return scales(g) + rows; }              // scale * sum of the 32 codes
  // Pairs of int16 (even lane, odd lane): -32 * sum over the first 16, -32 * sum over the last 16,
  // -16 * sum over all 32, -8 * sum over all 32.
  int16_t* offsets(int64_t g, int which) const { return reinterpret_cast<int16_t*>(scales(g) + (2 + which) * rows); }
};

// Signed 4-bit codebook of IQ4_NL and IQ4_XS (llama.cpp, ggml-common.h, kvalues_iq4nl).
constexpr int8_t kCodebook[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

// IEEE 754 binary16 -> binary32, exact; a NaN becomes quiet, as vcvtph2ps does.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

inline float load_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

inline float load_bfloat(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return bits_to_float(static_cast<uint32_t>(h) << 16);
}

// The 6-bit values of a meta record (Q3_K, Q4_K, Q5_K: 128, IQ4_XS: 64), stored as count / 2 bytes of low nibbles
// (value v and v + count / 2 in byte v) and count / 4 bytes of high bits (bits 2t of byte v: value t * count / 4 + v).
inline void unpack_six_bits(const uint8_t* src, int count, uint8_t* out) {
  const uint8_t* high = src + count / 2;
  for (int v = 0; v < count; ++v) {
    const int low = v < count / 2 ? src[v] & 15 : src[v - count / 2] >> 4;
    out[v] = static_cast<uint8_t>(low | ((high[v % (count / 4)] >> (v / (count / 4) * 2)) & 3) << 4);
  }
}

}  // namespace headrace
