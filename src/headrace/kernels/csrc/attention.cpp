#include "attention.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

namespace headrace {

namespace {

constexpr int kQueries = 96;                       // of a tile, unless one row has more
constexpr int64_t kMostPartials = int64_t{8} << 20;  // bytes
constexpr int64_t kMostScores = int64_t{1} << 20;    // bytes of a thread, unless one row has more

constexpr int64_t kFewest = 32;                      // positions that sparse attention takes beside a row's own

bool sparse(const AttentionShape& shape) { return shape.keep < 1.0; }

struct Range {
  int lo, hi;  // positions
  bool empty() const { return lo >= hi; }
};

// Everything about a call that its units share.
struct Call {
  const VecOps& ops;
  const AttentionShape& shape;
  const RowsView& rows;
  const KVView& kv;
  const float* q;
  float* out;
  int group, stride, queries;   // queries of one kv head a row; padded head_dim; of the largest tile
  int tiles = 0, chunks = 0;    // chunks: of the longest row
  int32_t* starts = nullptr;    // [tiles + 1] first row of each tile
  uint8_t* threads = nullptr;   // scratch of each thread
  float* partials = nullptr;    // [chunks, rows, heads, stride + 2]

  Range seen(int64_t row) const {
    const int end = rows.position[row] + 1;
    return {shape.window > 0 ? std::max(0, end - shape.window) : 0, end};
  }
  Range seen(int64_t row, int chunk) const {
    const Range r = seen(row);
    return {std::max(r.lo, chunk * kChunk), std::min(r.hi, (chunk + 1) * kChunk)};
  }
  float* partial(int chunk, int64_t row, int head) const {
    return partials + ((int64_t{chunk} * rows.count + row) * shape.heads + head) * (stride + 2);
  }
};

// One thread's memory.
struct Local {
  float *q, *scores, *tile, *acc, *max, *sum, *run_acc, *run_max, *run_sum, *floor;
  int *lo, *hi, *own;
  int32_t* keys;
  const uint8_t **k, **v;

  // kept: scores of a tile, most: of a query, for sparse attention.
  static int64_t bytes(int queries, int stride, int64_t kept, int64_t most) {
    const int64_t floats = int64_t{queries} * (3 * stride + kChunk + 8) + kPage * stride + kept + most;
    return round_up(floats * 4 + 2 * kChunk * static_cast<int64_t>(sizeof(void*)), 64) + 64;
  }
  Local(uint8_t* p, int queries, int stride, int64_t kept, int64_t most) {
    const auto take = [&](int64_t n) {
      float* f = reinterpret_cast<float*>(p);
      p += n * 4;
      return f;
    };
    k = reinterpret_cast<const uint8_t**>(take(kChunk * 2));
    v = reinterpret_cast<const uint8_t**>(take(kChunk * 2));
    tile = take(kPage * stride);
    q = take(int64_t{queries} * stride);
    acc = take(int64_t{queries} * stride);
    run_acc = take(int64_t{queries} * stride);
    scores = take(int64_t{queries} * kChunk);
    max = take(queries), sum = take(queries), run_max = take(queries), run_sum = take(queries);
    lo = reinterpret_cast<int*>(take(queries)), hi = reinterpret_cast<int*>(take(queries));
    own = reinterpret_cast<int*>(take(queries)), floor = take(queries);
    keys = reinterpret_cast<int32_t*>(take(most));
    if (kept) scores = take(kept);
  }
};

// Queries of the largest tile; of a sparse one the scores of all its chunks are kept.
int largest_tile(const AttentionShape& shape, int chunks) {
  const int64_t fit = sparse(shape) ? std::min<int64_t>(kQueries, kMostScores / (int64_t{chunks} * kChunk * 4)) : kQueries;
  return std::max(shape.heads / shape.kv_heads, static_cast<int>(fit));
}
int padded(const AttentionShape& shape) { return static_cast<int>(round_up(shape.head_dim, 16)); }
int64_t kept_scores(const AttentionShape& shape, int chunks) {
  return sparse(shape) ? std::max(kMostScores / 4, int64_t{shape.heads / shape.kv_heads} * chunks * kChunk) : 0;
}
int64_t most_keys(const AttentionShape& shape, int chunks) { return sparse(shape) ? int64_t{chunks} * kChunk : 0; }
int64_t local_bytes(const AttentionShape& shape, int chunks) {
  return Local::bytes(largest_tile(shape, 1), padded(shape), kept_scores(shape, chunks), most_keys(shape, chunks));
}
Local local(const Call& c, int thread) {
  return Local(c.threads + thread * local_bytes(c.shape, c.chunks), c.queries, c.stride, kept_scores(c.shape, c.chunks),
               most_keys(c.shape, c.chunks));
}

// Queries of rows [r0, r1) for a kv head, times the scale, padded with zeros.
void load_queries(const Call& c, int head, int64_t r0, int64_t r1, float* to) {
  const int dim = c.shape.head_dim;
  for (int64_t r = r0; r < r1; r++) {
    for (int j = 0; j < c.group; j++, to += c.stride) {
      c.ops.scaled_copy(to, c.q + (r * c.shape.heads + head * c.group + j) * dim, c.shape.scale, dim, false);
      for (int d = dim; d < c.stride; d++) to[d] = 0.0f;
    }
  }
}

// Partials of rows [a, b), which read the chunk from the same slots, into l's max, sum and acc. at: their first query's
// number in the tile.
void attend_rows(const Call& c, Local& l, int head, int chunk, int64_t a, int64_t b, int64_t at,
                 AttendTile::Stage stage = AttendTile::Whole) {
  const int origin = chunk * kChunk;
  int first = kChunk, last = 0, i = 0;
  int64_t longest = a;
  for (int64_t r = a; r < b; r++) {
    const Range s = c.seen(r, chunk);
    first = std::min(first, s.lo - origin);
    if (s.hi - origin > last) last = s.hi - origin, longest = r;
    const int own = c.rows.position[r] - origin;
    for (int j = 0; j < c.group; j++, i++) l.lo[i] = s.lo - origin, l.hi[i] = s.hi - origin, l.own[i] = own;
  }
  for (int p = first; p < last; p++) {
    const int32_t slot = c.rows.slot_at(longest, origin + p);
    l.k[p] = c.kv.k_at(head, slot);
    l.v[p] = c.kv.v_at(head, slot);
  }
  // Kernels take four positions at a time; what they see outside the range they forget.
  for (int p = first & ~3; p < first; p++) l.k[p] = l.k[first];
  for (int p = last; p < ((last + 3) & ~3); p++) l.k[p] = l.k[last - 1];
  float* scores = stage == AttendTile::Whole ? l.scores : l.scores + (int64_t{chunk} * c.queries + at) * kChunk;
  c.ops.attend({i, c.shape.head_dim, c.stride, c.kv.k_bits, c.kv.v_bits, c.shape.softcap, l.q + at * c.stride, l.lo, l.hi,
                l.k, l.v, scores, l.tile, l.max, l.sum, l.acc, stage, l.floor + at, l.own});
}

// Floats as integers in the same order, and back.
int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The least score that brings its value, for a row's query (number i of its tile) whose scores are all there.
float floor_of(const Call& c, const Local& l, int64_t row, int64_t i) {
  const Range s = c.seen(row);
  const int64_t others = s.hi - s.lo - 1;
  const int64_t kept = std::max(kFewest, static_cast<int64_t>(c.shape.keep * static_cast<double>(others)));
  if (kept >= others) return -std::numeric_limits<float>::infinity();
  int32_t* to = l.keys;
  for (int p = s.lo; p < s.hi - 1;) {
    const int n = std::min(s.hi - 1, (p / kChunk + 1) * kChunk) - p;
    std::memcpy(to, l.scores + (int64_t{p / kChunk} * c.queries + i) * kChunk + p % kChunk, static_cast<size_t>(n) * 4);
    p += n, to += n;
  }
  for (int64_t j = 0; j < others; j++) l.keys[j] = ordered(l.keys[j]);
  std::nth_element(l.keys, l.keys + kept - 1, to, std::greater<int32_t>());
  const int32_t bits = ordered(l.keys[kept - 1]);
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Cuts rows [r0, r1) where they can't share a chunk, and calls f(a, b) for each piece that sees any of it.
template <class F>
void pieces(const Call& c, int chunk, int64_t r0, int64_t r1, F f) {
  const auto shared = [&](int64_t r, const Range& s) { return s.hi <= c.rows.base_len[r]; };
  for (int64_t a = r0; a < r1;) {
    const Range s = c.seen(a, chunk);
    int64_t b = a + 1;
    if (!s.empty()) {
      if (shared(a, s))
        for (; b < r1; b++) {
          const Range t = c.seen(b, chunk);
          if (t.empty() || !shared(b, t)) break;
        }
      f(a, b);
    }
    a = b;
  }
}

void finish(const Call& c, int64_t row, int head, float sum, const float* acc) {
  float* to = c.out + (row * c.shape.heads + head) * c.shape.head_dim;
  c.ops.scaled_copy(to, acc, 1.0f / sum, c.shape.head_dim, false);
}

void whole_tile(const Call& c, int tile, int head, int thread) {
  Local l = local(c, thread);
  const int64_t r0 = c.starts[tile], r1 = c.starts[tile + 1];
  load_queries(c, head, r0, r1, l.q);
  int first = c.chunks, last = 0;
  for (int64_t r = r0; r < r1; r++) {
    first = std::min(first, c.seen(r).lo / kChunk);
    last = std::max(last, c.seen(r).hi);
  }
  if (sparse(c.shape)) {
    for (int chunk = first; chunk * kChunk < last; chunk++)
      pieces(c, chunk, r0, r1, [&](int64_t a, int64_t b) {
        attend_rows(c, l, head, chunk, a, b, (a - r0) * c.group, AttendTile::Scores);
      });
    for (int64_t r = r0, i = 0; r < r1; r++)
      for (int j = 0; j < c.group; j++, i++) l.floor[i] = floor_of(c, l, r, i);
  }
  const AttendTile::Stage stage = sparse(c.shape) ? AttendTile::Values : AttendTile::Whole;
  for (int chunk = first; chunk * kChunk < last; chunk++)
    pieces(c, chunk, r0, r1, [&](int64_t a, int64_t b) {
      attend_rows(c, l, head, chunk, a, b, (a - r0) * c.group, stage);
      for (int64_t r = a, i = 0; r < b; r++) {
        const bool fresh = c.seen(r).lo / kChunk == chunk;
        for (int j = 0; j < c.group; j++, i++) {
          const int64_t at = (r - r0) * c.group + j;
          float *acc = l.run_acc + at * c.stride, *part = l.acc + i * c.stride;
          if (fresh) {
            l.run_max[at] = l.max[i], l.run_sum[at] = l.sum[i];
            std::memcpy(acc, part, static_cast<size_t>(c.stride) * 4);
          } else {
            c.ops.fold(l.run_max + at, l.run_sum + at, acc, l.max[i], l.sum[i], part, c.stride);
          }
        }
      }
    });
  for (int64_t r = r0, i = 0; r < r1; r++)
    for (int j = 0; j < c.group; j++, i++) finish(c, r, head * c.group + j, l.run_sum[i], l.run_acc + i * c.stride);
}

void one_chunk(const Call& c, int tile, int head, int chunk, int thread) {
  Local l = local(c, thread);
  const int64_t r0 = c.starts[tile], r1 = c.starts[tile + 1];
  pieces(c, chunk, r0, r1, [&](int64_t a, int64_t b) {
    load_queries(c, head, a, b, l.q);
    attend_rows(c, l, head, chunk, a, b, 0);
    for (int64_t r = a, i = 0; r < b; r++)
      for (int j = 0; j < c.group; j++, i++) {
        float* to = c.partial(chunk, r, head * c.group + j);
        to[0] = l.max[i], to[1] = l.sum[i];
        std::memcpy(to + 2, l.acc + i * c.stride, static_cast<size_t>(c.stride) * 4);
      }
  });
}

void merge(const Call& c, int64_t row, int head) {
  const Range s = c.seen(row);
  float* run = c.partial(s.lo / kChunk, row, head);
  for (int chunk = s.lo / kChunk + 1; chunk * kChunk < s.hi; chunk++) {
    const float* part = c.partial(chunk, row, head);
    c.ops.fold(run, run + 1, run + 2, part[0], part[1], part + 2, c.stride);
  }
  finish(c, row, head, run[1], run + 2);
}

// Tiles: consecutive rows of one sequence, at most `most` each.
void cut_tiles(Call& c, int64_t most) {
  c.tiles = 0;
  for (int64_t r = 0; r < c.rows.count; r++) {
    const bool same = r > 0 && c.rows.base[r] == c.rows.base[r - 1] && r - c.starts[c.tiles - 1] < most;
    if (!same) c.starts[c.tiles++] = static_cast<int32_t>(r);
  }
  c.starts[c.tiles] = static_cast<int32_t>(c.rows.count);
}

int64_t partial_bytes(const AttentionShape& shape, int64_t rows, int64_t chunks) {
  return chunks * rows * shape.heads * (padded(shape) + 2) * 4;
}

}  // namespace

int64_t attention_bytes(const AttentionShape& shape, int64_t rows, int32_t last_position, int threads) {
  if (shape.heads == 0) return 0;
  if (sparse(shape)) last_position = static_cast<int32_t>(std::min<int64_t>(last_position, shape.most - 1));
  const int chunks = last_position / kChunk + 1;
  const int64_t partial = std::min(kMostPartials, partial_bytes(shape, rows, chunks));
  return threads * local_bytes(shape, chunks) + round_up((rows + 1) * 4, 64) + partial;
}

void attention(Pool& pool, const VecOps& ops, const AttentionShape& shape, const RowsView& rows, const KVView& kv,
               const float* q, float* out, uint8_t* scratch) {
  const int chunks = rows.last_position / kChunk + 1;
  if (sparse(shape) && rows.last_position >= shape.most)
    throw std::invalid_argument("attention: a position beyond those that sparse attention has room for");
  Call c{ops, shape, rows, kv, q, out, shape.heads / shape.kv_heads, padded(shape), largest_tile(shape, chunks)};
  const int threads = pool.threads();
  c.threads = scratch, c.chunks = chunks;
  scratch += threads * local_bytes(shape, chunks);
  c.starts = reinterpret_cast<int32_t*>(scratch);
  scratch += round_up((rows.count + 1) * 4, 64);
  c.partials = reinterpret_cast<float*>(scratch);

  int64_t most = std::max(1, c.queries / c.group);
  cut_tiles(c, most);
  const auto units = [&] { return int64_t{c.tiles} * shape.kv_heads; };
  while (threads > 1 && units() < 4 * threads && most * c.group > 12 && most > 1) cut_tiles(c, most /= 2);

  int64_t positions = 0;
  for (int64_t r = 0; r < rows.count; r++) positions += c.seen(r).hi - c.seen(r).lo;
  if (positions * shape.heads * c.stride < 20000) {  // a few microseconds: not worth waking anyone
    for (int64_t u = 0; u < units(); u++) whole_tile(c, static_cast<int>(u / shape.kv_heads), static_cast<int>(u % shape.kv_heads), 0);
    return;
  }
  const bool split = threads > 1 && !sparse(shape) && c.chunks > 1 && units() < 4 * threads &&
                     partial_bytes(shape, rows.count, c.chunks) <= kMostPartials;
  if (!split) {
    pool.each(units(), [&](int64_t u, int thread) {
      whole_tile(c, c.tiles - 1 - static_cast<int>(u / shape.kv_heads), static_cast<int>(u % shape.kv_heads), thread);
    });
    return;
  }
  pool.each(units() * c.chunks, [&](int64_t u, int thread) {
    const int chunk = static_cast<int>(u % c.chunks), unit = static_cast<int>(u / c.chunks);
    one_chunk(c, unit / shape.kv_heads, unit % shape.kv_heads, chunk, thread);
  });
  for (int64_t r = 0; r < rows.count; r++)
    for (int h = 0; h < shape.heads; h++) merge(c, r, h);
}

}  // namespace headrace
