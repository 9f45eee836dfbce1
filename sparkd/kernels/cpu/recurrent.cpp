#include "cpu/recurrent.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/float_kernels.h"

namespace spark {

namespace {

constexpr int kChannels = 1024;  // that a thread takes at a time

}  // namespace

CausalConv::CausalConv(Step& step, Value x, const Weight& weight, Value out, int taps, int64_t state_offset)
    : x_(x), weight_(float_vector(weight)), out_(out), taps_(taps), state_offset_(state_offset) {
    if (weight.columns != taps || weight.rows != x.width || out.width != x.width || taps < 2)
        throw std::invalid_argument("causal_conv: the weight is not [channels, taps]");
    step.reserve_scratch(static_cast<int64_t>(taps) * kChannels);
}

void CausalConv::run(Step& step) {
    const int64_t blocks = (x_.width + kChannels - 1) / kChannels;
    const int64_t segments = static_cast<int64_t>(step.segments.size());
    step.pool.run(segments * blocks, 1, [&](int64_t begin, int64_t end, int thread) {
        float* scratch = step.scratch[static_cast<size_t>(thread)].floats.data();
        for (int64_t i = begin; i < end; ++i) {
            const int first = static_cast<int>(i % blocks) * kChannels;
            run_channels(step, step.segments[static_cast<size_t>(i / blocks)], first,
                         std::min(first + kChannels, x_.width), scratch);
        }
    });
}

// `weights` holds the taps of the block's channels, turned to [taps][channels].
void CausalConv::run_channels(Step& step, const Segment& segment, int first, int last, float* weights) const {
    const int n = last - first;
    for (int j = 0; j < taps_; ++j)
        for (int c = 0; c < n; ++c) weights[j * n + c] = weight_[(first + c) * taps_ + j];

    float* state = step.record(segment, state_offset_) + first;
    // Row `t` of the segment; rows before it lie in the state, oldest first.
    const auto raw = [&](int64_t t) -> const float* {
        return t < 0 ? state + (t + taps_ - 1) * x_.width : step.row_of(x_, segment.row + t) + first;
    };
    for (int64_t t = 0; t < segment.length; ++t) {
        float* out = step.row_of(out_, segment.row + t) + first;
        std::fill(out, out + n, 0.0f);
        for (int j = 0; j < taps_; ++j) {
            const float* x = raw(t - taps_ + 1 + j);
            for (int c = 0; c < n; ++c) out[c] = fma(weights[j * n + c], x[c], out[c]);
        }
        for (int c = 0; c < n; ++c) out[c] = silu(out[c]);
    }
    // Ascending, so that an old row is moved before its place is taken.
    for (int j = 0; j < taps_ - 1; ++j) {
        const float* x = raw(segment.length - taps_ + 1 + j);
        std::copy(x, x + n, state + j * x_.width);
    }
}

GatedDelta::GatedDelta(Step& step, Value qkv, Value alpha, Value beta, const Weight& a, const Weight& dt_bias,
                       Value out, const Shape& shape)
    : qkv_(qkv),
      alpha_(alpha),
      beta_(beta),
      a_(float_vector(a)),
      dt_bias_(float_vector(dt_bias)),
      out_(out),
      shape_(shape) {
    const int v_width = shape.v_heads * shape.head_dim;
    if (qkv.width != 2 * shape.k_heads * shape.head_dim + v_width || out.width != v_width ||
        alpha.width != shape.v_heads || beta.width != shape.v_heads || a.columns != shape.v_heads ||
        dt_bias.columns != shape.v_heads || shape.v_heads % shape.k_heads != 0)
        throw std::invalid_argument("gated_delta: heads do not fit");
    step.reserve_scratch(2 * shape.head_dim);
}

void GatedDelta::run(Step& step) {
    const int64_t heads = shape_.v_heads;
    step.pool.run(static_cast<int64_t>(step.segments.size()) * heads, 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i)
            run_head(step, step.segments[static_cast<size_t>(i / heads)], static_cast<int>(i % heads),
                     step.scratch[static_cast<size_t>(thread)].floats.data());
    });
}

void GatedDelta::run_head(Step& step, const Segment& segment, int head, float* scratch) const {
    const int n = shape_.head_dim;
    const int k_head = head % shape_.k_heads;
    const float q_scale = 1.0f / square_root(static_cast<float>(n));
    float* q = scratch;
    float* k = scratch + n;
    float* state = step.record(segment, shape_.state_offset) + static_cast<int64_t>(head) * n * n;
    for (int64_t row = segment.row; row < segment.row + segment.length; ++row) {
        const float* raw_q = step.row_of(qkv_, row) + k_head * n;
        const float* raw_k = raw_q + shape_.k_heads * n;
        const float* v = step.row_of(qkv_, row) + (2 * shape_.k_heads + head) * n;
        const float q_factor = l2_factor(raw_q, n, shape_.eps);
        const float k_factor = l2_factor(raw_k, n, shape_.eps);
        for (int j = 0; j < n; ++j) q[j] = (raw_q[j] * q_factor) * q_scale;
        for (int j = 0; j < n; ++j) k[j] = raw_k[j] * k_factor;

        const float beta = sigmoid(step.row_of(beta_, row)[head]);
        const float decay = exp(softplus(step.row_of(alpha_, row)[head] + dt_bias_[head]) * a_[head]);
        float* out = step.row_of(out_, row) + head * n;
        delta_rows(state, n, n, q, k, v, beta, decay, out);
    }
}

}  // namespace spark
