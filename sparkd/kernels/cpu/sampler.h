// The one sampler: chooses a token from logits, whatever executor computed them (docs/arithmetic.md, "Sampling").
#pragma once

#include <cstdint>

namespace spark {

struct SamplerOptions {
    float temperature;  // 0: the best token
    int32_t top_k;      // 0: off
    double top_p;       // 1: off
    uint64_t seed;
};

// The token chosen from `logits` [vocabulary] as output number `index` of its request.
// Throws std::domain_error when a logit is not finite.
int32_t sample(const float* logits, int32_t vocabulary, const SamplerOptions& options, uint64_t index);

}  // namespace spark
