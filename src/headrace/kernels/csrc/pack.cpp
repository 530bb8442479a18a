// File blocks <-> packed tiles. Block formats: llama.cpp's ggml-common.h (structs block_q4_0 ... block_iq4_xs) and
// the GGUF specification. A block is first spread to plain codes and integer sub-scales, then packed.
#include <algorithm>
#include <type_traits>

#include "formats.h"

namespace headrace {
namespace {

constexpr BlockSize kBlocks[] = {{1, 4},     {1, 2},     {1, 2},     {32, 18},   {32, 20},
                                 {32, 22},   {32, 24},   {32, 34},   {256, 84},  {256, 110},
                                 {256, 144}, {256, 176}, {256, 210}, {32, 18},   {256, 136}};

// One block of one output row, spread. Codes are unsigned (Q8_0: the byte); d and m are the file's f16 bytes.
struct Spread {
  uint8_t code[256];
  uint8_t sub[32];  // sub-scales, then sub-minima; as stored (6-bit ones unsigned)
  const uint8_t *d, *m;
};

void nibbles32(const uint8_t* q, uint8_t* code) {
  for (int i = 0; i < 16; ++i) code[i] = q[i] & 15, code[i + 16] = q[i] >> 4;
}

void fifth_bits(const uint8_t* q, uint8_t* code) {
  for (int s = 0; s < 8; ++s) {  // four bits to the fifth bits of four bytes: the products don't overlap
    uint32_t word;
    std::memcpy(&word, code + 4 * s, 4);
    word |= ((q[s / 2] >> (s % 2 * 4) & 15) * 0x00204081u & 0x01010101u) << 4;
    std::memcpy(code + 4 * s, &word, 4);
  }
}

void six_bit_pairs(const uint8_t* s, uint8_t* sub) {  // Q4_K, Q5_K: 8 scales and 8 minima in 12 bytes
  for (int j = 0; j < 4; ++j) {
    sub[j] = s[j] & 63, sub[j + 8] = s[j + 4] & 63;
    sub[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
    sub[j + 12] = static_cast<uint8_t>((s[j + 8] >> 4) | (s[j + 4] >> 6) << 4);
  }
}

void spread_k_nibbles(const uint8_t* q, uint8_t* code) {  // Q4_K, Q5_K: 64 codes in 32 bytes
  for (int g = 0; g < 4; ++g)
    for (int i = 0; i < 32; ++i) code[64 * g + i] = q[32 * g + i] & 15, code[64 * g + 32 + i] = q[32 * g + i] >> 4;
}

void spread_q2_k(const uint8_t* b, Spread& s) {
  for (int i = 0; i < 16; ++i) s.sub[i] = b[i];
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) s.code[32 * g + i] = b[16 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
  s.d = b + 80, s.m = b + 82;
}

void spread_q3_k(const uint8_t* b, Spread& s) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i)
      s.code[32 * g + i] = static_cast<uint8_t>((b[32 + g / 4 * 32 + i] >> (g % 4 * 2) & 3) | (b[i] >> g & 1) << 2);
  const uint8_t* c = b + 96;
  for (int i = 0; i < 16; ++i)
    s.sub[i] = static_cast<uint8_t>((i < 8 ? c[i] & 15 : c[i - 8] >> 4) | (c[8 + i % 4] >> (i / 4 * 2) & 3) << 4);
  s.d = b + 108;
}

void spread_q6_k(const uint8_t* b, Spread& s) {
  for (int g = 0; g < 8; ++g) {
    const uint8_t *low = b + g / 4 * 64 + g % 2 * 32, *high = b + 128 + g / 4 * 32;
    const int low_shift = g % 4 / 2 * 4, high_shift = g % 4 * 2;
    for (int i = 0; i < 32; ++i)
      s.code[32 * g + i] = static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
  }
  std::copy_n(b + 192, 16, s.sub);
  s.d = b + 208;
}

void spread_iq4_xs(const uint8_t* b, Spread& s) {
  for (int g = 0; g < 8; ++g) {
    nibbles32(b + 8 + g * 16, s.code + g * 32);
    s.sub[g] = static_cast<uint8_t>((b[4 + g / 2] >> (g % 2 * 4) & 15) | (b[2 + g / 4] >> (g % 4 * 2) & 3) << 4);
  }
  s.d = b;
}

inline __attribute__((always_inline)) void spread(Format f, const uint8_t* b, Spread& s) {
  s.d = b, s.m = b + 2;
  switch (f) {
    case Format::Q4_0: case Format::IQ4_NL: return nibbles32(b + 2, s.code);
    case Format::Q4_1: return nibbles32(b + 4, s.code);
    case Format::Q5_0: nibbles32(b + 6, s.code); return fifth_bits(b + 2, s.code);
    case Format::Q5_1: nibbles32(b + 8, s.code); return fifth_bits(b + 4, s.code);
    case Format::Q8_0: std::copy_n(b + 2, 32, s.code); return;
    case Format::Q2_K: return spread_q2_k(b, s);
    case Format::Q3_K: return spread_q3_k(b, s);
    case Format::Q4_K: six_bit_pairs(b + 4, s.sub); return spread_k_nibbles(b + 16, s.code);
    case Format::Q5_K:
      six_bit_pairs(b + 4, s.sub);
      spread_k_nibbles(b + 48, s.code);
      for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 32; ++i) s.code[32 * g + i] |= static_cast<uint8_t>((b[16 + i] >> g & 1) << 4);
      return;
    case Format::Q6_K: return spread_q6_k(b, s);
    case Format::IQ4_XS: return spread_iq4_xs(b, s);
    default: return;
  }
}

// Bits of the codes in the low and high plane. A step is 4 codes of each row, one byte a code. Of 4 bits: vector i (32
// bytes) of a group holds step i and, above, step i + 4; of 2 bits: steps 4i .. 4i + 3; of 1 bit: all eight.
constexpr int low_bits(const Layout& l) { return l.low * 8 / (l.block * kTile); }
constexpr int high_bits(const Layout& l) { return l.high * 8 / (l.block * kTile); }
constexpr uint32_t each_byte(int bits) { return 0x01010101u * ((1u << bits) - 1); }

// Which step lies at bit t * Bits of vector i.
template <int Bits>
constexpr int step_at(int i, int t) {
  return Bits == 4 ? i + 4 * t : 8 / Bits * i + t;
}

// One group of one row of one plane; step s of `word` is four codes, of which bits From .. From + Bits - 1 are meant.
template <int Bits, int From>
void put_steps(const uint32_t* word, uint8_t* plane) {
  for (int i = 0; i < Bits; ++i) {
    uint32_t v = 0;
    for (int t = 0; t < 8 / Bits; ++t) v |= (word[step_at<Bits>(i, t)] >> From & each_byte(Bits)) << (Bits * t);
    std::memcpy(plane + 32 * i, &v, 4);
  }
}

template <int Bits, int From>
void get_steps(const uint8_t* plane, uint32_t* word) {
  for (int i = 0; i < Bits; ++i) {
    uint32_t v;
    std::memcpy(&v, plane + 32 * i, 4);
    for (int t = 0; t < 8 / Bits; ++t) word[step_at<Bits>(i, t)] |= (v >> (Bits * t) & each_byte(Bits)) << From;
  }
}

// One group of one row; low and high are the group's, at that row.
template <Format F>
void put_codes(const uint8_t* code, uint8_t* low, uint8_t* high) {
  constexpr int lb = low_bits(kLayouts[static_cast<int>(F)]), hb = high_bits(kLayouts[static_cast<int>(F)]);
  uint32_t word[8];
  std::memcpy(word, code, 32);
  put_steps<lb, 0>(word, low);
  if constexpr (hb > 0) put_steps<hb, lb>(word, high);
}

template <Format F>
void get_codes(const uint8_t* low, const uint8_t* high, uint8_t* code) {
  constexpr int lb = low_bits(kLayouts[static_cast<int>(F)]), hb = high_bits(kLayouts[static_cast<int>(F)]);
  uint32_t word[8] = {};
  get_steps<lb, 0>(low, word);
  if constexpr (hb > 0) get_steps<hb, lb>(high, word);
  std::memcpy(code, word, 32);
}

constexpr bool has_min(Format f) {
  return f == Format::Q4_1 || f == Format::Q5_1 || f == Format::Q2_K || f == Format::Q4_K || f == Format::Q5_K;
}

// Sub-scales of the 8 rows, value-major: value v of row r is number v * 8 + r.
void put_meta(Format f, const Spread* rows, uint8_t* meta) {
  for (int r = 0; r < kTile; ++r) {
    std::copy_n(rows[r].d, 2, meta + 2 * r);
    if (has_min(f)) std::copy_n(rows[r].m, 2, meta + 16 + 2 * r);
  }
  uint8_t* sub = meta + (has_min(f) ? 32 : 16);
  if (f == Format::Q2_K || f == Format::Q6_K) {
    for (int v = 0; v < 128; ++v) sub[v] = rows[v % 8].sub[v / 8];
  } else if (layout(f).block == 256) {
    const int count = f == Format::IQ4_XS ? 64 : 128;
    for (int v = 0; v < count; ++v) {
      const int value = rows[v % 8].sub[v / 8];
      sub[v % (count / 2)] |= static_cast<uint8_t>((value & 15) << (v / (count / 2) * 4));
      sub[count / 2 + v % (count / 4)] |= static_cast<uint8_t>(value >> 4 << (v / (count / 4) * 2));
    }
  }
}

template <Format F>
void pack_tile(int64_t tile, int64_t n, int64_t k, int64_t first, const uint8_t* raw, const Planes& p, uint8_t* out) {
  constexpr Layout l = kLayouts[static_cast<int>(F)];
  constexpr BlockSize file = kBlocks[static_cast<int>(F)];
  const int live = static_cast<int>(std::min<int64_t>(kTile, n - tile * kTile));
  static constexpr uint8_t kZeroBlock[256] = {};
  Spread rows[kTile];
  for (int64_t b = 0; b < p.blocks; ++b) {
    uint8_t* meta = out + tile * p.meta_tile + b * l.meta;
    uint8_t* low = out + p.low_start + tile * p.low_tile + b * l.low;
    uint8_t* high = out + p.high_start + tile * p.high_tile + b * l.high;
    for (int r = 0; r < kTile; ++r) {
      const uint8_t* src = r < live ? raw + ((tile * kTile + r - first) * (k / file.elements) + b) * file.bytes : kZeroBlock;
      spread(F, src, rows[r]);
      for (int g = 0; g < l.block / kGroup; ++g)
        put_codes<F>(rows[r].code + kGroup * g, low + g * 32 * low_bits(l) + 4 * r, high + g * 32 * high_bits(l) + 4 * r);
    }
    put_meta(F, rows, meta);
  }
}

// f(std::integral_constant<Format, F>) for an integer format known at run time.
template <class Fn>
void with_format(Format format, Fn f) {
  switch (format) {
#define HEADRACE_CASE(F) \
  case Format::F: return f(std::integral_constant<Format, Format::F>());
    HEADRACE_CASE(Q4_0) HEADRACE_CASE(Q4_1) HEADRACE_CASE(Q5_0) HEADRACE_CASE(Q5_1) HEADRACE_CASE(Q8_0)
    HEADRACE_CASE(Q2_K) HEADRACE_CASE(Q3_K) HEADRACE_CASE(Q4_K) HEADRACE_CASE(Q5_K) HEADRACE_CASE(Q6_K)
    HEADRACE_CASE(IQ4_NL) HEADRACE_CASE(IQ4_XS)
#undef HEADRACE_CASE
    default: return;
  }
}

int64_t float_bytes(Format f, int64_t n, int64_t k) { return n * k * block_size(f).bytes; }

// The values of one block of one row, from its packed records.
template <Format F>
void dequantise_block(int row, const uint8_t* meta, const uint8_t* low, const uint8_t* high, float* out) {
  constexpr Format f = F;
  constexpr Layout l = kLayouts[static_cast<int>(F)];
  const float d = load_half(meta + 2 * row), m = has_min(f) ? load_half(meta + 16 + 2 * row) : 0.0f;
  const uint8_t* sub = meta + (has_min(f) ? 32 : 16);
  uint8_t six[128], code[256];
  for (int g = 0; g < l.block / kGroup; ++g)
    get_codes<F>(low + g * 32 * low_bits(l) + 4 * row, high + g * 32 * high_bits(l) + 4 * row, code + kGroup * g);
  if (f == Format::Q3_K || f == Format::Q4_K || f == Format::Q5_K) unpack_six_bits(sub, 128, six);
  if (f == Format::IQ4_XS) unpack_six_bits(sub, 64, six);
  for (int i = 0; i < l.block; ++i) {
    const int c = code[i], g16 = i / 16 * 8 + row, g32 = i / 32 * 8 + row;
    const float u = static_cast<float>(c);
    switch (f) {
      case Format::Q4_0: out[i] = d * (u - 8); break;
      case Format::Q5_0: out[i] = d * (u - 16); break;
      case Format::Q4_1: case Format::Q5_1: out[i] = d * u + m; break;
      case Format::Q8_0: out[i] = d * static_cast<float>(static_cast<int8_t>(c)); break;
      case Format::Q2_K: out[i] = d * static_cast<float>(sub[g16] & 15) * u - m * static_cast<float>(sub[g16] >> 4); break;
      case Format::Q3_K: out[i] = d * static_cast<float>(six[g16] - 32) * (u - 4); break;
      case Format::Q4_K: case Format::Q5_K:
        out[i] = d * static_cast<float>(six[g32]) * u - m * static_cast<float>(six[64 + g32]); break;
      case Format::Q6_K: out[i] = d * static_cast<float>(static_cast<int8_t>(sub[g16])) * (u - 32); break;
      case Format::IQ4_NL: out[i] = d * static_cast<float>(kCodebook[c]); break;
      case Format::IQ4_XS: out[i] = d * static_cast<float>(six[g32] - 32) * static_cast<float>(kCodebook[c]); break;
      default: break;
    }
  }
}

}  // namespace

BlockSize block_size(Format f) { return kBlocks[static_cast<int>(f)]; }

int64_t quant_bytes(int64_t rows, int64_t k) { return rows * (k / kGroup) * QuantView::kBytes; }

int64_t packed_bytes(Format f, int64_t n, int64_t k) {
  return is_float(f) ? align64(float_bytes(f, n, k)) : Planes(f, n, k).total;
}

void pack(Format f, int64_t n, int64_t k, const uint8_t* raw, uint8_t* out) { pack_rows(f, n, k, 0, n, raw, out); }

void pack_rows(Format f, int64_t n, int64_t k, int64_t first, int64_t count, const uint8_t* raw, uint8_t* out) {
  if (is_float(f)) {
    const int64_t bytes = float_bytes(f, n, k);
    if (first == 0) std::memset(out + bytes, 0, static_cast<size_t>(align64(bytes) - bytes));
    std::memcpy(out + float_bytes(f, first, k), raw, static_cast<size_t>(float_bytes(f, count, k)));
    return;
  }
  const Planes p(f, n, k);
  if (first == 0) std::memset(out, 0, static_cast<size_t>(p.total));
  with_format(f, [&](auto format) {
    for (int64_t tile = first / kTile; tile * kTile < first + count; ++tile) pack_tile<format()>(tile, n, k, first, raw, p, out);
  });
}

void dequantise_row(const Matrix& w, int64_t row, float* out) {
  if (is_float(w.format)) {
    const int64_t size = block_size(w.format).bytes;
    const uint8_t* src = w.data + row * w.k * size;
    if (w.format == Format::F32) std::memcpy(out, src, static_cast<size_t>(w.k * 4));
    if (w.format == Format::F16) for (int64_t i = 0; i < w.k; ++i) out[i] = load_half(src + 2 * i);
    if (w.format == Format::BF16) for (int64_t i = 0; i < w.k; ++i) out[i] = load_bfloat(src + 2 * i);
    return;
  }
  const Planes p(w.format, w.n, w.k);
  const Layout& l = layout(w.format);
  const int64_t tile = row / kTile;
  with_format(w.format, [&](auto format) {
    for (int64_t b = 0; b < p.blocks; ++b)
      dequantise_block<format()>(static_cast<int>(row % kTile), w.data + tile * p.meta_tile + b * l.meta,
                                 w.data + p.low_start + tile * p.low_tile + b * l.low,
                                 w.data + p.high_start + tile * p.high_tile + b * l.high, out + b * l.block);
  });
}

}  // namespace headrace
