// The router and the routed experts.
#pragma once

#include "cpu/step.h"

namespace spark {

// std::logic_error unless the `top_k` ids of each row are those of different experts: they become indices.
void check_choice(const int32_t* ids, int64_t rows, int top_k, int64_t experts, size_t layer);

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

// Where a chosen record has no address (it is 0), `run` computes nothing and leaves itself in `Step::paused`. Whoever
// runs the plan then has the rest computed in any order, since the result of each (row, rank) pair has a place of its
// own, and resumes.
class Experts : public Operation {
  public:
    // `gate`, `up`, `down` are pieces: their addresses are offsets in the records of `layer`.
    Experts(Step& step, Value x, size_t choice, Value out, size_t layer, const Weight& gate, const Weight& up,
            const Weight& down);
    void run(Step& step) override;

    // --- while paused. What is refused is a std::invalid_argument.

    size_t layer() const { return layer_; }
    // Chosen experts whose record has no address.
    const std::vector<int32_t>& absent() const { return absent_; }
    // Whether a decode row chose this expert.
    bool decode(const Step& step, int32_t expert) const;
    // The rows that chose this expert.
    std::vector<int32_t> rows_of(const Step& step, int32_t expert) const;
    // Computes the chosen experts that have an address, at the first call, and these absent ones, whose records lie at
    // `addresses` until this returns. Each absent expert is given once.
    void compute(Step& step, const std::vector<int32_t>& experts, const std::vector<uint64_t>& addresses);
    // Ends operation and pause: every absent expert has been given.
    void resume(Step& step);

    // --- by itself, never paused

    // Computes those of the choice whose id is not negative, and sums nothing: the result of (row, rank) goes to row
    // `row * top_k + rank` of `results`. All their records have an address.
    void compute_some(Step& step, float* results);

  private:
    // Pairs of one expert to be computed: indices of `pairs_`, and of the targets while they are.
    struct Part {
        uint64_t record;
        int32_t first, end;
    };

    // Sorts the (row, rank) pairs of a step by expert; negative ids are nobody's.
    void group(const Choice& choice, int64_t rows);
    template <class Body>
    void for_rows_of(const Step& step, int32_t expert, const Body& body) const {
        const auto e = static_cast<size_t>(expert);
        for (int32_t i = first_[e]; i < first_[e + 1]; ++i)
            body(pairs_[static_cast<size_t>(i)] / step.choices[choice_].top_k);
    }
    // Computes `parts_` and empties it; the result of pair i goes to row i of `ranked`.
    void compute_parts(Step& step, float* ranked);
    void compute_parts(Step& step) { compute_parts(step, step.work.ranked.data()); }
    // Results of the pairs, weighted, in the order of rank.
    void sum(Step& step);

    Value x_;
    size_t choice_;
    Value out_;
    size_t layer_;
    Weight gate_, up_, down_;
    std::vector<int32_t> pairs_;               // row * top_k + rank, expert by expert
    std::vector<int32_t> first_;               // per expert: its first pair; one more at the end
    std::vector<Part> parts_;                  // what is to be computed next
    std::vector<Target> gates_, ups_, downs_;  // of the pairs of `parts_`
    std::vector<int32_t> absent_;
    std::vector<uint8_t> awaited_;             // per expert: absent, and not given yet
};

}  // namespace spark
