// Running a bound program: one call a (layer, run). Nothing here allocates once the arena has grown.
#include <algorithm>
#include <cstring>
#include <string>

#include "program.h"
#include "scalar_math.h"

namespace headrace {

namespace {
constexpr int64_t kSmall = 12000;        // floats touched: below this, waking other threads costs more than it brings
constexpr int64_t kChunkBytes = 65536;   // of weights, for few rows
constexpr int64_t kFewRows = 8;
constexpr int64_t kColumns = 64;         // outputs of a chunk, for many rows
}  // namespace

class Runner {
 public:
  Runner(const Bound& bound, Device& device, float* x, float* out, RowsView& rows, const KVView* kv)
      : b_(bound), p_(*bound.program_), d_(device), rows_(rows), kv_(kv), count_(rows.count), x_(x), out_(out) {
    uint8_t* memory = device.arena.take(bound.scratch_bytes(rows.count, device.pool.threads(), rows.last_position));
    registers_ = reinterpret_cast<float*>(memory);
    memory += round_up(bound.floats_ * rows.count * 4, 64);
    quant_bytes_ = bound.quant_k_ ? round_up(quant_bytes(rows.count, bound.quant_k_), 64) : 0;
    quant_ = memory;
    scratch_ = memory + 2 * quant_bytes_;
  }

  void run() {
    check();
    for (const Op& op : p_.ops)
      if (op.kind == Op::Rope) prepare(*d_.ropes[static_cast<size_t>(op.table)]);
    for (const Segment& s : b_.segments_) {
      if (s.kind == Segment::Rowwise) rowwise(s);
      else if (s.kind == Segment::Matmul) matmul(s);
      else attention(d_.pool, d_.ops, b_.attention_, rows_, *kv_, reg(op_at(s.begin).src), reg(op_at(s.begin).dst), scratch_);
    }
  }

 private:
  const Op& op_at(int i) const { return p_.ops[static_cast<size_t>(i)]; }
  const Matrix& weight(int w) const { return b_.weights_[static_cast<size_t>(w)]; }
  const float* vector(int w) const { return w < 0 ? nullptr : reinterpret_cast<const float*>(weight(w).data); }
  int64_t width(int r) const { return b_.regs_[static_cast<size_t>(r)].width; }
  float* reg(int r) const {
    return r == 0 ? x_ : r == p_.logits ? out_ : registers_ + b_.regs_[static_cast<size_t>(r)].offset * rows_.count;
  }
  float* reg(int r, int64_t row) const { return reg(r) + row * width(r); }
  QuantRows quant(int which, int64_t k) const { return {count_, k, quant_ + which * quant_bytes_}; }

  void check() const {
    if (p_.needs_kv) {
      if (!kv_) throw std::invalid_argument("program: this layer needs a cache");
      kv_->check(rows_);
    }
    for (const Op& op : p_.ops) {
      if (op.kind == Op::StoreKV && (width(op.src) != kv_->kv_heads * kv_->head_dim))
        throw std::invalid_argument("program: k and v don't fit the cache");
      if (op.kind == Op::Attend && (op.kv_heads != kv_->kv_heads || op.head_dim != kv_->head_dim))
        throw std::invalid_argument("program: Attend's heads aren't the cache's");
      if (op.kind != Op::Gather) continue;
      for (int64_t r = 0; r < rows_.count; r++) {
        const int64_t i = (op.by_position ? rows_.position[r] : rows_.token[r]) + op.n;
        if (i < 0 || i >= weight(op.weight).n)
          throw std::invalid_argument("program: row " + std::to_string(r) + " asks for entry " + std::to_string(i) +
                                      " of a table of " + std::to_string(weight(op.weight).n));
      }
    }
  }

  void prepare(RopeTable& t) const {
    if (t.serial == rows_.serial) return;
    const size_t n = t.inv_freq.size(), need = static_cast<size_t>(rows_.count) * 2 * n;
    if (t.cos_sin.size() < need) t.cos_sin.resize(need);
    for (int64_t r = 0; r < rows_.count; r++) {
      float* to = t.cos_sin.data() + static_cast<size_t>(r) * 2 * n;
      for (size_t i = 0; i < n; i++) {
        double s, c;
        sincos64(rows_.position[r] * t.inv_freq[i], &s, &c);
        to[i] = static_cast<float>(c * t.magnitude);
        to[n + i] = static_cast<float>(s * t.magnitude);
      }
    }
    t.serial = rows_.serial;
  }

  void rowwise(const Segment& s) {
    if (s.begin < s.end && op_at(s.begin).kind == Op::Copy && op_at(s.begin).flag) count_ = rows_.wanted_count;
    int64_t floats = s.quantise ? width(s.source) : 0;
    for (int i = s.begin; i < s.end; i++) floats += width(std::max({op_at(i).dst, op_at(i).src, op_at(i).src2}));
    const auto block = [&](int64_t r0, int64_t r1) {
      for (int i = s.begin; i < s.end; i++)
        for (int64_t r = r0; r < r1; r++) one_row(op_at(i), r);
      if (s.quantise) {
        QuantRows q = quant(current_, width(s.source));
        d_.path.quantise(reg(s.source), width(s.source), q, r0, r1);
      }
    };
    if (count_ == 0) return;
    if (floats * count_ < kSmall || d_.pool.threads() == 1) return block(0, count_);
    const int64_t step = std::max<int64_t>(1, std::min(count_ / (4 * d_.pool.threads()), 65536 / std::max<int64_t>(1, floats)));
    d_.pool.each((count_ + step - 1) / step, [&](int64_t i, int) { block(i * step, std::min(count_, (i + 1) * step)); });
  }

  void one_row(const Op& op, int64_t r) const {
    const VecOps& v = d_.ops;
    switch (op.kind) {
      case Op::Gather: return gather(op, r);
      case Op::Norm: {
        const int64_t w = width(op.src), n = op.n ? op.n : w;
        for (int64_t i = 0; i < w; i += n)
          v.norm(reg(op.src, r) + i, reg(op.dst, r) + i, n, vector(op.weight), vector(op.bias), op.value, op.flag);
        return;
      }
      case Op::Rope:
        return v.rope(reg(op.dst, r), op.heads, op.head_dim,
                      d_.ropes[static_cast<size_t>(op.table)]->cos_sin.data() + r * 2 * op.n, static_cast<int>(op.n), op.flag);
      case Op::StoreKV: {
        const int dim = static_cast<int>(kv_->head_dim);
        for (int64_t h = 0; h < kv_->kv_heads; h++) {
          v.store_record(kv_->k_bits, reg(op.src, r) + h * dim, dim, kv_->k_at(h, rows_.slot[r]));
          v.store_record(kv_->v_bits, reg(op.src2, r) + h * dim, dim, kv_->v_at(h, rows_.slot[r]));
        }
        return;
      }
      case Op::Act:
        return v.activate(op.act, reg(op.src, r), op.src2 < 0 ? nullptr : reg(op.src2, r), reg(op.dst, r), width(op.dst));
      case Op::Add: return v.add(reg(op.dst, r), reg(op.src, r), width(op.dst));
      case Op::Copy:
        std::memmove(reg(op.dst, r), reg(op.src, op.flag ? rows_.wanted[r] : r), static_cast<size_t>(width(op.dst)) * 4);
        return;
      case Op::Scale: return v.scale(reg(op.dst, r), width(op.dst), op.value, op.softcap);
      default: return;
    }
  }

  void gather(const Op& op, int64_t r) const {
    const Matrix& table = weight(op.weight);
    const int64_t i = (op.by_position ? rows_.position[r] : rows_.token[r]) + op.n;
    float* dst = reg(op.dst, r);
    if (!op.flag && op.value == 1.0f) return dequantise_row(table, i, dst);
    float* line = op.flag ? reinterpret_cast<float*>(scratch_) + r * round_up(table.k, 16) : dst;
    dequantise_row(table, i, line);
    d_.ops.scaled_copy(dst, line, op.value, table.k, op.flag);
  }

  struct Part {
    const Op* op;
    int64_t step, chunks;
  };

  // Outputs a chunk, a multiple of 32 where an Act or a quantisation follows.
  int64_t step_of(const Matrix& w, bool fused) const {
    const int64_t each = std::max<int64_t>(1, packed_bytes(w.format, 8, w.k) / 8);
    const int64_t unit = fused ? 32 : 8;
    const int64_t fair = (w.n + 3 * d_.pool.threads() - 1) / (3 * d_.pool.threads());
    const int64_t want = count_ <= kFewRows ? std::min(kChunkBytes / each, std::max<int64_t>(fair, 8)) : kColumns;
    return std::max(unit, round_up(want, unit));
  }

  void matmul(const Segment& s) {
    if (count_ == 0) return;
    const int linears = s.end - s.begin - s.fused;
    Part parts[8];
    int64_t total = 0;
    for (int i = 0; i < linears; i++) {
      const Op& op = op_at(s.begin + i);
      const Matrix& w = weight(op.weight);
      parts[i] = {&op, step_of(w, s.fused), 0};
      if (s.fused) parts[i].step = parts[0].step;
      parts[i].chunks = (w.n + parts[i].step - 1) / parts[i].step;
      total += parts[i].chunks;
    }
    const QuantRows in = quant(current_, width(parts[0].op->src));
    if (s.fused && count_ <= kFewRows) {
      const Op& act = op_at(s.end - 1);
      d_.pool.each(parts[0].chunks, [&](int64_t c, int) {
        for (int i = 0; i < linears; i++) columns(parts[i], c, in);
        finish_columns(s, act, c * parts[0].step, std::min(width(act.dst), (c + 1) * parts[0].step));
      });
      if (s.quantise) current_ = 1 - current_;
      return;
    }
    d_.pool.each(total, [&](int64_t c, int) {
      int i = 0;
      while (c >= parts[i].chunks) c -= parts[i++].chunks;
      columns(parts[i], c, in);
    });
    if (s.fused) act_rows(s);
  }

  // The same for many rows: columns of many rows lie far apart, so the rows are walked instead.
  void act_rows(const Segment& s) {
    const Op& act = op_at(s.end - 1);
    const int64_t step = std::max<int64_t>(1, std::min<int64_t>(count_ / (4 * d_.pool.threads()), 16));
    d_.pool.each((count_ + step - 1) / step, [&](int64_t i, int) {
      const int64_t r0 = i * step, r1 = std::min(count_, r0 + step);
      for (int64_t r = r0; r < r1; r++) one_row(act, r);
      if (!s.quantise) return;
      QuantRows q = quant(current_, width(act.dst));
      d_.path.quantise(reg(act.dst), width(act.dst), q, r0, r1);
    });
  }

  void columns(const Part& part, int64_t chunk, const QuantRows& in) const {
    const Op& op = *part.op;
    const Matrix& w = weight(op.weight);
    d_.path.matmul(w, &in, reg(op.src), width(op.src), count_, reg(op.dst), w.n, vector(op.bias), op.flag,
                   chunk * part.step, std::min(w.n, (chunk + 1) * part.step));
  }

  // The activation of columns [n0, n1), and their part of the next Linear's quantised source: QuantRows is
  // group-major (formats.h), so a range of groups is a QuantRows of its own.
  void finish_columns(const Segment& s, const Op& act, int64_t n0, int64_t n1) const {
    for (int64_t r = 0; r < count_; r++)
      d_.ops.activate(act.act, reg(act.src, r) + n0, act.src2 < 0 ? nullptr : reg(act.src2, r) + n0, reg(act.dst, r) + n0, n1 - n0);
    if (!s.quantise) return;
    QuantRows q = quant(1 - current_, n1 - n0);
    q.data += quant_bytes(count_, n0);
    d_.path.quantise(reg(act.dst) + n0, width(act.dst), q, 0, count_);
  }

  const Bound& b_;
  const Program& p_;
  Device& d_;
  RowsView& rows_;
  const KVView* kv_;
  int64_t count_;  // rows now: fewer after Copy(wanted)
  float *x_, *out_, *registers_;
  uint8_t *quant_, *scratch_;
  int64_t quant_bytes_;
  int current_ = 0;  // which of the two quantised sources the next Linear reads
};

int64_t Bound::scratch_bytes(int64_t rows, int threads, int32_t last_position) const {
  int64_t spare = attention_bytes(attention_, rows, last_position, threads);
  for (const Op& op : program_->ops)
    if (op.kind == Op::Gather && op.flag) spare = std::max(spare, rows * round_up(regs_[static_cast<size_t>(op.dst)].width, 16) * 4);
  const int64_t quant = quant_k_ ? 2 * round_up(quant_bytes(rows, quant_k_), 64) : 0;
  return round_up(floats_ * rows * 4, 64) + quant + round_up(spare, 64);
}

void Bound::run(Device& device, float* x, float* out, RowsView& rows, const KVView* kv) const {
  std::lock_guard<std::mutex> lock(device.mutex);
  FloatMode mode;
  Runner(*this, device, x, out, rows, kv).run();
}

}  // namespace headrace
