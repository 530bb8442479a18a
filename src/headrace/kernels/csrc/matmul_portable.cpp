// The plain C++ path: the definition of every bit the other paths give (formulas in docs/kernels.md).
#include <cmath>

#include "matmul.h"

namespace headrace {
namespace {

// One group of 32 codes of a tile, spread, with everything its formula needs.
struct Group {
  int8_t code[kTile][kGroup];          // centred where the format has a centre
  float scale[kTile], min[kTile];      // d (IQ4_XS: * sub-scale); what is added for each activation
  int sub[kTile][2], submin[kTile][2]; // of each 16, or sub[][0] of all 32; unset where the format has none
};

uint8_t code_at(const uint8_t* plane, int bits, int step, int byte) {
  if (bits == 8) return plane[step * 32 + byte];
  if (bits == 4) return plane[step % 4 * 32 + byte] >> step / 4 * 4 & 15;
  if (bits == 2) return plane[step / 4 * 32 + byte] >> step % 4 * 2 & 3;
  return plane[byte] >> step & 1;
}

int centre(Format f) {
  switch (f) {
    case Format::Q4_0: return 8;
    case Format::Q5_0: return 16;
    case Format::Q3_K: return 4;
    case Format::Q6_K: return 32;
    default: return 0;
  }
}

class Tile {
 public:
  Tile(const Matrix& w, int64_t tile) : format_(w.format), layout_(layout(w.format)), planes_(w.format, w.n, w.k) {
    meta_ = w.data + tile * planes_.meta_tile;
    low_ = w.data + planes_.low_start + tile * planes_.low_tile;
    high_ = w.data + planes_.high_start + tile * planes_.high_tile;
    low_bits_ = layout_.low * 8 / (layout_.block * kTile);
    high_bits_ = layout_.high * 8 / (layout_.block * kTile);
  }

  void load(int64_t g, Group& out) {
    codes(g, out);
    const int per_block = layout_.block / kGroup, within = static_cast<int>(g % per_block);
    const uint8_t* meta = meta_ + g / per_block * layout_.meta;
    if (within == 0) block(meta);
    for (int r = 0; r < kTile; ++r) scales(r, within, meta, out);
  }

 private:
  void codes(int64_t g, Group& out) const {
    const uint8_t *low = low_ + g * 32 * low_bits_, *high = high_ + g * 32 * high_bits_;
    const bool book = format_ == Format::IQ4_NL || format_ == Format::IQ4_XS;
    const int mid = centre(format_);
    for (int step = 0; step < 8; ++step)
      for (int byte = 0; byte < 32; ++byte) {
        int c = code_at(low, low_bits_, step, byte);
        if (high_bits_) c |= code_at(high, high_bits_, step, byte) << low_bits_;
        out.code[byte / 4][step * 4 + byte % 4] = book ? kCodebook[c] : static_cast<int8_t>(c - mid);
      }
  }

  void block(const uint8_t* meta) {  // sub-scales of a super-block
    if (format_ == Format::Q3_K) unpack_six_bits(meta + 16, 128, six_);
    if (format_ == Format::Q4_K || format_ == Format::Q5_K) unpack_six_bits(meta + 32, 128, six_);
    if (format_ == Format::IQ4_XS) unpack_six_bits(meta + 16, 64, six_);
  }

  void scales(int r, int g, const uint8_t* meta, Group& out) const {
    const float d = load_half(meta + 2 * r), m = load_half(meta + 16 + 2 * r);  // m: only where there is one
    out.scale[r] = d, out.min[r] = 0;
    switch (format_) {
      case Format::Q4_1: case Format::Q5_1: out.min[r] = m; break;
      case Format::Q4_K: case Format::Q5_K:
        out.sub[r][0] = six_[g * 8 + r], out.min[r] = -(m * six_[64 + g * 8 + r]);
        break;
      case Format::IQ4_XS: out.scale[r] = d * static_cast<float>(six_[g * 8 + r] - 32); break;
      case Format::Q2_K: out.min[r] = m; break;
      default: break;
    }
    for (int h = 0; h < 2; ++h) {
      const int v = (2 * g + h) * 8 + r;
      if (format_ == Format::Q3_K) out.sub[r][h] = six_[v] - 32;
      if (format_ == Format::Q6_K) out.sub[r][h] = static_cast<int8_t>(meta[16 + v]);
      if (format_ == Format::Q2_K) out.sub[r][h] = meta[32 + v] & 15, out.submin[r][h] = meta[32 + v] >> 4;
    }
  }

  Format format_;
  const Layout& layout_;
  Planes planes_;
  const uint8_t *meta_, *low_, *high_;
  int low_bits_, high_bits_;
  uint8_t six_[128] = {};
};

int dot16(const int8_t* a, const int8_t* b) {
  int sum = 0;
  for (int i = 0; i < 16; ++i) sum += a[i] * b[i];
  return sum;
}

int sum16(const int8_t* a) {
  int sum = 0;
  for (int i = 0; i < 16; ++i) sum += a[i];
  return sum;
}

// acc + the group's share of the dot product.
float add_group(Format f, const Group& w, int r, const int8_t* a, float da, float ds, float acc) {
  const int first = dot16(w.code[r], a), last = dot16(w.code[r] + 16, a + 16);
  switch (f) {
    case Format::Q3_K: case Format::Q6_K:
      return std::fma(static_cast<float>(w.sub[r][0] * first + w.sub[r][1] * last), w.scale[r] * da, acc);
    case Format::Q2_K: {
      const float codes = static_cast<float>(w.sub[r][0] * first + w.sub[r][1] * last);
      const float minima = static_cast<float>(w.submin[r][0] * sum16(a) + w.submin[r][1] * sum16(a + 16));
      return std::fma(std::fma(w.scale[r], codes, -(w.min[r] * minima)), da, acc);
    }
    case Format::Q4_K: case Format::Q5_K:
      return std::fma(w.min[r], ds, std::fma(static_cast<float>(w.sub[r][0] * (first + last)), w.scale[r] * da, acc));
    case Format::Q4_1: case Format::Q5_1:
      return std::fma(w.min[r], ds, std::fma(static_cast<float>(first + last), w.scale[r] * da, acc));
    default: return std::fma(static_cast<float>(first + last), w.scale[r] * da, acc);
  }
}

void integer_matmul(const Matrix& w, const QuantRows& q, int64_t rows, float* y, int64_t ldy, const float* bias,
                    bool accumulate, int64_t n0, int64_t n1) {
  const QuantView v(q);
  constexpr int64_t kRows = 64;
  Group group;
  float acc[kRows][kTile];
  for (int64_t j = n0; j < n1; j += kTile) {
    const int live = static_cast<int>(std::min<int64_t>(kTile, n1 - j));
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
      const int64_t count = std::min(kRows, rows - r0);
      std::memset(acc, 0, sizeof acc);
      Tile tile(w, j / kTile);
      for (int64_t g = 0; g < w.k / kGroup; ++g) {
        tile.load(g, group);
        for (int64_t r = 0; r < count; ++r)
          for (int t = 0; t < live; ++t)
            acc[r][t] = add_group(w.format, group, t, v.codes(g, r0 + r), v.scales(g)[r0 + r], v.sums(g)[r0 + r],
                                  acc[r][t]);
      }
      for (int64_t r = 0; r < count; ++r)
        for (int t = 0; t < live; ++t) {
          float& out = y[(r0 + r) * ldy + j + t];
          out = finish(acc[r][t], bias, j + t, accumulate, out);
        }
    }
  }
}

float load_float(Format f, const uint8_t* row, int64_t i) {
  if (f == Format::F16) return load_half(row + 2 * i);
  if (f == Format::BF16) return load_bfloat(row + 2 * i);
  float x;
  std::memcpy(&x, row + 4 * i, 4);
  return x;
}

// Past the end of k both operands are +0, as in a vector register.
void float_matmul(const Matrix& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy, const float* bias,
                  bool accumulate, int64_t n0, int64_t n1) {
  const int64_t row_bytes = w.k * block_size(w.format).bytes;
  for (int64_t j = n0; j < n1; ++j)
    for (int64_t r = 0; r < rows; ++r) {
      float lane[16] = {};
      for (int64_t i = 0; i < (w.k + 15) / 16 * 16; ++i) {
        const float a = i < w.k ? x[r * ldx + i] : 0.0f, b = i < w.k ? load_float(w.format, w.data + j * row_bytes, i) : 0.0f;
        lane[i % 16] = std::fma(b, a, lane[i % 16]);
      }
      float& out = y[r * ldy + j];
      out = finish(reduce16(lane), bias, j, accumulate, out);
    }
}

void matmul_portable(const Matrix& w, const QuantRows* q, const float* x, int64_t ldx, int64_t rows, float* y,
                     int64_t ldy, const float* bias, bool accumulate, int64_t n0, int64_t n1) {
  if (is_float(w.format)) return float_matmul(w, x, ldx, rows, y, ldy, bias, accumulate, n0, n1);
  integer_matmul(w, *q, rows, y, ldy, bias, accumulate, n0, n1);
}

}  // namespace

const Path portable_path = {"portable", quantise_portable, matmul_portable};

}  // namespace headrace
