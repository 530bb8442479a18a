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

bool penalises(const SampleParams& p) {
  return p.recent_count && (p.repeat_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0);
}

// Tokens whose logits penalties or bias change, with their new logits, by id.
void changed_logits(const SampleParams& p, const float* logits, int64_t vocab, SampleScratch& s) {
  std::vector<Candidate>& changed = s.changed;
  changed.clear();
  if (penalises(p)) {
    s.recent.assign(p.recent, p.recent + p.recent_count);
    std::sort(s.recent.begin(), s.recent.end());
    for (size_t i = 0, end = 0; i < s.recent.size(); i = end) {
      while (end < s.recent.size() && s.recent[end] == s.recent[i]) end++;
      if (s.recent[i] < 0 || s.recent[i] >= vocab) continue;
      double l = logits[s.recent[i]];
      l = l > 0.0 ? l / p.repeat_penalty : l * p.repeat_penalty;
      l = l - static_cast<double>(end - i) * p.frequency_penalty - p.presence_penalty;
      changed.push_back({l, s.recent[i]});
    }
  }
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  for (int64_t i = 0; i < p.bias_count; i++) {
    const int32_t id = p.bias_id[i];
    if (id < 0 || id >= vocab) continue;
    auto at = std::lower_bound(changed.begin(), changed.end(), Candidate{0.0, id}, by_id);
    if (at == changed.end() || at->id != id) at = changed.insert(at, {static_cast<double>(logits[id]), id});
    at->logit += p.bias[i];
  }
}

// A value that at least `count` of the logits reach, found from the largest of each 64; -infinity if that is too few.
float reached_by(const VecOps& ops, const float* logits, int64_t vocab, size_t count, SampleScratch& s) {
  const size_t blocks = static_cast<size_t>((vocab + 63) / 64);
  if (count > blocks / 2) return -__builtin_inff();
  s.blocks.resize(2 * blocks);
  ops.block_max(logits, vocab, s.blocks.data());
  const auto copy = s.blocks.begin() + static_cast<std::ptrdiff_t>(blocks);
  std::copy(s.blocks.begin(), copy, copy);
  std::nth_element(copy, copy + static_cast<std::ptrdiff_t>(count - 1), s.blocks.end(), [](float a, float b) { return a > b; });
  return copy[static_cast<std::ptrdiff_t>(count - 1)];
}

// The tokens to choose from, in order of id. With top-k, unchanged ones that k others are sure to beat are left out.
void gather(const VecOps& ops, const SampleParams& p, const float* logits, int64_t vocab, SampleScratch& s) {
  std::vector<Candidate>& c = s.candidates;
  float floor = -__builtin_inff();
  if (!p.mask && p.temperature > 1e-30 && p.temperature < 1e30 && p.top_k > 0 && p.top_k < vocab)
    floor = reached_by(ops, logits, vocab, static_cast<size_t>(p.top_k) + s.changed.size(), s);
  const bool blocks = floor != -__builtin_inff();
  c.clear();
  c.reserve(static_cast<size_t>(vocab));
  auto changed = s.changed.begin();
  for (int64_t from = 0; from < vocab; from += 64) {
    const int64_t to = std::min(vocab, from + 64);
    const bool none = changed == s.changed.end() || changed->id >= to;
    if (none && blocks && s.blocks[static_cast<size_t>(from / 64)] < floor) continue;
    for (int64_t i = from; i < to; i++) {
      const int32_t id = static_cast<int32_t>(i);
      if (changed != s.changed.end() && changed->id == id) c.push_back(*changed++);
      else if (logits[i] >= floor) c.push_back({static_cast<double>(logits[i]), id});
    }
  }
  if (p.mask)
    c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return !(p.mask[x.id / 32] >> (x.id % 32) & 1); }), c.end());
}

// Of w, keeps the shortest prefix in order whose weight brings `sum` to `enough` (all of it, if that's too little), as a
// set: the middle of what is undecided is put in its place, and its weight decides one half or the other.
void keep_prefix(std::vector<SampleScratch::Weighted>& w, uint64_t sum, double enough) {
  const auto at = [&](size_t i) { return w.begin() + static_cast<std::ptrdiff_t>(i); };
  size_t begin = 0, end = w.size();
  while (begin < end) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(at(begin), at(middle), at(end), [](const auto& a, const auto& b) { return before(a.c, b.c); });
    uint64_t left = sum;
    for (size_t i = begin; i < middle; i++) left += w[i].weight;
    if (middle > begin && static_cast<double>(left) >= enough) {
      end = middle;
    } else {
      sum = left + w[middle].weight;
      begin = middle + 1;
      if (static_cast<double>(sum) >= enough) break;
    }
  }
  w.resize(begin);
}

void keep_top_p(const VecOps& ops, double top_p, SampleScratch& s) {
  std::vector<Candidate>& c = s.candidates;
  const double top = std::min_element(c.begin(), c.end(), before)->logit;
  s.below.resize(c.size());
  s.weights.resize(c.size());
  for (size_t i = 0; i < c.size(); i++) s.below[i] = c[i].logit - top;
  ops.weights(s.below.data(), static_cast<int64_t>(c.size()), s.weights.data());
  // Steps of 1/8 in logit tell most tokens' fate; only the step in which the sum is reached needs an order.
  uint64_t steps[256] = {}, all = 0, sum = 0;
  const auto step = [&](size_t i) { return static_cast<int>(std::min(255.0, s.below[i] * -8.0)); };
  for (size_t i = 0; i < c.size(); i++) steps[step(i)] += s.weights[i];
  for (const uint64_t w : steps) all += w;
  const double enough = top_p * static_cast<double>(all);
  int last = 0;
  while (last < 255 && static_cast<double>(sum + steps[last]) < enough) sum += steps[last++];
  size_t kept = 0;
  s.weighted.clear();
  for (size_t i = 0; i < c.size(); i++) {
    const int at = step(i);
    if (at < last) c[kept++] = c[i];
    else if (at == last && s.weights[i]) s.weighted.push_back({c[i], s.weights[i]});
  }
  c.resize(kept);
  keep_prefix(s.weighted, sum, enough);
  for (const auto& w : s.weighted) c.push_back(w.c);
}

// The largest logit + noise so far.
struct Best {
  double total = 0.0;
  int32_t token = -1;
  void offer(double logit, int32_t id, uint32_t bits) {
    if (token >= 0 && logit + gumbel_bound(bits) < total) return;
    const double t = logit + gumbel(bits);
    if (token < 0 || t > total || (t == total && id < token)) total = t, token = id;
  }
};

uint32_t noise_of(const NoiseKey& key, int32_t id) {
  const uint32_t k[2] = {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)};
  const uint32_t counter[4] = {static_cast<uint32_t>(id) >> 2, key.choice, key.position, 0};
  uint32_t words[4];
  philox(counter, k, words);
  return words[id & 3];
}

// Largest first, so that most of the others fall to the bounds.
int32_t draw(const NoiseKey& key, const std::vector<Candidate>& c) {
  Best best;
  const Candidate& top = *std::min_element(c.begin(), c.end(), before);
  best.offer(top.logit, top.id, noise_of(key, top.id));
  for (const Candidate& x : c)
    if (x.logit + kMostNoise >= best.total) best.offer(x.logit, x.id, noise_of(key, x.id));
  return best.token;
}

// The same over the whole vocabulary, unfiltered: 32 tokens at a time, skipped by what their noise would have to be.
int32_t draw_from_all(const VecOps& ops, const NoiseKey& key, const float* logits, int64_t vocab, double temperature,
                      int64_t largest, SampleScratch& s) {
  Best best;
  best.offer(logits[largest] / temperature, static_cast<int32_t>(largest), noise_of(key, static_cast<int32_t>(largest)));
  s.blocks.resize(static_cast<size_t>((vocab + 63) / 64));
  ops.block_max(logits, vocab, s.blocks.data());
  uint32_t bits[32];
  for (int64_t from = 0; from < vocab; from += 32) {
    const double missing = best.total - s.blocks[static_cast<size_t>(from / 64)] / temperature;
    if (missing > kMostNoise) continue;
    // -log u >= 1 - u, so noise of `missing` or more needs 1 - u <= e^-missing; the slack covers both roundings.
    const double most = missing > 0.0 ? exp64(-missing) * 4294967296.0 * 1.000001 + 2.0 : 4294967295.0;
    const uint32_t limit = most < 4294967295.0 ? static_cast<uint32_t>(most) : UINT32_MAX;
    ops.noise(static_cast<uint32_t>(from / 4), key, bits);
    const int64_t to = std::min<int64_t>(32, vocab - from);
    for (int64_t i = 0; i < to; i++)
      if (~bits[i] <= limit) best.offer(logits[from + i] / temperature, static_cast<int32_t>(from + i), bits[i]);
  }
  return best.token;
}

int32_t choose(const VecOps& ops, const SampleParams& p, const float* logits, int64_t vocab, int64_t largest, SampleScratch& s) {
  const bool as_is = !penalises(p) && !p.bias_count && !p.mask;
  if (p.temperature <= 0.0 && as_is) return static_cast<int32_t>(largest);
  const NoiseKey key{p.seed, p.choice, p.position};
  const bool filtered = (p.top_k > 0 && p.top_k < vocab) || p.top_p < 1.0 || p.min_p > 0.0;
  if (as_is && !filtered) return draw_from_all(ops, key, logits, vocab, p.temperature, largest, s);
  changed_logits(p, logits, vocab, s);
  gather(ops, p, logits, vocab, s);
  std::vector<Candidate>& c = s.candidates;
  if (c.empty()) return kNothingAllowed;
  if (p.temperature <= 0.0) return std::min_element(c.begin(), c.end(), before)->id;
  for (Candidate& x : c) x.logit /= p.temperature;
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < c.size()) {
    std::nth_element(c.begin(), c.begin() + p.top_k, c.end(), before);
    c.resize(static_cast<size_t>(p.top_k));
  }
  if (p.top_p < 1.0) keep_top_p(ops, p.top_p, s);
  if (p.min_p > 0.0) {
    const double top = std::min_element(c.begin(), c.end(), before)->logit;
    c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return exp64(x.logit - top) < p.min_p; }), c.end());
  }
  return draw(key, c);
}

// log of the sum of e^logit, from the same integer weights as top-p.
double log_sum_exp(const VecOps& ops, const float* logits, int64_t vocab, float top, SampleScratch& s) {
  s.below.resize(static_cast<size_t>(vocab));
  s.weights.resize(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; i++) s.below[static_cast<size_t>(i)] = static_cast<double>(logits[i]) - top;
  ops.weights(s.below.data(), vocab, s.weights.data());
  uint64_t sum = 0;
  for (const uint64_t w : s.weights) sum += w;
  return top + log64(static_cast<double>(sum) * (1.0 / 1099511627776.0));
}

// The most likely tokens by the raw logits, in order.
void most_likely(const VecOps& ops, const float* logits, int64_t vocab, int64_t count, SampleScratch& s) {
  const float floor = count ? reached_by(ops, logits, vocab, static_cast<size_t>(count), s) : 0.0f;
  std::vector<Candidate>& c = s.candidates;
  c.clear();
  for (int64_t i = 0; count && i < vocab; i++)
    if (logits[i] >= floor) c.push_back({static_cast<double>(logits[i]), static_cast<int32_t>(i)});
  std::partial_sort(c.begin(), c.begin() + count, c.end(), before);
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
  const int32_t token = choose(ops, p, logits, vocab, largest, s);
  if (p.logprobs == 0) return {token, 0.0};
  const double total = log_sum_exp(ops, logits, vocab, top, s);
  most_likely(ops, logits, vocab, most, s);
  for (int64_t i = 0; i < most; i++)
    top_ids[i] = s.candidates[static_cast<size_t>(i)].id, top_logprobs[i] = s.candidates[static_cast<size_t>(i)].logit - total;
  return {token, token < 0 ? 0.0 : logits[token] - total};
}

}  // namespace headrace
