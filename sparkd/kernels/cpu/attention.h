// Causal attention over KV pages.
//
// Every page of 64 positions gives a softmax that is not finished, (m, l, o), by itself; pages merge in order into
// groups of 16 by absolute position, groups merge in order, the first of each being copied. So a result depends on the
// positions alone, not on how a prompt was cut.
#pragma once

#include "cpu/step.h"

namespace spark {

class Attention : public Operation {
  public:
    struct Shape {
        int heads, kv_heads, head_dim;
        float scale;
        int window;  // 0: all positions are visible
        // Where the cache lies: page group, and byte offsets of K and V [kv_heads][64][head_dim] inside a page.
        size_t group;
        int64_t k_offset, v_offset;
    };

    Attention(Step& step, Value q, Value k, Value v, Value out, const Shape& shape);
    void run(Step& step) override;

  private:
    // Consecutive rows of one sequence.
    struct Block {
        int64_t first, count;
    };

    struct Queries;
    struct Page;
    class OneByOne;
    class Together;

    void store(Step& step, int64_t row) const;
    void attend(const Queries& queries, float* scratch) const;
    template <class Way>
    void attend(const Queries& queries, float* scratch) const;

    Value q_, k_, v_, out_;
    Shape shape_;
    std::vector<Block> blocks_;  // of the step
};

}  // namespace spark
