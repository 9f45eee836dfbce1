#include "cpu/sampler.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/arithmetic.h"
#include "common/philox.h"

namespace spark {

namespace {

struct Candidate {
    float logit;
    int32_t id;
};

// The one order of candidates: larger logit first, of equal ones the lower id.
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Candidates in order, sorted no further than they are asked for.
class Ranking {
  public:
    Ranking(const float* logits, int32_t n) : candidates_(static_cast<size_t>(n)) {
        for (int32_t id = 0; id < n; ++id) candidates_[static_cast<size_t>(id)] = {logits[id], id};
    }

    const Candidate& operator[](size_t rank) {
        while (rank >= sorted_) extend();
        return candidates_[rank];
    }

  private:
    void extend() {
        const auto begin = candidates_.begin() + static_cast<std::ptrdiff_t>(sorted_);
        const size_t next = std::min(candidates_.size(), std::max<size_t>(256, 4 * sorted_));
        const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(next);
        if (end != candidates_.end()) std::nth_element(begin, end, candidates_.end(), before);
        std::sort(begin, end, before);
        sorted_ = next;
    }

    std::vector<Candidate> candidates_;
    size_t sorted_ = 0;
};

// Probability relative to the best candidate's as an integer of 1/2^32: sums are exact in any order.
uint64_t weight(float logit, float best, float temperature) {
    return static_cast<uint64_t>(exp((logit - best) / temperature) * 0x1p32f);
}

// Infinities become the largest finite values.
float limited(float x) {
    constexpr float LARGEST = 0x1.fffffep+127f;
    return x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
}

// Logits after bias and penalties; finite ones stay finite.
class Adjusted {
  public:
    Adjusted(const float* logits, int32_t n) : logits_(logits, logits + n) {}

    void bias(const int32_t* ids, const float* values, size_t n) {
        for (size_t i = 0; i < n; ++i) {
            float& logit = logits_[static_cast<size_t>(ids[i])];
            logit = limited(logit + values[i]);
        }
    }

    void penalise_repetition(const History& history, float penalty) {
        for (const int32_t id : distinct(history.ids, history.count)) {
            float& logit = logits_[static_cast<size_t>(id)];
            logit = limited(logit > 0.0f ? logit / penalty : logit * penalty);
        }
    }

    void penalise_output(const History& history, float frequency, float presence) {
        for (const int32_t id : distinct(history.ids + history.prompt, history.count - history.prompt)) {
            float& logit = logits_[static_cast<size_t>(id)];
            logit = logit - static_cast<float>(occurrences_[static_cast<size_t>(id)]) * frequency;
            logit = limited(logit - presence);
        }
    }

    const float* data() const { return logits_.data(); }

  private:
    // Each id once, in order of appearance; `occurrences_` says how often it is there.
    std::vector<int32_t> distinct(const int32_t* ids, size_t n) {
        occurrences_.assign(logits_.size(), 0);
        std::vector<int32_t> found;
        for (size_t i = 0; i < n; ++i) {
            if (ids[i] < 0 || static_cast<size_t>(ids[i]) >= logits_.size()) continue;
            if (occurrences_[static_cast<size_t>(ids[i])]++ == 0) found.push_back(ids[i]);
        }
        return found;
    }

    std::vector<float> logits_;
    std::vector<uint32_t> occurrences_;
};

// ln(total / 2^32) of a sum of weights, which is at least the best one's 2^32.
float log_of_total(uint64_t total) {
    const uint32_t bits = bits_of(static_cast<float>(total) * 0x1p-32f);
    const auto exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
    const float mantissa = from_bits((bits & 0x007fffffu) | 0x3f800000u);
    return fma(exponent, 0x1.62e430p-1f, log1p_unit(mantissa - 1.0f));
}

// One draw: the candidates that are left are the first `count` of the ranking.
class Draw {
  public:
    Draw(const float* logits, int32_t n, float best)
        : logits_(logits), n_(static_cast<size_t>(n)), best_(best), ranking_(logits, n), count_(n_) {}

    void top_k(int32_t k) {
        if (k > 0) count_ = std::min(count_, static_cast<size_t>(k));
    }

    // Keeps the fewest candidates that together have at least p of the probability of those left, at temperature 1.
    void top_p(double p) {
        if (p >= 1.0) return;
        const double limit = p * static_cast<double>(total(1.0f));
        uint64_t sum = 0;
        size_t kept = 0;
        do sum += weight(ranking_[kept++].logit, best_, 1.0f);
        while (static_cast<double>(sum) < limit);
        count_ = kept;
    }

    // Keeps the candidates with at least p of the best one's probability, at temperature 1.
    void min_p(double p) {
        if (p <= 0.0) return;
        size_t kept = 1;
        while (kept < count_ && static_cast<double>(weight(ranking_[kept].logit, best_, 1.0f)) >= p * 0x1p32) ++kept;
        count_ = kept;
    }

    // Inverse of the cumulative distribution at random / 2^64.
    int32_t choose(float temperature, uint64_t random) {
        const auto target = static_cast<uint64_t>((static_cast<unsigned __int128>(random) * total(temperature)) >> 64);
        uint64_t sum = 0;
        for (size_t rank = 0;; ++rank) {
            sum += weight(ranking_[rank].logit, best_, temperature);
            if (sum > target) return ranking_[rank].id;
        }
    }

  private:
    uint64_t total(float temperature) {
        uint64_t sum = 0;
        if (count_ == n_)
            for (size_t id = 0; id < n_; ++id) sum += weight(logits_[id], best_, temperature);
        else
            for (size_t rank = 0; rank < count_; ++rank) sum += weight(ranking_[rank].logit, best_, temperature);
        return sum;
    }

    const float* logits_;
    size_t n_;
    float best_;
    Ranking ranking_;
    size_t count_;
};

// best_token where all logits have to be finite.
int32_t best_finite_token(const float* logits, int32_t n) {
    const int32_t best = best_token(logits, n);
    if (best < 0) throw std::domain_error("the logit of token " + std::to_string(-1 - best) + " is not finite");
    return best;
}

}  // namespace

int32_t best_token(const float* logits, int32_t n) {
    constexpr int32_t LANES = 16;
    float largest[LANES];
    int32_t magnitude[LANES] = {};
    for (float& lane : largest) lane = logits[0];
    // Lanes are independent, so that compilers see vectors.
    const auto look = [&](int32_t id, int32_t lane) {
        const auto bits = static_cast<int32_t>(bits_of(logits[id]) & 0x7fffffffu);
        magnitude[lane] = bits > magnitude[lane] ? bits : magnitude[lane];
        largest[lane] = larger(logits[id], largest[lane]);
    };
    int32_t id = 0;
    for (; id + LANES <= n; id += LANES)
        for (int32_t lane = 0; lane < LANES; ++lane) look(id + lane, lane);
    for (; id < n; ++id) look(id, id % LANES);
    if (*std::max_element(magnitude, magnitude + LANES) >= 0x7f800000) {
        id = 0;
        while (is_finite(logits[id])) ++id;
        return -1 - id;
    }
    return static_cast<int32_t>(std::find(logits, logits + n, *std::max_element(largest, largest + LANES)) - logits);
}

int32_t sample(const float* logits, int32_t vocabulary, const SamplerOptions& options, const History& history, uint64_t index) {
    int32_t best = best_finite_token(logits, vocabulary);
    const bool repetition = options.repetition_penalty != 1.0f && history.count > 0;
    const bool output = (options.presence_penalty != 0.0f || options.frequency_penalty != 0.0f) && history.count > history.prompt;
    std::optional<Adjusted> adjusted;
    if (options.biases > 0 || repetition || output) {
        adjusted.emplace(logits, vocabulary);
        adjusted->bias(options.bias_ids, options.bias_values, options.biases);
        if (repetition) adjusted->penalise_repetition(history, options.repetition_penalty);
        if (output) adjusted->penalise_output(history, options.frequency_penalty, options.presence_penalty);
        logits = adjusted->data();
        best = best_finite_token(logits, vocabulary);
    }
    if (options.temperature == 0.0f) return best;
    Draw draw(logits, vocabulary, logits[best]);
    draw.top_k(options.top_k);
    draw.top_p(options.top_p);
    draw.min_p(options.min_p);
    const Philox random = philox(options.seed, index, 0);
    return draw.choose(options.temperature, random.word[0] | static_cast<uint64_t>(random.word[1]) << 32);
}

std::vector<Logprob> logprobs(const float* logits, int32_t vocabulary, int32_t id, int32_t best) {
    Ranking ranking(logits, vocabulary);
    const float largest = ranking[0].logit;
    uint64_t total = 0;
    for (int32_t other = 0; other < vocabulary; ++other) total += weight(logits[other], largest, 1.0f);
    const float log_total = log_of_total(total);
    std::vector<Logprob> found = {{id, (logits[id] - largest) - log_total}};
    for (size_t rank = 0; rank < static_cast<size_t>(std::min(best, vocabulary)); ++rank)
        found.push_back({ranking[rank].id, (ranking[rank].logit - largest) - log_total});
    return found;
}

}  // namespace spark
