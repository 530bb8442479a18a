// A layer's operations, compiled once (Program), joined with its weights (Bound), and run over rows (Device).
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"
#include "ops.h"
#include "pool.h"
#include "rows.h"

namespace headrace {

// kernels/ops.py, one to one. Registers and weights are indices; register 0 is x.
struct Op {
  enum Kind : int { Gather, Norm, Linear, Rope, StoreKV, Attend, Act, Add, Copy, Scale } kind;
  int dst = -1, src = -1, src2 = -1;
  int weight = -1, bias = -1;
  bool flag = false;        // accumulate (Gather, Linear), layer norm, interleaved (Rope), wanted (Copy)
  int64_t n = 0;            // Gather: offset; Norm: group; Rope: pairs
  int heads = 0, kv_heads = 0, head_dim = 0, window = 0, table = -1;
  bool by_position = false;
  Activation act = Activation::Silu;
  float value = 0.0f, softcap = 0.0f;  // Gather, Attend, Scale: factor; Norm: eps
  double keep = 1.0;                   // Attend; its `n`: positions there may be when keep < 1
};

// Operations that run between two barriers.
struct Segment {
  enum Kind : int { Rowwise, Matmul, Attention } kind;
  int begin, end;           // operations [begin, end)
  bool fused = false;       // Matmul: the last operation is an Act over the columns just made
  bool quantise = false;    // then quantise the register `source` for the next Matmul
  int source = -1;
};

// cos and sin of one rope table for the rows of one run; rows are told apart by their serial.
struct RopeTable {
  std::vector<double> inv_freq;
  double magnitude;
  uint64_t serial = 0;
  std::vector<float> cos_sin;  // [rows, 2, pairs]
};

// Memory that only grows; what was in it is lost when it does.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  uint8_t* take(int64_t bytes);
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct Device {
  Device(const Path& p, const VecOps& v, int threads) : path(p), ops(v), pool(threads) {}
  const Path& path;
  const VecOps& ops;
  Pool pool;
  std::mutex mutex;  // one run at a time
  Arena arena;
  std::vector<std::unique_ptr<RopeTable>> ropes;
  int rope_table(const std::vector<double>& inv_freq, double magnitude);
};

struct Program {
  int64_t width = 0;
  int registers = 1, logits = -1;  // register of the result, -1: x
  bool needs_kv = false;
  std::vector<Op> ops;
  std::vector<Segment> segments;
  void split();
};

// Where a register lies: floats a row from the start of the arena.
struct Register {
  int64_t width = 0, offset = 0;
  int first = -1, last = -1;  // segments that use it
};

// A program with weights: shapes checked, registers placed. Cheap to make; holds no memory of its own.
class Bound {
 public:
  Bound(const Program& program, std::vector<Matrix> weights);
  // Of a run whose last position is the given one; the most there can be: 1 << 30.
  int64_t scratch_bytes(int64_t rows, int threads, int32_t last_position) const;
  int64_t result_width() const { return program_->logits < 0 ? program_->width : regs_[program_->logits].width; }
  // x: [rows, width]; out: [wanted, result_width] or null. Throws std::invalid_argument.
  void run(Device& device, float* x, float* out, RowsView& rows, const KVView* kv) const;

 private:
  friend class Runner;
  void infer(const Op& op);
  void place();
  const Program* program_;
  std::vector<Matrix> weights_;
  std::vector<Register> regs_;
  std::vector<Segment> segments_;  // the program's, with `quantise` decided
  int64_t floats_ = 0;             // of a row
  int64_t quant_k_ = 0;            // widest source of an integer Linear
  AttentionShape attention_;
};

}  // namespace headrace
