// Operations on each row by itself: norms, rotary embedding, gates, sums. sparkd/graph/ops.py says what each one means.
// Grids have a row of blocks for each row of the graph; rows that the batch does not have are left alone.
#include "device.cuh"

namespace spark {

constexpr int kThreads = 256;

// cos and sin of every pair of a table for every row. grid (ceil(pairs / 32), rows), block 32. float64: a few hundred
// values for each step.
// Cost: 16 * pairs bytes, 0 operations.
extern "C" __global__ void angles(const Batch* batch, const double* inv_freq, int pairs, double magnitude, float* cosine,
                                  float* sine) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
    if (row >= batch->rows || i >= pairs) return;
    rope_row(batch->position(row), inv_freq + i, 1, magnitude, cosine + row * pairs + i, sine + row * pairs + i);
}

// out = (x * factor) * weight for one row by a block of 256, and its quantised forms. Every thread of the block calls this;
// `x` was written before a barrier.
__device__ inline void norm_row(const float* x, const float* weight, float* out, int n, float eps, Quantised forms) {
    __shared__ float factor;
    if (warp_id() == 0) {
        const float sum = warp_dot32(x, x, n);
        if (lane_id() == 0) factor = 1.0f / square_root(sum / static_cast<float>(n) + eps);
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < n; e += static_cast<int>(blockDim.x)) out[e] = (x[e] * factor) * weight[e];
    if (!forms.wanted()) return;
    for (int first = 0; first < n; first += 256)
        quantise_block(out + first, n - first < 256 ? n - first : 256, forms.at(first));
}

// grid rows, block 256
// Cost: 4 * floats bytes, 4 * width operations.
extern "C" __global__ void rms_norm(const Batch* batch, const float* x, const float* weight, float* out, int n, float eps,
                                    int8_t* q256, float* a256, int8_t* q32, float* a32) {
    const int row = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const int64_t place = static_cast<int64_t>(row) * n;
    norm_row(x + place, weight, out + place, n, eps, Quantised{q256, a256, q32, a32}.at(place));
}

// What an experts operation and the sums after it leave: out = residual + (the ranked sum + the shared expert), and the
// norm of it with its forms. `scalar` (null: none) is what the shared expert is multiplied with, through a sigmoid or a
// softplus. grid rows, block 256.
// Cost: 4 * (top_k + 5) * width bytes, (2 * top_k + 7) * width operations.
extern "C" __global__ void mixture_sum(const Batch* batch, const float* ranked, const float* weights, int top_k, int width,
                                       const float* shared, const float* scalar, int softly, const float* residual,
                                       float* out, const float* norm, float eps, float* normed, int8_t* q256, float* a256,
                                       int8_t* q32, float* a32) {
    const int row = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const float* w = weights + row * top_k;
    const float* y = ranked + static_cast<int64_t>(row) * top_k * width;
    const int64_t place = static_cast<int64_t>(row) * width;
    const float factor = scalar == nullptr ? 1.0f : softly ? softplus(scalar[row]) : sigmoid(scalar[row]);
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
        float sum = w[0] * y[i];
        for (int rank = 1; rank < top_k; ++rank) sum = fma(w[rank], y[static_cast<int64_t>(rank) * width + i], sum);
        const float one = scalar == nullptr ? shared[place + i] : shared[place + i] * factor;
        out[place + i] = residual[place + i] + (sum + one);
    }
    __syncthreads();
    norm_row(out + place, norm, normed + place, width, eps, Quantised{q256, a256, q32, a32}.at(place));
}

// A norm of each head; head h of a row begins at offset + h * stride. grid (heads, rows), block 32.
// Cost: 4 * floats bytes, 4 * width operations.
extern "C" __global__ void qk_norm(const Batch* batch, const float* x, const float* weight, float* out, int width,
                                   int heads, int head_dim, float eps, int stride, int offset) {
    const int row = static_cast<int>(blockIdx.y);
    const int head = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const float* from = x + static_cast<int64_t>(row) * width + offset + head * stride;
    float* to = out + (static_cast<int64_t>(row) * heads + head) * head_dim;
    const float factor = 1.0f / square_root(warp_dot32(from, from, head_dim) / static_cast<float>(head_dim) + eps);
    for (int i = lane_id(); i < head_dim; i += 32) to[i] = (from[i] * factor) * weight[i];
}

// grid (heads, rows), block 32
// Cost: 4 * floats bytes, 3 * width operations.
extern "C" __global__ void rope(const Batch* batch, const float* x, float* out, int heads, int head_dim, int pairs,
                                const float* cosine, const float* sine) {
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int64_t place = (static_cast<int64_t>(row) * heads + blockIdx.x) * head_dim;
    for (int i = lane_id(); i < pairs; i += 32) {
        float a = x[place + i];
        float b = x[place + pairs + i];
        rotate(a, b, cosine[row * pairs + i], sine[row * pairs + i]);
        out[place + i] = a;
        out[place + pairs + i] = b;
    }
    for (int i = 2 * pairs + lane_id(); i < head_dim; i += 32) out[place + i] = x[place + i];
}

// x * sigmoid or softplus of its gate. grid (ceil(heads * head_dim / 256), rows), block 256.
// Cost: 4 * floats bytes, width operations.
extern "C" __global__ void output_gate(const Batch* batch, const float* x, const float* gate, float* out, int gate_width,
                                       int heads, int head_dim, int softly, int per_head, int stride, int offset) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    const int width = heads * head_dim;
    if (row >= batch->rows || i >= width) return;
    const int head = i / head_dim;
    const float g = gate[static_cast<int64_t>(row) * gate_width + offset + head * stride + (per_head ? 0 : i % head_dim)];
    const int64_t place = static_cast<int64_t>(row) * width + i;
    out[place] = x[place] * (softly ? softplus(g) : sigmoid(g));
}

// The norm of each head times silu(gate), and its quantised forms: those only where heads fill spans of 256 elements.
// grid (ceil(heads / heads of a block), rows), block 32 x heads of a block.
// Cost: 4 * floats bytes, 5 * width operations.
extern "C" __global__ void gated_rms_norm(const Batch* batch, const float* x, const float* gate, const float* weight,
                                          float* out, int heads, int head_dim, float eps, int8_t* q256, float* a256,
                                          int8_t* q32, float* a32) {
    const int row = static_cast<int>(blockIdx.y);
    const int first = static_cast<int>(blockIdx.x * (blockDim.x / 32u));
    const int head = first + warp_id();
    if (row >= batch->rows) return;
    const int64_t place = (static_cast<int64_t>(row) * heads + head) * head_dim;
    if (head < heads) {
        const float* from = x + place;
        const float factor = 1.0f / square_root(warp_dot32(from, from, head_dim) / static_cast<float>(head_dim) + eps);
        for (int i = lane_id(); i < head_dim; i += 32)
            out[place + i] = ((from[i] * factor) * weight[i]) * silu(gate[place + i]);
    }
    const Quantised forms = {q256, a256, q32, a32};
    if (!forms.wanted()) return;
    __syncthreads();
    const int64_t span = (static_cast<int64_t>(row) * heads + first) * head_dim;
    const int left = (heads - first) * head_dim;
    quantise_block(out + span, left < 256 ? left : 256, forms.at(span));
}

// silu(gate) * up. grid (ceil(width / 256), rows), block 256.
// Cost: 4 * floats bytes, 2 * width operations.
extern "C" __global__ void swiglu(const Batch* batch, const float* gate, const float* up, float* out, int width) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    const int64_t place = static_cast<int64_t>(row) * width + i;
    out[place] = silu(gate[place]) * up[place];
}

// x + y. grid (ceil(width / 256), rows), block 256.
// Cost: 4 * floats bytes, width operations.
extern "C" __global__ void add(const Batch* batch, const float* x, const float* y, float* out, int width) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    const int64_t place = static_cast<int64_t>(row) * width + i;
    out[place] = x[place] + y[place];
}

}  // namespace spark
