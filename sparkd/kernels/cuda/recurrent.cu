// Recurrent state: the causal convolution and the gated delta rule, row after row of each sequence.
#include "device.cuh"

namespace spark {

// Zeroes the record of every sequence that begins in this step. grid (ceil(floats / 256), segments), block 256.
// Cost: 0 bytes, 0 operations. (For a sequence that goes on.)
extern "C" __global__ void begin_sequences(const Batch* batch, float* records, int64_t record_floats) {
    const int s = static_cast<int>(blockIdx.y);
    const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (s >= batch->segments || i >= record_floats || batch->segment[s].start != 0) return;
    records[batch->segment[s].slot * record_floats + i] = 0.0f;
}

// A thread for each channel. `offset` floats into a record lie the last taps - 1 rows, oldest first.
// grid (ceil(channels / 256), segments), block 256.
// Cost: 4 * 3 * taps * width bytes, 2 * taps * width operations.
extern "C" __global__ void causal_conv(const Batch* batch, const float* x, const float* weight, float* out, int channels,
                                       int taps, float* records, int64_t record_floats, int64_t offset) {
    const int s = static_cast<int>(blockIdx.y);
    const int c = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (s >= batch->segments || c >= channels) return;
    const SegmentRows segment = batch->segment[s];
    float* state = records + segment.slot * record_floats + offset + c;
    const auto raw = [&](int t) {
        return t < 0 ? state[static_cast<int64_t>(t + taps - 1) * channels] : x[static_cast<int64_t>(segment.row + t) * channels + c];
    };
    for (int t = 0; t < segment.length; ++t) {
        float sum = 0.0f;
        for (int j = 0; j < taps; ++j) sum = fma(weight[static_cast<int64_t>(c) * taps + j], raw(t - taps + 1 + j), sum);
        out[static_cast<int64_t>(segment.row + t) * channels + c] = silu(sum);
    }
    // Ascending, so that an old row is moved before its place is taken.
    for (int j = 0; j < taps - 1; ++j) state[static_cast<int64_t>(j) * channels] = raw(segment.length - taps + 1 + j);
}

// The state of one V head of one sequence by one block: each warp has every warps-th row of S, lane l the elements l,
// l + 32, ... of it. grid (v heads, segments), block 32 x warps; dynamic shared memory: q and k, n floats each.
// S is read and written once: what the second loop over a row reads is in the cache.
// Cost: 8 * state bytes, 7 * state operations.
extern "C" __global__ void gated_delta(const Batch* batch, const float* qkv, const float* alpha, const float* beta,
                                       const float* a, const float* dt_bias, float* out, int k_heads, int v_heads, int n,
                                       float eps, float* records, int64_t record_floats, int64_t offset) {
    SPARK_DYNAMIC_SHARED(float, shared);
    const int s = static_cast<int>(blockIdx.y);
    if (s >= batch->segments) return;
    const SegmentRows segment = batch->segment[s];
    const int head = static_cast<int>(blockIdx.x);
    const int k_head = head % k_heads;
    const int warps = static_cast<int>(blockDim.x / 32u);
    float* q = shared;
    float* k = shared + n;
    float* state = records + segment.slot * record_floats + offset + static_cast<int64_t>(head) * n * n;
    const float q_scale = 1.0f / square_root(static_cast<float>(n));
    for (int row = segment.row; row < segment.row + segment.length; ++row) {
        const float* x = qkv + static_cast<int64_t>(row) * (2 * k_heads + v_heads) * n;
        __syncthreads();
        if (warp_id() < 2) {
            const float* from = x + (warp_id() == 0 ? k_head : k_heads + k_head) * n;
            const float factor = 1.0f / square_root(warp_dot32(from, from, n) + eps);
            for (int j = lane_id(); j < n; j += 32)
                shared[warp_id() * n + j] = warp_id() == 0 ? (from[j] * factor) * q_scale : from[j] * factor;
        }
        __syncthreads();
        const float* v = x + (2 * k_heads + head) * n;
        const int64_t place = static_cast<int64_t>(row) * v_heads + head;
        const float b = sigmoid(beta[place]);
        const float decay = exp(softplus(alpha[place] + dt_bias[head]) * a[head]);
        for (int i = warp_id(); i < n; i += warps) {
            float* line = state + static_cast<int64_t>(i) * n;
            float partial = 0.0f;
            for (int j = lane_id(); j < n; j += 32) {
                const float decayed = line[j] * decay;
                line[j] = decayed;
                partial = fma(decayed, k[j], partial);
            }
            const float d = (v[i] - warp_tree(partial)) * b;
            partial = 0.0f;
            for (int j = lane_id(); j < n; j += 32) {
                const float updated = fma(d, k[j], line[j]);
                line[j] = updated;
                partial = fma(updated, q[j], partial);
            }
            const float y = warp_tree(partial);
            if (lane_id() == 0) out[place * n + i] = y;
        }
    }
}

}  // namespace spark
