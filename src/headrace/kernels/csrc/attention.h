// Attention of a run over paged K and V: splits it into tiles of queries and chunks of positions.
#pragma once
#include <cstdint>

#include "ops.h"
#include "pool.h"
#include "rows.h"

namespace headrace {

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  float scale = 1.0f, softcap = 0.0f;
  double keep = 1.0;  // under 1: of n other positions only the max(kFewest, floor(keep n)) of greatest score count
  int64_t most = 0;   // positions there may be, when keep < 1
};

// Scratch of all threads together, and of the partials of a run of few rows.
int64_t attention_bytes(const AttentionShape& shape, int64_t rows, int32_t last_position, int threads);

// out[r] = attention of q[r], both [rows, heads * head_dim]. K and V of all rows are in their slots.
void attention(Pool& pool, const VecOps& ops, const AttentionShape& shape, const RowsView& rows, const KVView& kv,
               const float* q, float* out, uint8_t* scratch);

}  // namespace headrace
