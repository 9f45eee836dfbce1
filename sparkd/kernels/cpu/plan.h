// A program with its operands bound to memory: built once, run step by step.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cpu/step.h"

namespace spark {

class Plan {
  public:
    // Steps of at most `max_rows` rows; the arena has `width` floats per row.
    Plan(int64_t max_rows, int threads, int64_t width);

    // --- building: what operations refer to, then the operations in order

    size_t add_rope_table(std::vector<double> inv_freq, double magnitude);
    size_t add_choice(int top_k);
    size_t add_expert_layer(size_t experts);
    template <class Op, class... Args>
    void add(Args&&... args) {
        operations_.push_back(std::make_unique<Op>(std::forward<Args>(args)...));
    }
    Step& step() { return step_; }

    // --- running

    struct Rows {
        const int32_t* tokens;
        int64_t count;
        std::vector<Segment> segments;
        const int32_t* logits_rows;
        int64_t logits_count;
    };

    // Runs all operations. `logits` is [logits_count][vocab]; `experts` [routes][rows][top_k].
    void run(Rows rows, float* logits, int16_t* experts);

  private:
    void take(Rows rows, float* logits);

    Step step_;
    std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace spark
