// Choosing tokens. The rule is written out in docs/kernels.md and, in Python, in tests/reference_sample.py.
#pragma once
#include <cstdint>
#include <vector>

#include "ops.h"

namespace headrace {

struct SampleParams {
  double temperature = 0.0, top_p = 1.0, min_p = 0.0;
  double repeat_penalty = 1.0, frequency_penalty = 0.0, presence_penalty = 0.0;
  int32_t top_k = 0;
  uint64_t seed = 0;
  uint32_t choice = 0, position = 0;
  const int32_t* recent = nullptr;  // ids the penalties look at
  int64_t recent_count = 0;
  const int32_t* bias_id = nullptr;
  const double* bias = nullptr;
  int64_t bias_count = 0;
  const uint32_t* mask = nullptr;   // bit i of word i / 32: token allowed; null: all are
  int32_t logprobs = 0;             // 0: none; 1 + n: the chosen one's and the n most likely
};

constexpr int32_t kNotFinite = -1;      // the logits hold a NaN or an infinity
constexpr int32_t kNothingAllowed = -2;  // the mask forbids every token

struct Sampled {
  int32_t token;
  double logprob;                   // of the token, from the raw logits
};

// Memory of one thread; grows to the vocabulary once.
struct SampleScratch {
  struct Candidate {
    double logit;
    int32_t id;
  };
  struct Weighted {
    Candidate c;
    uint64_t weight;
  };
  std::vector<Candidate> candidates, changed;
  std::vector<Weighted> weighted;
  std::vector<int32_t> recent;
  std::vector<float> blocks;
  std::vector<double> below;
  std::vector<uint64_t> weights;
};

// top_ids and top_logprobs: logprobs - 1 entries, written when logprobs > 0.
Sampled sample(const VecOps& ops, const float* logits, int64_t vocab, const SampleParams& params, SampleScratch& scratch,
               int32_t* top_ids, double* top_logprobs);

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

}  // namespace headrace
