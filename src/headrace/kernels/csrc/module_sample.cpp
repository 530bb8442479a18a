// Sampling's Python face.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "device_ref.h"
#include "sample.h"
#include "scalar_math.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {

void bind_sampling(nb::module_& m);

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct DrawRef {
  SampleParams params;
  Ints recent;
  std::vector<int32_t> bias_id;
  std::vector<double> bias;
  std::optional<Words> mask;
};

using Row = std::tuple<int32_t, double, std::vector<std::tuple<int32_t, double>>>;

std::vector<Row> sample_rows(DeviceRef& d, const Logits& logits, const std::vector<const DrawRef*>& draws) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0)), vocab = static_cast<int64_t>(logits.shape(1));
  if (static_cast<int64_t>(draws.size()) != rows) throw std::invalid_argument("sample: one set of parameters a row");
  int64_t most = 0;
  for (const DrawRef* r : draws) {
    if (r->mask && static_cast<int64_t>(r->mask->size()) * 32 < vocab) throw std::invalid_argument("sample: the mask is shorter than the vocabulary");
    most = std::max<int64_t>(most, r->params.logprobs);
  }
  std::vector<Sampled> chosen(static_cast<size_t>(rows));
  std::vector<int32_t> ids(static_cast<size_t>(rows * most));
  std::vector<double> logprobs(ids.size());
  const float* values = logits.data();
  {
    nb::gil_scoped_release free_gil;
    std::lock_guard<std::mutex> lock(d.device.mutex);
    FloatMode mode;
    d.samplers.resize(static_cast<size_t>(d.device.pool.threads()));
    d.device.pool.each(rows, [&](int64_t r, int thread) {
      const auto i = static_cast<size_t>(r);
      chosen[i] = sample(d.device.ops, values + r * vocab, vocab, draws[i]->params, d.samplers[static_cast<size_t>(thread)],
                         ids.data() + r * most, logprobs.data() + r * most);
    });
  }
  std::vector<Row> out;
  for (int64_t r = 0; r < rows; r++) {
    std::vector<std::tuple<int32_t, double>> top;
    const int64_t n = std::min<int64_t>(vocab, draws[static_cast<size_t>(r)]->params.logprobs - 1);
    for (int64_t i = 0; i < n && chosen[static_cast<size_t>(r)].token != kNotFinite; i++)
      top.emplace_back(ids[static_cast<size_t>(r * most + i)], logprobs[static_cast<size_t>(r * most + i)]);
    out.emplace_back(chosen[static_cast<size_t>(r)].token, chosen[static_cast<size_t>(r)].logprob, std::move(top));
  }
  return out;
}

void make_draw(DrawRef* self, const std::tuple<double, double, double, double, double, double>& reals, int32_t top_k,
               uint64_t seed, uint32_t choice, uint32_t position, Ints recent,
               const std::vector<std::tuple<int32_t, double>>& bias, std::optional<Words> mask, int32_t logprobs) {
  new (self) DrawRef;
  SampleParams& p = self->params;
  std::tie(p.temperature, p.top_p, p.min_p, p.repeat_penalty, p.frequency_penalty, p.presence_penalty) = reals;
  p.top_k = top_k, p.seed = seed, p.choice = choice, p.position = position, p.logprobs = logprobs;
  self->recent = std::move(recent);
  p.recent = self->recent.data(), p.recent_count = static_cast<int64_t>(self->recent.size());
  for (const auto& [id, value] : bias) self->bias_id.push_back(id), self->bias.push_back(value);
  p.bias_id = self->bias_id.data(), p.bias = self->bias.data(), p.bias_count = static_cast<int64_t>(bias.size());
  self->mask = std::move(mask);
  if (self->mask) p.mask = self->mask->data();
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<DrawRef>(m, "Draw")
      .def("__init__", &make_draw, "reals"_a, "top_k"_a, "seed"_a, "choice"_a, "position"_a, "recent"_a, "bias"_a,
           "mask"_a.none(), "logprobs"_a);
  m.def("sample", &sample_rows, "device"_a, "logits"_a, "draws"_a);
  m.def("philox", [](const std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>& c, const std::tuple<uint32_t, uint32_t>& k) {
    const uint32_t counter[4] = {std::get<0>(c), std::get<1>(c), std::get<2>(c), std::get<3>(c)};
    const uint32_t key[2] = {std::get<0>(k), std::get<1>(k)};
    uint32_t out[4];
    philox(counter, key, out);
    return std::make_tuple(out[0], out[1], out[2], out[3]);
  });
  m.def("exp64", &exp64);
  m.def("log64", &log64);
  m.def("sincos64", [](double x) {
    double s, c;
    sincos64(x, &s, &c);
    return std::make_tuple(s, c);
  });
}

}  // namespace headrace
