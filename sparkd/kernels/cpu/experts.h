// The router and the routed experts.
#pragma once

#include "cpu/step.h"

namespace spark {

class Route : public Operation {
  public:
    // `bias` may be null. Weights are multiplied by `scale` unless it is 1.
    Route(Step& step, Value x, const Weight& weight, const float* bias, size_t choice, bool sigmoid, float scale);
    void run(Step& step) override;

  private:
    void choose(const float* logits, float* scratch, int32_t* ids, float* weights, int top_k) const;

    Value x_;
    Weight weight_;
    const float* bias_;
    size_t choice_;
    bool sigmoid_;
    float scale_;
};

class Experts : public Operation {
  public:
    // `gate`, `up`, `down` are pieces: their addresses are offsets in the records of `layer`.
    Experts(Step& step, Value x, size_t choice, Value out, size_t layer, const Weight& gate, const Weight& up,
            const Weight& down);
    void run(Step& step) override;

  private:
    // Sorts the (row, rank) pairs of a step by expert.
    void group(const Choice& choice, int64_t rows);

    Value x_;
    size_t choice_;
    Value out_;
    size_t layer_;
    Weight gate_, up_, down_;
    std::vector<int32_t> pairs_;   // row * top_k + rank, expert by expert
    std::vector<Target> gates_, ups_, downs_;  // of the pairs in that order
    std::vector<int32_t> first_;   // per expert: its first pair; one more at the end
    std::vector<int32_t> chosen_;  // experts that have pairs
};

}  // namespace spark
