// A program with its operands bound to memory: built once, run step by step.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cpu/experts.h"
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
        overtakers_.push_back(0);
    }
    // So many of the operations that follow the last one need nothing that it writes, and write nothing that it reads.
    void add_overtakers(size_t count) { overtakers_.at(operations_.size() - 1) = count; }
    Step& step() { return step_; }

    // --- running

    struct Rows {
        const int32_t* tokens;
        int64_t count;
        std::vector<Segment> segments;
        const int32_t* logits_rows;
        int64_t logits_count;
        int32_t best_of = 0;      // of so many ids the best of each row of logits goes to `best`, if any
        int32_t* best = nullptr;  // [logits_count]: see best_token
    };

    // Runs the operations, to the end or to the next pause (`step().paused`). All memory handed in is used until the
    // end: `logits` is [logits_count][vocab]; `experts` [routes][rows][top_k]; `waited` [rows] counts the chosen
    // experts that had no address. A step that is never resumed is forgotten by the next.
    void run(Rows rows, float* logits, int16_t* experts, int32_t* waited);

    // --- while paused: see Experts

    Experts& paused();
    // Computes what is there, then the operations that overtake the one that waits.
    void meanwhile();
    void compute(const std::vector<int32_t>& experts, const std::vector<uint64_t>& addresses);
    void resume();

  private:
    void take(Rows rows, float* logits);
    void go_on();

    Step step_;
    std::vector<std::unique_ptr<Operation>> operations_;
    std::vector<size_t> overtakers_;  // of each operation
    size_t next_ = 0;                 // the operation that runs next
    size_t overtaking_ = 0;           // of a pause: operations from there on that may run before its end
    int16_t* experts_ = nullptr;
    int32_t* waited_ = nullptr;
};

}  // namespace spark
