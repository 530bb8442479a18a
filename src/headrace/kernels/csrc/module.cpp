// The Python face of the kernels. Its types are in ../_native.pyi; ../cpu.py is what the rest of the package sees.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "device_ref.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {

void bind_sampling(nanobind::module_& m);  // module_sample.cpp

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Line = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr const char* kFormats[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",   "Q5_1",  "Q8_0",
                                    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"};
static_assert(sizeof(kFormats) / sizeof(kFormats[0]) == static_cast<size_t>(Format::Count));

Format format_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Format::Count); i++)
    if (name == kFormats[i]) return static_cast<Format>(i);
  throw std::invalid_argument("unknown tensor format " + name);
}

// A vector (n = 1) is plain f32; everything else is the kernels' layout.
int64_t stored_bytes(Format f, int64_t n, int64_t k) {
  if (n < 1 || k < 1 || n > int64_t{1} << 32 || k > int64_t{1} << 32) throw std::invalid_argument("tensor: bad shape");
  if (n == 1 && f != Format::F32) throw std::invalid_argument("tensor: a vector must be F32");
  if (k % block_size(f).elements) throw std::invalid_argument("tensor: k isn't a whole number of blocks");
  return n == 1 ? 4 * k : packed_bytes(f, n, k);
}

struct MatrixRef {
  Matrix m;
  Bytes keep;
  MatrixRef(const std::string& format, int64_t n, int64_t k) : m{format_of(format), n, k, nullptr} {
    stored_bytes(m.format, n, k);
  }
  MatrixRef(const std::string& format, int64_t n, int64_t k, Bytes data)
      : m{format_of(format), n, k, data.data()}, keep(std::move(data)) {
    const int64_t need = stored_bytes(m.format, n, k);
    if (static_cast<int64_t>(keep.size()) < need) throw std::invalid_argument("tensor: fewer bytes than its shape needs");
    if (reinterpret_cast<uintptr_t>(m.data) % (n == 1 ? 4 : 64)) throw std::invalid_argument("tensor: its bytes aren't 64-aligned");
  }
};

void pack_into(const std::string& format, int64_t n, int64_t k, const Bytes& raw, const OutBytes& out, int64_t first) {
  const Format f = format_of(format);
  const BlockSize b = block_size(f);
  const int64_t need = stored_bytes(f, n, k);
  const int64_t row = k / b.elements * b.bytes, count = row ? static_cast<int64_t>(raw.size()) / row : 0;
  if (count * row != static_cast<int64_t>(raw.size()) || first < 0 || first % 8 || first + count > n ||
      (count % 8 && first + count < n) || (first == 0 && count < std::min<int64_t>(n, 8)))
    throw std::invalid_argument("pack: raw has another size");
  if (static_cast<int64_t>(out.size()) < need) throw std::invalid_argument("pack: out is too small");
  const uint8_t* from = raw.data();
  uint8_t* to = out.data();
  nb::gil_scoped_release free_gil;
  if (n == 1) std::memcpy(to, from, static_cast<size_t>(need));
  else pack_rows(f, n, k, first, count, from, to);
}

struct RowsRef {
  std::vector<Ints> keep;
  RowsView view;
  explicit RowsRef(const std::vector<Ints>& arrays) : keep(arrays) {
    static std::atomic<uint64_t> serial{0};
    if (keep.size() != 9) throw std::invalid_argument("rows: nine arrays");
    const int32_t** fields[] = {&view.token, &view.position, &view.slot, &view.base, &view.base_len,
                                &view.extra, &view.extra_len, &view.lists, &view.wanted};
    for (size_t i = 0; i < 9; i++) *fields[i] = keep[i].data();
    view.count = static_cast<int64_t>(keep[0].size());
    for (size_t i = 1; i < 7; i++)
      if (static_cast<int64_t>(keep[i].size()) != view.count) throw std::invalid_argument("rows: arrays of unlike length");
    view.list_size = static_cast<int64_t>(keep[7].size());
    view.wanted_count = static_cast<int64_t>(keep[8].size());
    view.serial = ++serial;
    view.check();
  }
};

struct KVRef {
  KVView view;
  Addresses keep;
  KVRef(int64_t kv_heads, int64_t head_dim, int k_bits, int v_bits, Addresses pages) : keep(std::move(pages)) {
    for (const int bits : {k_bits, v_bits})
      if (bits != 16 && bits != 8 && bits != 4) throw std::invalid_argument("kv: bits must be 16, 8 or 4");
    if (kv_heads < 1 || head_dim < 1) throw std::invalid_argument("kv: bad shape");
    view.kv_heads = kv_heads, view.head_dim = head_dim, view.k_bits = k_bits, view.v_bits = v_bits;
    view.pages = keep.data(), view.page_count = static_cast<int64_t>(keep.size());
  }
};

struct BoundRef {
  Bound bound;
  nb::object program;              // kept alive
  bool runnable = true;            // false: made of shapes alone
  std::vector<nb::object> weights;
  static std::vector<Matrix> matrices(const nb::tuple& weights) {
    std::vector<Matrix> m;
    m.reserve(weights.size());
    for (nb::handle w : weights) m.push_back(nb::cast<const MatrixRef&>(w).m);
    return m;
  }
  BoundRef(nb::object p, const nb::tuple& w) : bound(nb::cast<const Program&>(p), matrices(w)), program(p) {
    weights.reserve(w.size());
    for (nb::handle h : w) {
      weights.push_back(nb::borrow(h));
      runnable &= nb::cast<const MatrixRef&>(h).m.data != nullptr;
    }
  }
};

const Program& checked(const BoundRef& b, const Floats& x, const RowsRef& rows) {
  const Program& program = nb::cast<const Program&>(b.program);
  if (!b.runnable) throw std::invalid_argument("run: weights are shapes alone");
  if (static_cast<int64_t>(x.shape(0)) != rows.view.count || static_cast<int64_t>(x.shape(1)) != program.width)
    throw std::invalid_argument("run: x isn't [rows, width]");
  return program;
}

void run_bound(BoundRef& b, DeviceRef& d, const Floats& x, std::optional<Floats> out, RowsRef& rows, const KVRef* kv) {
  const Program& program = checked(b, x, rows);
  if ((program.logits >= 0) != out.has_value()) throw std::invalid_argument("run: out is for the last layer alone");
  if (out && (static_cast<int64_t>(out->shape(0)) != rows.view.wanted_count ||
              static_cast<int64_t>(out->shape(1)) != b.bound.result_width()))
    throw std::invalid_argument("run: out isn't [wanted, vocabulary]");
  float* result = out ? out->data() : nullptr;
  float* residual = x.data();
  nb::gil_scoped_release free_gil;
  b.bound.run(d.device, residual, result, rows.view, kv ? &kv->view : nullptr);
}

// Layers that follow each other, each with its cache, if it has one.
struct ChainRef {
  std::vector<nb::object> keep;
  std::vector<std::pair<const BoundRef*, const KVRef*>> links;
  ChainRef(const nb::tuple& bounds, const nb::tuple& caches) {
    if (bounds.size() != caches.size()) throw std::invalid_argument("chain: a cache or None for each layer");
    for (size_t i = 0; i < bounds.size(); i++) {
      const nb::object bound = bounds[i], cache = caches[i];
      const BoundRef& b = nb::cast<const BoundRef&>(bound);
      if (nb::cast<const Program&>(b.program).logits >= 0) throw std::invalid_argument("chain: the last layer isn't for it");
      links.emplace_back(&b, cache.is_none() ? nullptr : &nb::cast<const KVRef&>(cache));
      keep.push_back(bound);
      keep.push_back(cache);
    }
  }
};

// Links first to last, or until so many seconds are over; returns the last one run.
int64_t run_chain(const ChainRef& c, DeviceRef& d, const Floats& x, RowsRef& rows, int64_t first, int64_t last, double seconds) {
  if (first < 0 || first > last || last >= static_cast<int64_t>(c.links.size())) throw std::invalid_argument("chain: no such layer");
  for (int64_t i = first; i <= last; i++) checked(*c.links[static_cast<size_t>(i)].first, x, rows);
  float* residual = x.data();
  nb::gil_scoped_release free_gil;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (int64_t i = first;; i++) {
    const auto& [bound, kv] = c.links[static_cast<size_t>(i)];
    bound->bound.run(d.device, residual, nullptr, rows.view, kv ? &kv->view : nullptr);
    if (i == last || std::chrono::steady_clock::now() >= end) return i;
  }
}

// Seconds-free read probe: a checksum of bytes read by all threads; the caller times it.
uint32_t read_all(DeviceRef& d, const Bytes& data) {
  const int64_t chunk = int64_t{1} << 20, size = static_cast<int64_t>(data.size());
  const uint8_t* p = data.data();
  std::atomic<uint32_t> sum{0};
  nb::gil_scoped_release free_gil;
  std::lock_guard<std::mutex> lock(d.device.mutex);
  d.device.pool.each((size + chunk - 1) / chunk, [&](int64_t i, int) {
    sum ^= d.device.ops.read(p + i * chunk, std::min(chunk, size - i * chunk));
  });
  return sum;
}

void bind_data(nb::module_& m) {
  nb::class_<MatrixRef>(m, "Matrix")
      .def(nb::init<const std::string&, int64_t, int64_t, Bytes>(), "fmt"_a, "n"_a, "k"_a, "data"_a)
      .def_static("shape_only", [](const std::string& f, int64_t n, int64_t k) { return MatrixRef(f, n, k); })
      .def_prop_ro("n", [](const MatrixRef& r) { return r.m.n; })
      .def_prop_ro("k", [](const MatrixRef& r) { return r.m.k; })
      .def_prop_ro("nbytes", [](const MatrixRef& r) { return stored_bytes(r.m.format, r.m.n, r.m.k); })
      .def("row", [](const MatrixRef& r, int64_t i, const Line& out) {
        if (!r.m.data || i < 0 || i >= r.m.n || static_cast<int64_t>(out.size()) != r.m.k) throw std::invalid_argument("row: out of range");
        if (r.m.n == 1) std::memcpy(out.data(), r.m.data, static_cast<size_t>(r.m.k) * 4);
        else dequantise_row(r.m, i, out.data());
      });
  m.def("packed_nbytes", [](const std::string& f, int64_t n, int64_t k) { return stored_bytes(format_of(f), n, k); });
  m.def("pack", &pack_into, "fmt"_a, "n"_a, "k"_a, "raw"_a, "out"_a, "first"_a = 0);
  nb::class_<RowsRef>(m, "Rows").def(nb::init<const std::vector<Ints>&>());
  nb::class_<KVRef>(m, "KV")
      .def(nb::init<int64_t, int64_t, int, int, Addresses>(), "kv_heads"_a, "head_dim"_a, "k_bits"_a, "v_bits"_a, "pages"_a)
      .def_prop_ro("page_nbytes", [](const KVRef& r) { return r.view.page_bytes(); });
}

void bind_programs(nb::module_& m) {
  nb::class_<Op> op(m, "Op");
  nb::enum_<Op::Kind>(op, "Kind")
      .value("Gather", Op::Gather).value("Norm", Op::Norm).value("Linear", Op::Linear).value("Rope", Op::Rope)
      .value("StoreKV", Op::StoreKV).value("Attend", Op::Attend).value("Act", Op::Act).value("Add", Op::Add)
      .value("Copy", Op::Copy).value("Scale", Op::Scale);
  nb::enum_<Activation>(op, "Activation")
      .value("silu", Activation::Silu).value("gelu_tanh", Activation::GeluTanh)
      .value("gelu_erf", Activation::GeluErf).value("relu", Activation::Relu);
  op.def("__init__", [](Op* self, Op::Kind kind) { new (self) Op{kind}; })
      .def_rw("dst", &Op::dst).def_rw("src", &Op::src).def_rw("src2", &Op::src2).def_rw("weight", &Op::weight)
      .def_rw("bias", &Op::bias).def_rw("flag", &Op::flag).def_rw("n", &Op::n).def_rw("heads", &Op::heads)
      .def_rw("kv_heads", &Op::kv_heads).def_rw("head_dim", &Op::head_dim).def_rw("window", &Op::window)
      .def_rw("table", &Op::table).def_rw("by_position", &Op::by_position).def_rw("act", &Op::act)
      .def_rw("value", &Op::value).def_rw("softcap", &Op::softcap)
      .def_rw("keep", &Op::keep);
  nb::class_<Program>(m, "Program")
      .def("__init__", [](Program* self, int64_t width, int registers, int logits, const std::vector<Op>& ops) {
        Program p;
        p.width = width, p.registers = registers, p.logits = logits, p.ops = ops;
        p.split();
        new (self) Program(std::move(p));
      })
      .def_prop_ro("has_logits", [](const Program& p) { return p.logits >= 0; })
      .def_prop_ro("segments", [](const Program& p) { return p.segments.size(); });
  nb::class_<BoundRef>(m, "Bound")
      .def(nb::init<nb::object, const nb::tuple&>(), "program"_a, "weights"_a)
      .def("scratch_nbytes", [](const BoundRef& b, int64_t rows, int threads) { return b.bound.scratch_bytes(rows, threads, 1 << 30); })
      .def_prop_ro("result_width", [](const BoundRef& b) { return b.bound.result_width(); })
      .def("run", &run_bound, "device"_a, "x"_a, "out"_a.none(), "rows"_a, "kv"_a.none());
  nb::class_<ChainRef>(m, "Chain")
      .def(nb::init<const nb::tuple&, const nb::tuple&>(), "bounds"_a, "caches"_a)
      .def("run", &run_chain, "device"_a, "x"_a, "rows"_a, "first"_a, "last"_a, "seconds"_a);
  nb::class_<DeviceRef>(m, "Device")
      .def(nb::init<int, const std::string&>(), "threads"_a, "cpu"_a)
      .def_prop_ro("path", [](const DeviceRef& d) { return d.paths.path->name; })
      .def_prop_ro("threads", [](const DeviceRef& d) { return d.device.pool.threads(); })
      .def_prop_ro("arena_nbytes", [](const DeviceRef& d) { return d.device.arena.bytes(); })
      .def("rope_table", [](DeviceRef& d, const std::vector<double>& f, double magnitude) {
        std::lock_guard<std::mutex> lock(d.device.mutex);
        return d.device.rope_table(f, magnitude);
      })
      .def("read", &read_all)
      .def("math", [](const DeviceRef& d, int which, const Line& x) { d.device.ops.math(which, x.data(), x.data(), static_cast<int64_t>(x.size())); })
      .def("round_kv", [](const DeviceRef& d, int bits, const Line& x) {
        std::vector<uint8_t> record(static_cast<size_t>(record_bytes(bits, static_cast<int64_t>(x.size()))));
        std::vector<float> back(static_cast<size_t>(round_up(static_cast<int64_t>(x.size()), 32)));
        d.device.ops.store_record(bits, x.data(), static_cast<int>(x.size()), record.data());
        d.device.ops.load_record(bits, record.data(), static_cast<int>(x.size()), back.data());
        std::copy_n(back.data(), x.size(), x.data());
      });
}

}  // namespace

}  // namespace headrace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a program may end with an engine open: its memory goes with the process
  headrace::bind_data(m);
  headrace::bind_programs(m);
  headrace::bind_sampling(m);
}
