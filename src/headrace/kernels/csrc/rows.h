// The rows of a run and the cache of a layer, as the kernels see them: checked once, then plain pointers.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "ops.h"

namespace headrace {

// kernels/device.py, Rows. The pointers belong to arrays that the Python object keeps alive.
struct RowsView {
  int64_t count = 0, wanted_count = 0, list_size = 0;
  const int32_t *token = nullptr, *position = nullptr, *slot = nullptr, *base = nullptr, *base_len = nullptr,
                *extra = nullptr, *extra_len = nullptr, *lists = nullptr, *wanted = nullptr;
  uint64_t serial = 0;                // identity, for the rope tables
  int32_t last_position = -1;
  std::vector<int32_t> pages;         // every page any row reads or writes, once

  void check();  // throws std::invalid_argument

  // The slot of the row's position p.
  int32_t slot_at(int64_t row, int64_t p) const {
    return p < base_len[row] ? lists[base[row] + p] : lists[extra[row] + p - base_len[row]];
  }
};

// One layer's cache: page addresses may change between steps.
struct KVView {
  int64_t kv_heads = 0, head_dim = 0;
  int k_bits = 16, v_bits = 16;
  const uint64_t* pages = nullptr;
  int64_t page_count = 0;

  int64_t k_record() const { return record_bytes(k_bits, head_dim); }
  int64_t v_record() const { return record_bytes(v_bits, head_dim); }
  // V's part starts at a multiple of 64.
  int64_t v_offset() const { return round_up(kv_heads * kPage * k_record(), 64); }
  int64_t page_bytes() const { return round_up(v_offset() + kv_heads * kPage * v_record(), 64); }

  uint8_t* k_at(int64_t head, int32_t slot) const {
    return reinterpret_cast<uint8_t*>(pages[slot / kPage]) + (head * kPage + slot % kPage) * k_record();
  }
  uint8_t* v_at(int64_t head, int32_t slot) const {
    return reinterpret_cast<uint8_t*>(pages[slot / kPage]) + v_offset() + (head * kPage + slot % kPage) * v_record();
  }
  void check(const RowsView& rows) const;  // every page of the rows is there
};

}  // namespace headrace
