// Operations with recurrent state: the causal convolution and the gated delta rule, one exact step per row.
#pragma once

#include "cpu/step.h"

namespace spark {

class CausalConv : public Operation {
  public:
    // `state_offset`: bytes into the record, where the last taps - 1 raw rows lie.
    CausalConv(Step& step, Value x, const Weight& weight, Value out, int taps, int64_t state_offset);
    void run(Step& step) override;

  private:
    void run_channels(Step& step, const Segment& segment, int first, int last, float* weights) const;

    Value x_;
    const float* weight_;  // [channels][taps]
    Value out_;
    int taps_;
    int64_t state_offset_;
};

class GatedDelta : public Operation {
  public:
    struct Shape {
        int k_heads, v_heads, head_dim;
        float eps;
        int64_t state_offset;  // bytes into the record
    };

    GatedDelta(Step& step, Value qkv, Value alpha, Value beta, const Weight& a, const Weight& dt_bias, Value out,
               const Shape& shape);
    void run(Step& step) override;

  private:
    void run_head(Step& step, const Segment& segment, int head, float* scratch) const;

    Value qkv_, alpha_, beta_;
    const float* a_;
    const float* dt_bias_;
    Value out_;
    Shape shape_;
};

}  // namespace spark
