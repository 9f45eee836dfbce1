// Operations on each row by itself: norms, rotary embedding, gates, sums. sparkd/graph/ops.py says what each one means.
// Grids have a row of blocks for each row of the graph; rows that the batch does not have are left alone.
#include "device.cuh"

namespace spark {

constexpr int kThreads = 256;

// cos and sin of every pair of a table for every row. grid (ceil(pairs / 32), rows), block 32. float64: a few hundred
// values for each step.
extern "C" __global__ void angles(const Batch* batch, const double* inv_freq, int pairs, double magnitude, float* cosine,
                                  float* sine) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
    if (row >= batch->rows || i >= pairs) return;
    rope_row(batch->position[row], inv_freq + i, 1, magnitude, cosine + row * pairs + i, sine + row * pairs + i);
}

// out = (x * factor) * weight, and its quantised forms where they are not null. grid rows, block 256.
extern "C" __global__ void rms_norm(const Batch* batch, const float* x, const float* weight, float* out, int n, float eps,
                                    int8_t* q256, float* a256, int8_t* q32, float* a32) {
    __shared__ float factor;
    __shared__ uint32_t shared[8];
    const int row = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const int64_t place = static_cast<int64_t>(row) * n;
    if (warp_id() == 0) {
        const float sum = warp_dot32(x + place, x + place, n);
        if (lane_id() == 0) factor = 1.0f / square_root(sum / static_cast<float>(n) + eps);
    }
    __syncthreads();
    for (int first = 0; first < n; first += kThreads) {
        const int e = first + static_cast<int>(threadIdx.x);
        const float value = e < n ? (x[place + e] * factor) * weight[e] : 0.0f;
        if (e < n) out[place + e] = value;
        const int64_t at = place + first;
        if (q256 != nullptr || q32 != nullptr)
            quantise_span(value, n - first < kThreads ? n - first : kThreads, q256 == nullptr ? nullptr : q256 + at,
                          a256 == nullptr ? nullptr : a256 + at / 256, q32 == nullptr ? nullptr : q32 + at,
                          a32 == nullptr ? nullptr : a32 + at / 32, shared);
    }
}

// A norm of each head; head h of a row begins at offset + h * stride. grid (heads, rows), block 32.
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

// The norm of each head times silu(gate). grid (heads, rows), block 32.
extern "C" __global__ void gated_rms_norm(const Batch* batch, const float* x, const float* gate, const float* weight,
                                          float* out, int heads, int head_dim, float eps) {
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int64_t place = (static_cast<int64_t>(row) * heads + blockIdx.x) * head_dim;
    const float* from = x + place;
    const float factor = 1.0f / square_root(warp_dot32(from, from, head_dim) / static_cast<float>(head_dim) + eps);
    for (int i = lane_id(); i < head_dim; i += 32) out[place + i] = ((from[i] * factor) * weight[i]) * silu(gate[place + i]);
}

// silu(gate) * up. grid (ceil(width / 256), rows), block 256.
extern "C" __global__ void swiglu(const Batch* batch, const float* gate, const float* up, float* out, int width) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    const int64_t place = static_cast<int64_t>(row) * width + i;
    out[place] = silu(gate[place]) * up[place];
}

// x + y. grid (ceil(width / 256), rows), block 256.
extern "C" __global__ void add(const Batch* batch, const float* x, const float* y, float* out, int width) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    const int64_t place = static_cast<int64_t>(row) * width + i;
    out[place] = x[place] + y[place];
}

}  // namespace spark
