#include "sample.h"

#include <algorithm>

#include "scalar_math.h"

namespace headrace {

namespace {

using Candidate = SampleScratch::Candidate;

// Larger logit first, then lower id: a total order, so every selection has one result.
bool before(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

constexpr double kLn2 = 0.69314718055994531;
constexpr double kMostNoise = 33 * kLn2 + 1e-6;  // of 32 random bits

double gumbel(uint32_t bits) {
  const double u = (bits + 0.5) * (1.0 / 4294967296.0);
  return -log64(-log64(u));
}

// No less than gumbel(bits), without logarithms: -log u >= 1 - u.
double gumbel_bound(uint32_t bits) {
  const uint32_t rest = ~bits;
  return rest ? (1 + __builtin_clz(rest)) * kLn2 + 1e-6 : kMostNoise;
}

// Weight of a probability relative to the largest, in units of 2^-40: sums of them don't depend on order.
uint64_t weight(double below_max) { return below_max < -28.0 ? 0 : static_cast<uint64_t>(exp64(below_max) * 1099511627776.0); }

void penalise(const SampleParams& p, std::vector<Candidate>& c, std::vector<int32_t>& recent) {
  const int32_t vocab = static_cast<int32_t>(c.size());
  if (p.repeat_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0) {
    recent.assign(p.recent, p.recent + p.recent_count);
    std::sort(recent.begin(), recent.end());
    for (size_t i = 0; i < recent.size();) {
      size_t end = i;
      while (end < recent.size() && recent[end] == recent[i]) end++;
      if (recent[i] >= 0 && recent[i] < vocab) {
        double& l = c[static_cast<size_t>(recent[i])].logit;
        l = l > 0.0 ? l / p.repeat_penalty : l * p.repeat_penalty;
        l = l - static_cast<double>(end - i) * p.frequency_penalty - p.presence_penalty;
      }
      i = end;
    }
  }
  for (int64_t i = 0; i < p.bias_count; i++)
    if (p.bias_id[i] >= 0 && p.bias_id[i] < vocab) c[static_cast<size_t>(p.bias_id[i])].logit += p.bias[i];
}

void keep_top_p(double top_p, std::vector<Candidate>& c, bool sorted) {
  const double top = sorted ? c[0].logit : std::min_element(c.begin(), c.end(), before)->logit;
  uint64_t all = 0;
  for (const Candidate& x : c) all += weight(x.logit - top);
  const double enough = top_p * static_cast<double>(all);
  uint64_t sum = 0;
  size_t done = sorted ? c.size() : 0;
  for (size_t i = 0, block = 128; i < c.size(); i++) {
    if (i == done) {  // sort a little more: usually few tokens carry nearly everything
      done = std::min(c.size(), done + block);
      block *= 4;
      std::partial_sort(c.begin() + static_cast<std::ptrdiff_t>(i), c.begin() + static_cast<std::ptrdiff_t>(done), c.end(), before);
    }
    sum += weight(c[i].logit - top);
    if (static_cast<double>(sum) >= enough) {
      c.resize(i + 1);
      return;
    }
  }
}

int32_t draw(const SampleParams& p, const std::vector<Candidate>& c) {
  const uint32_t key[2] = {static_cast<uint32_t>(p.seed), static_cast<uint32_t>(p.seed >> 32)};
  uint32_t words[4] = {}, block = UINT32_MAX;
  double best = 0.0;
  int32_t token = -1;
  const auto consider = [&](const Candidate& x) {
    if (token >= 0 && x.logit + kMostNoise < best) return;
    const uint32_t id = static_cast<uint32_t>(x.id);
    if (id >> 2 != block) {
      block = id >> 2;
      const uint32_t counter[4] = {block, p.choice, p.position, 0};
      philox(counter, key, words);
    }
    const uint32_t bits = words[id & 3];
    if (token >= 0 && x.logit + gumbel_bound(bits) < best) return;
    const double total = x.logit + gumbel(bits);
    if (token < 0 || total > best || (total == best && x.id < token)) best = total, token = x.id;
  };
  consider(*std::min_element(c.begin(), c.end(), before));  // a high mark first, so that most others fall to the bounds
  for (const Candidate& x : c) consider(x);
  return token;
}

int32_t choose(const SampleParams& p, const float* logits, int64_t vocab, int64_t largest, SampleScratch& s) {
  const bool plain = p.repeat_penalty == 1.0 && p.frequency_penalty == 0.0 && p.presence_penalty == 0.0;
  if (p.temperature <= 0.0 && !p.bias_count && !p.mask && (plain || !p.recent_count)) return static_cast<int32_t>(largest);
  std::vector<Candidate>& c = s.candidates;
  c.resize(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; i++) c[static_cast<size_t>(i)] = {static_cast<double>(logits[i]), static_cast<int32_t>(i)};
  penalise(p, c, s.recent);
  if (p.mask)
    c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return !(p.mask[x.id / 32] >> (x.id % 32) & 1); }), c.end());
  if (c.empty()) return kNothingAllowed;
  if (p.temperature <= 0.0) return std::min_element(c.begin(), c.end(), before)->id;
  for (Candidate& x : c) x.logit /= p.temperature;
  bool sorted = false;
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < c.size()) {
    std::partial_sort(c.begin(), c.begin() + p.top_k, c.end(), before);
    c.resize(static_cast<size_t>(p.top_k));
    sorted = true;
  }
  if (p.top_p < 1.0) keep_top_p(p.top_p, c, sorted);
  if (p.min_p > 0.0) {
    const double top = std::min_element(c.begin(), c.end(), before)->logit;
    c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return exp64(x.logit - top) < p.min_p; }), c.end());
  }
  return draw(p, c);
}

// log of the sum of e^logit, terms in order of id.
double log_sum_exp(const float* logits, int64_t vocab, float top) {
  double sum = 0.0;
  for (int64_t i = 0; i < vocab; i++) {
    const double d = static_cast<double>(logits[i]) - top;
    if (d > -60.0) sum += exp64(d);
  }
  return top + log64(sum);
}

}  // namespace

void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

Sampled sample(const VecOps& ops, const float* logits, int64_t vocab, const SampleParams& p, SampleScratch& s,
               int32_t* top_ids, double* top_logprobs) {
  float top = 0.0f;
  int64_t largest = 0;
  const int64_t most = std::min<int64_t>(std::max(0, p.logprobs - 1), vocab);
  if (!ops.scan(logits, vocab, &top, &largest)) {
    for (int64_t i = 0; i < most; i++) top_ids[i] = kNotFinite, top_logprobs[i] = 0.0;
    return {kNotFinite, 0.0};
  }
  const int32_t token = choose(p, logits, vocab, largest, s);
  if (p.logprobs == 0) return {token, 0.0};
  const double total = log_sum_exp(logits, vocab, top);
  if (most > 0) {
    std::vector<Candidate>& c = s.candidates;
    c.resize(static_cast<size_t>(vocab));
    for (int64_t i = 0; i < vocab; i++) c[static_cast<size_t>(i)] = {static_cast<double>(logits[i]), static_cast<int32_t>(i)};
    std::partial_sort(c.begin(), c.begin() + most, c.end(), before);
    for (int64_t i = 0; i < most; i++) top_ids[i] = c[static_cast<size_t>(i)].id, top_logprobs[i] = c[static_cast<size_t>(i)].logit - total;
  }
  return {token, token < 0 ? 0.0 : logits[token] - total};
}

}  // namespace headrace
