// Prompts: attention and recurrent state over many rows of one sequence. Exactly what attention.cu and recurrent.cu do
// for a few, with what a page or a state holds read once for several rows.
#include "device.cuh"

namespace spark {

constexpr int kQueryWarps = 4;
constexpr int kWarpQueries = 2;
constexpr int kStagedPositions = 32;

// The halving tree over the lanes' partials of 32 numbers at once: lane l gets the sum of v[l], in v[0].
template <int STEP>
__device__ inline void transposed_tree(float (&v)[32]) {
    const bool upper = (lane_id() & STEP) != 0;
#pragma unroll
    for (int p = 0; p < STEP; ++p) {
        const float other = __shfl_xor_sync(kAllLanes, upper ? v[p] : v[p + STEP], STEP);
        v[p] = (upper ? v[p + STEP] : v[p]) + other;
    }
    if constexpr (STEP > 1) transposed_tree<STEP / 2>(v);
}

// One query of a warp: what it sees of the present page, and its sums that are not finished.
template <int DIMS>
struct Query {
    int row, head, position, begin, end, group;  // group: number of the group that `of_group` is of; -1: none yet
    bool has_total;
    float q[DIMS];
    Partial page, of_group, total;

    // The page is complete: goes to its group, which goes to the total when another one begins.
    __device__ void end_page(int number) {
        if (group == number / kGroupPages) {
            of_group.merge_with(page);
            return;
        }
        end_group();
        of_group = page;
        group = number / kGroupPages;
    }
    __device__ void end_group() {
        if (group < 0) return;
        if (has_total)
            total.merge_with(of_group);
        else
            total = of_group;
        has_total = true;
    }
};

// Attention of a segment's rows, without partials in memory: each warp has two queries, a block goes page by page and puts
// K, then V of 32 positions at a time into shared memory as floats. Queries of a KV head: number = row * group + head.
// grid (kv heads, ceil(rows * group / (kQueryWarps * kWarpQueries))), block 32 x kQueryWarps; dynamic shared memory:
// 32 x head_dim floats. `group`: query heads of a KV head; a head has at most 32 x DIMS elements.
// Cost: 2 * kv_bytes * seen * heads * head_dim // 8 + 8 * heads * head_dim bytes, 4 * seen * heads * head_dim operations.
template <int DIMS>
__device__ inline void prefill_attention(const Batch* batch, const float* q, const Cache* caches, int cache, int window,
                                   float scale, int group, float* out, float* staged) {
    const Cache c = caches[cache];
    const int n = c.head_dim, lane = lane_id();
    const int heads = c.kv_heads * group, kv_head = static_cast<int>(blockIdx.x);
    const int first_query = static_cast<int>(blockIdx.y) * kQueryWarps * kWarpQueries;
    const int queries = batch->rows * group;
    Query<DIMS> mine[kWarpQueries];
#pragma unroll
    for (int k = 0; k < kWarpQueries; ++k) {
        Query<DIMS>& query = mine[k];
        const int number = first_query + warp_id() * kWarpQueries + k;
        query.row = number < queries ? number / group : -1;
        query.head = kv_head * group + number % group;
        query.position = query.row < 0 ? -1 : batch->position(query.row);
        query.group = -1;
        query.has_total = false;
        const float* from = q + (static_cast<int64_t>(query.row) * heads + query.head) * n;
#pragma unroll
        for (int d = 0; d < DIMS; ++d) query.q[d] = query.row >= 0 && 32 * d + lane < n ? from[32 * d + lane] : 0.0f;
    }
    const int last_query = first_query + kQueryWarps * kWarpQueries < queries ? first_query + kQueryWarps * kWarpQueries - 1 : queries - 1;
    const int last_page = batch->position(last_query / group) / kPagePositions;
    const uint8_t* rows;
    const auto stage = [&](int first) {
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < kStagedPositions * n; i += 32 * kQueryWarps)
            staged[i] = cached(rows, c.half, static_cast<int64_t>(first) * n + i);
        __syncthreads();
    };

#pragma unroll 1
    for (int number = first_page(batch->position(first_query / group), window); number <= last_page; ++number) {
        const int start = number * kPagePositions;
        float score[kWarpQueries][2];
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) {
            Query<DIMS>& query = mine[k];
            const int oldest = window > 0 ? query.position - window + 1 - start : 0;
            query.begin = oldest > 0 ? oldest : 0;
            query.end = query.position - start < kPagePositions - 1 ? query.position - start + 1 : kPagePositions;
            query.page.m = from_bits(0xff800000u);
            query.page.l = 0.0f;
#pragma unroll
            for (int d = 0; d < DIMS; ++d) query.page.o[d] = 0.0f;
        }
        rows = c.rows(0, number, kv_head, c.k_offset);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            stage(kStagedPositions * half);
            float dot[kWarpQueries][32];
#pragma unroll
            for (int p = 0; p < 32; ++p) {
#pragma unroll
                for (int k = 0; k < kWarpQueries; ++k) dot[k][p] = 0.0f;
#pragma unroll
                for (int d = 0; d < DIMS; ++d) {
                    if (32 * d + lane >= n) continue;
                    const float key = staged[p * n + 32 * d + lane];
#pragma unroll
                    for (int k = 0; k < kWarpQueries; ++k) dot[k][p] = fma(mine[k].q[d], key, dot[k][p]);
                }
            }
            const int t = kStagedPositions * half + lane;
#pragma unroll
            for (int k = 0; k < kWarpQueries; ++k) {
                transposed_tree<16>(dot[k]);
                score[k][half] = dot[k][0] * scale;
                if (t >= mine[k].begin && t < mine[k].end) mine[k].page.m = larger(score[k][half], mine[k].page.m);
            }
        }
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) {
            for (int step = 16; step > 0; step /= 2) {
                // The largest of all that are not NaN; a NaN makes l a NaN, whatever m is.
                const float other = __shfl_xor_sync(kAllLanes, mine[k].page.m, step);
                mine[k].page.m = larger(other, mine[k].page.m);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) score[k][half] = exp(score[k][half] - mine[k].page.m);
        }
        rows = c.rows(0, number, kv_head, c.v_offset);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            stage(kStagedPositions * half);
#pragma unroll 1
            for (int p = 0; p < kStagedPositions; ++p) {
                const int t = kStagedPositions * half + p;
#pragma unroll
                for (int k = 0; k < kWarpQueries; ++k) {
                    Query<DIMS>& query = mine[k];
                    const float e = __shfl_sync(kAllLanes, score[k][half], p);
                    if (t < query.begin || t >= query.end) continue;
                    query.page.l = query.page.l + e;
#pragma unroll
                    for (int d = 0; d < DIMS; ++d)
                        if (32 * d + lane < n) query.page.o[d] = fma(e, staged[p * n + 32 * d + lane], query.page.o[d]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k)
            if (mine[k].begin < mine[k].end) mine[k].end_page(number);
    }
#pragma unroll
    for (int k = 0; k < kWarpQueries; ++k) {
        Query<DIMS>& query = mine[k];
        if (query.row < 0) continue;
        query.end_group();
        const float inverse = 1.0f / query.total.l;
        float* to = out + (static_cast<int64_t>(query.row) * heads + query.head) * n;
#pragma unroll
        for (int d = 0; d < DIMS; ++d)
            if (32 * d + lane < n) to[32 * d + lane] = query.total.o[d] * inverse;
    }
}

#define SPARK_ATTENTION(DIMS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * kQueryWarps, 2)                                                    \
        prefill_attention_##DIMS(const Batch* batch, const float* q, const Cache* caches, int cache, int window,         \
                                 float scale, int group, float* out) {                                                   \
        SPARK_DYNAMIC_SHARED(float, staged);                                                                             \
        prefill_attention<DIMS>(batch, q, caches, cache, window, scale, group, out, staged);                                   \
    }
SPARK_ATTENTION(2)
SPARK_ATTENTION(4)
SPARK_ATTENTION(8)

// The causal convolution of a segment's rows, each by itself; the state is read, not written.
// grid (ceil(channels / 256), rows), block 256.
// Cost: 4 * 3 * width bytes, 2 * taps * width operations.
extern "C" __global__ void prefill_conv(const Batch* batch, const float* x, const float* weight, float* out, int channels,
                                        int taps, const float* records, int64_t record_floats, int64_t offset) {
    const int c = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows || c >= channels) return;
    const float* state = records + batch->segment[0].slot * record_floats + offset + c;
    float sum = 0.0f;
    for (int j = 0; j < taps; ++j) {
        const int t = row - taps + 1 + j;
        const float value = t < 0 ? state[static_cast<int64_t>(t + taps - 1) * channels] : x[static_cast<int64_t>(t) * channels + c];
        sum = fma(weight[static_cast<int64_t>(c) * taps + j], value, sum);
    }
    out[static_cast<int64_t>(row) * channels + c] = silu(sum);
}

// The last taps - 1 rows become the state. grid ceil(channels / 256), block 256.
// Cost: 8 * (taps - 1) * width bytes, 0 operations.
extern "C" __global__ void prefill_conv_state(const Batch* batch, const float* x, int channels, int taps, float* records,
                                              int64_t record_floats, int64_t offset) {
    const int c = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (c >= channels) return;
    float* state = records + batch->segment[0].slot * record_floats + offset + c;
    // Ascending, so that an old row is moved before its place is taken.
    for (int j = 0; j < taps - 1; ++j) {
        const int t = batch->rows - taps + 1 + j;
        state[static_cast<int64_t>(j) * channels] = t < 0 ? state[static_cast<int64_t>(t + taps - 1) * channels] : x[static_cast<int64_t>(t) * channels + c];
    }
}

// What the delta rule takes of each row before it: q and k with their l2 norms, to qk[row][2][k_heads][n], and beta and
// decay of each V head, to factors[row][v_heads][2]. grid (2 x k_heads + ceil(v_heads / 32), rows), block 32.
// Cost: 16 * k_heads * head_dim bytes, 12 * k_heads * head_dim operations.
extern "C" __global__ void delta_inputs(const Batch* batch, const float* qkv, const float* alpha, const float* beta,
                                        const float* a, const float* dt_bias, int k_heads, int v_heads, int n, float eps,
                                        float* qk, float* factors) {
    const int row = static_cast<int>(blockIdx.y);
    const int part = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    if (part >= 2 * k_heads) {
        const int head = 32 * (part - 2 * k_heads) + lane_id();
        if (head >= v_heads) return;
        const int64_t place = static_cast<int64_t>(row) * v_heads + head;
        factors[2 * place] = sigmoid(beta[place]);
        factors[2 * place + 1] = exp(softplus(alpha[place] + dt_bias[head]) * a[head]);
        return;
    }
    const float* from = qkv + (static_cast<int64_t>(row) * (2 * k_heads + v_heads) + part) * n;
    float* to = qk + (static_cast<int64_t>(row) * 2 * k_heads + part) * n;
    const float factor = 1.0f / square_root(warp_dot32(from, from, n) + eps);
    const float q_scale = 1.0f / square_root(static_cast<float>(n));
    for (int j = lane_id(); j < n; j += 32) to[j] = part < k_heads ? (from[j] * factor) * q_scale : from[j] * factor;
}

constexpr int kDeltaLines = 4;  // lines of S that a warp has in registers

// The delta rule over all rows: lines of S do not know of each other. grid (v heads, ceil(n / (4 warps x kDeltaLines))),
// block 128.
// Cost: 4 * 4 * v_heads * head_dim bytes, 7 * state operations.
extern "C" __global__ void __launch_bounds__(128)
    prefill_delta(const Batch* batch, const float* qkv, const float* qk, const float* factors, float* out, int k_heads,
                  int v_heads, int n, float* records, int64_t record_floats, int64_t offset) {
    const int head = static_cast<int>(blockIdx.x), k_head = head % k_heads, lane = lane_id();
    const int first = (static_cast<int>(blockIdx.y) * 4 + warp_id()) * kDeltaLines;
    if (first >= n) return;
    float* state = records + batch->segment[0].slot * record_floats + offset + static_cast<int64_t>(head) * n * n;
    float s[kDeltaLines][kLaneDims];
#pragma unroll
    for (int i = 0; i < kDeltaLines; ++i)
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d)
            s[i][d] = first + i < n && 32 * d + lane < n ? state[static_cast<int64_t>(first + i) * n + 32 * d + lane] : 0.0f;
#pragma unroll 1
    for (int row = 0; row < batch->rows; ++row) {
        const float* q = qk + (static_cast<int64_t>(row) * 2 * k_heads + k_head) * n;
        const float* k = q + k_heads * n;
        const float* v = qkv + (static_cast<int64_t>(row) * (2 * k_heads + v_heads) + 2 * k_heads + head) * n;
        const int64_t place = static_cast<int64_t>(row) * v_heads + head;
        const float b = factors[2 * place], decay = factors[2 * place + 1];
        float partial[kDeltaLines], key[kLaneDims];
#pragma unroll
        for (int i = 0; i < kDeltaLines; ++i) partial[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) {
            if (32 * d + lane >= n) continue;
            key[d] = k[32 * d + lane];
#pragma unroll
            for (int i = 0; i < kDeltaLines; ++i) {
                s[i][d] = s[i][d] * decay;
                partial[i] = fma(s[i][d], key[d], partial[i]);
            }
        }
        float delta[kDeltaLines];
#pragma unroll
        for (int i = 0; i < kDeltaLines; ++i) delta[i] = ((first + i < n ? v[first + i] : 0.0f) - warp_tree(partial[i])) * b;
#pragma unroll
        for (int i = 0; i < kDeltaLines; ++i) partial[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) {
            if (32 * d + lane >= n) continue;
            const float query = q[32 * d + lane];
#pragma unroll
            for (int i = 0; i < kDeltaLines; ++i) {
                s[i][d] = fma(delta[i], key[d], s[i][d]);
                partial[i] = fma(s[i][d], query, partial[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < kDeltaLines; ++i) {
            const float y = warp_tree(partial[i]);
            if (lane == i && first + i < n) out[place * n + first + i] = y;
        }
    }
#pragma unroll
    for (int i = 0; i < kDeltaLines; ++i)
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d)
            if (first + i < n && 32 * d + lane < n) state[static_cast<int64_t>(first + i) * n + 32 * d + lane] = s[i][d];
}

}  // namespace spark
