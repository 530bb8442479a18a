// Compiling: segments between barriers, widths and places of registers. Running is in runner.cpp.
#include "program.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace headrace {

namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("program: ") + what);
}

// Registers an operation reads and writes.
template <class F>
void registers_of(const Op& op, F f) {
  for (const int r : {op.dst, op.src, op.src2})
    if (r >= 0) f(r);
}

bool writes(const Op& op) { return op.kind != Op::StoreKV; }

// How many operations from i on are Linears of one source that may run side by side.
int linear_group(const std::vector<Op>& ops, int i) {
  int end = i + 1;
  for (; end < static_cast<int>(ops.size()) && end - i < 8; end++) {
    const Op& op = ops[static_cast<size_t>(end)];
    if (op.kind != Op::Linear || op.src != ops[static_cast<size_t>(i)].src) break;
    bool clash = op.dst == op.src;
    for (int j = i; j < end; j++) clash |= ops[static_cast<size_t>(j)].dst == op.dst;
    if (clash) break;
  }
  return end - i;
}

// The Act after a group of Linears needs only the columns they have just made.
bool act_follows(const std::vector<Op>& ops, int begin, int end) {
  if (end >= static_cast<int>(ops.size())) return false;
  const Op &act = ops[static_cast<size_t>(end)], &a = ops[static_cast<size_t>(begin)], &b = ops[static_cast<size_t>(end - 1)];
  if (act.kind != Op::Act || a.flag || b.flag || act.dst == a.src) return false;
  if (end - begin == 1) return act.src == a.dst && act.src2 < 0;
  return end - begin == 2 && std::min(act.src, act.src2) == std::min(a.dst, b.dst) &&
         std::max(act.src, act.src2) == std::max(a.dst, b.dst);
}

}  // namespace

void Program::split() {
  segments.clear();
  std::vector<bool> defined(static_cast<size_t>(registers)), shortened(defined);
  defined[0] = true;
  bool wanted = false;
  for (const Op& op : ops) {
    for (const int r : {op.src, op.src2})
      require(r < 0 || defined[static_cast<size_t>(r)], "an operation reads a register nothing has written");
    const bool rewrites = op.kind == Op::Rope || op.kind == Op::Add || op.kind == Op::Scale ||
                          ((op.kind == Op::Linear || op.kind == Op::Gather) && op.flag);
    require(!rewrites || defined[static_cast<size_t>(op.dst)], "an operation changes a register nothing has written");
    require(op.kind != Op::Linear || op.dst != op.src, "Linear's dst is its src");
    const bool wants = op.kind == Op::Copy && op.flag;
    require(!(wants && wanted), "Copy(wanted) twice");
    wanted |= wants;
    if (wanted) {
      require(op.kind != Op::StoreKV && op.kind != Op::Attend && op.kind != Op::Gather && op.kind != Op::Rope && op.dst != 0,
              "after Copy(wanted) only row-wise operations and Linears on its rows");
      for (const int r : {op.src, op.src2})
        require(r < 0 || wants || shortened[static_cast<size_t>(r)], "after Copy(wanted) all rows are read");
      shortened[static_cast<size_t>(op.dst)] = true;
    }
    if (writes(op)) defined[static_cast<size_t>(op.dst)] = true;
    needs_kv |= op.kind == Op::StoreKV || op.kind == Op::Attend;
  }
  const int count = static_cast<int>(ops.size());
  for (int i = 0; i < count;) {
    const Op& op = ops[static_cast<size_t>(i)];
    int end = i + 1;
    if (op.kind == Op::Linear) {
      end = i + linear_group(ops, i);
      const bool fused = act_follows(ops, i, end);
      segments.push_back({Segment::Matmul, i, end + fused, fused});
    } else if (op.kind == Op::Attend) {
      segments.push_back({Segment::Attention, i, end});
    } else {
      for (; end < count; end++) {
        const Op& next = ops[static_cast<size_t>(end)];
        if (next.kind == Op::Linear || next.kind == Op::Attend || (next.kind == Op::Copy && next.flag)) break;
      }
      segments.push_back({Segment::Rowwise, i, end});
    }
    i = segments.back().end;
  }
}

Bound::Bound(const Program& program, std::vector<Matrix> weights)
    : program_(&program), weights_(std::move(weights)), regs_(static_cast<size_t>(program.registers)) {
  regs_[0].width = program.width;
  for (const Op& op : program.ops) infer(op);
  for (Segment s : program.segments) {
    if (s.kind == Segment::Matmul) {
      const int linears = s.end - s.fused;
      bool integer = false;
      for (int i = s.begin; i < linears; i++) integer |= !is_float(weights_[static_cast<size_t>(program.ops[static_cast<size_t>(i)].weight)].format);
      if (integer) {
        const int source = program.ops[static_cast<size_t>(s.begin)].src;
        const int64_t k = regs_[static_cast<size_t>(source)].width;
        quant_k_ = std::max(quant_k_, k);
        Segment* before = segments_.empty() ? nullptr : &segments_.back();
        const bool follows = before && (before->kind == Segment::Rowwise ||
                                        (before->fused && k % 32 == 0 && program.ops[static_cast<size_t>(before->end - 1)].dst == source));
        if (!follows) segments_.push_back({Segment::Rowwise, s.begin, s.begin});
        segments_.back().quantise = true;
        segments_.back().source = source;
      }
    }
    segments_.push_back(s);
  }
  place();
}

// Width of what an operation writes, and whether its shapes agree.
void Bound::infer(const Op& op) {
  const auto width = [&](int r) { return regs_[static_cast<size_t>(r)].width; };
  const auto weight = [&](int w) -> const Matrix& { return weights_.at(static_cast<size_t>(w)); };
  const auto vector = [&](int w, int64_t n) {
    require(w < 0 || (weight(w).n == 1 && weight(w).k == n && weight(w).format == Format::F32),
            "a bias or norm weight has another length than its register");
  };
  int64_t made = op.src >= 0 ? width(op.src) : 0;
  switch (op.kind) {
    case Op::Gather: made = weight(op.weight).k; break;
    case Op::Norm:
      require(op.n == 0 || made % op.n == 0, "a register isn't a whole number of norm groups");
      vector(op.weight, op.n ? op.n : made);
      vector(op.bias, op.n ? op.n : made);
      break;
    case Op::Linear:
      require(weight(op.weight).k == made, "a Linear's weight has another k than its source");
      require(weight(op.weight).n > 1, "a Linear's weight is a vector");
      made = weight(op.weight).n;
      vector(op.bias, made);
      break;
    case Op::Rope:
      made = width(op.dst);
      require(made == int64_t{op.heads} * op.head_dim && 2 * op.n <= op.head_dim, "Rope's heads don't fit its register");
      break;
    case Op::StoreKV: require(width(op.src) == width(op.src2), "k and v have different widths"); break;
    case Op::Attend:
      require(op.heads > 0 && op.kv_heads > 0 && op.heads % op.kv_heads == 0, "heads aren't a multiple of kv_heads");
      require(made == int64_t{op.heads} * op.head_dim, "Attend's heads don't fit its source");
      require(op.keep >= 1.0 || (op.keep > 0.0 && op.n > 0), "Attend keeps a fraction over 0 of so many positions");
      attention_ = {op.heads, op.kv_heads, op.head_dim, op.window, op.value, op.softcap, op.keep, op.n};
      break;
    case Op::Act: require(op.src2 < 0 || width(op.src2) == made, "Act's two sources have different widths"); break;
    case Op::Add: require(width(op.dst) == made, "Add's registers have different widths"); break;
    case Op::Copy: break;
    case Op::Scale: made = width(op.dst); break;
  }
  if (!writes(op)) return;
  Register& dst = regs_[static_cast<size_t>(op.dst)];
  const bool keeps = op.dst == 0 || ((op.kind == Op::Linear || op.kind == Op::Gather) && op.flag);
  require(!keeps || dst.width == made, "an operation would change a register's width");
  require(dst.width == 0 || dst.width == made, "a register has two widths");
  dst.width = made;
}

// First fit by segments: registers that are alive in one segment never overlap.
void Bound::place() {
  for (int s = 0; s < static_cast<int>(segments_.size()); s++) {
    const auto use = [&](int r) {
      Register& reg = regs_[static_cast<size_t>(r)];
      if (reg.first < 0) reg.first = s;
      reg.last = s;
    };
    const Segment& segment = segments_[static_cast<size_t>(s)];
    for (int i = segment.begin; i < segment.end; i++) registers_of(program_->ops[static_cast<size_t>(i)], use);
    if (segment.quantise) use(segment.source);
  }
  for (size_t r = 1; r < regs_.size(); r++) {
    Register& reg = regs_[r];
    if (reg.first < 0 || static_cast<int>(r) == program_->logits) continue;
    const int64_t size = round_up(reg.width, 16);
    int64_t at = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t o = 1; o < r; o++) {
        const Register& other = regs_[o];
        const int64_t end = other.offset + round_up(other.width, 16);
        const bool alive = other.first >= 0 && static_cast<int>(o) != program_->logits && other.first <= reg.last && reg.first <= other.last;
        if (alive && at < end && other.offset < at + size) at = end, moved = true;
      }
    }
    reg.offset = at;
    floats_ = std::max(floats_, at + size);
  }
}

int Device::rope_table(const std::vector<double>& inv_freq, double magnitude) {
  for (size_t i = 0; i < ropes.size(); i++)
    if (ropes[i]->inv_freq == inv_freq && ropes[i]->magnitude == magnitude) return static_cast<int>(i);
  ropes.push_back(std::make_unique<RopeTable>());
  ropes.back()->inv_freq = inv_freq;
  ropes.back()->magnitude = magnitude;
  return static_cast<int>(ropes.size()) - 1;
}

uint8_t* Arena::take(int64_t bytes) {
  if (bytes > bytes_) {
    std::free(data_);
    bytes_ = 0;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
    if (!data_) throw std::bad_alloc();
    bytes_ = round_up(bytes, 64);
    std::fill(data_, data_ + bytes_, uint8_t{0});
  }
  return data_;
}

}  // namespace headrace
