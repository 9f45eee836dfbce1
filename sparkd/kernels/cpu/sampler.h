// The one sampler: chooses a token from logits, whatever executor computed them (docs/arithmetic.md, "Sampling").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spark {

struct SamplerOptions {
    float temperature;         // 0: the best token
    int32_t top_k;             // 0: off
    double top_p;              // 1: off
    double min_p;              // 0: off
    float repetition_penalty;  // 1: off
    float presence_penalty;    // 0: off
    float frequency_penalty;   // 0: off
    const int32_t* bias_ids;   // [biases], each below the vocabulary's size
    const float* bias_values;
    size_t biases;
    uint64_t seed;
};

// The ids of a request so far: its prompt's, then those of its output. Ids outside the vocabulary are passed over.
struct History {
    const int32_t* ids;
    size_t prompt;
    size_t count;
};

struct Logprob {
    int32_t id;
    float value;
};

// The first of the largest logits, or -1 - the id of the first that is not finite.
int32_t best_token(const float* logits, int32_t n);

// The token chosen from `logits` [vocabulary] as output number `index` of its request.
// Throws std::domain_error when a logit is not finite.
int32_t sample(const float* logits, int32_t vocabulary, const SamplerOptions& options, const History& history, uint64_t index);

// Natural logarithms of probabilities under the logits as they are: first that of `id`, then those of the `best` most
// likely tokens in order.
std::vector<Logprob> logprobs(const float* logits, int32_t vocabulary, int32_t id, int32_t best);

}  // namespace spark
