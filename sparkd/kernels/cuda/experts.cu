// The router's choice and the routed experts, through a table of addresses: a record may lie in device memory or in host
// memory that the device can read.
#include "products.cuh"

namespace spark {

constexpr int kMaxTopK = 16;
constexpr int kMaxPairs = kMaxRows * kMaxTopK;
constexpr int kMaxExperts = 1024;

// The (row, rank) pairs of a step by expert: group g has `expert[g]` and the pairs first[g] .. first[g + 1] - 1 of `pair`
// (row * top_k + rank, ascending). No two groups have one expert, so a record is read once, however many rows want it.
struct Groups {
    int32_t count;
    int32_t expert[kMaxPairs];
    int32_t first[kMaxPairs + 1];
    int32_t pair[kMaxPairs];
};

// Whether key `a` of expert `i` ranks before key `b` of expert `j`: the larger key, of equal ones the lower id.
__device__ inline bool before(float a, int i, float b, int j) { return a > b || (a == b && i < j); }

// The k largest keys, best first, for the first lane. Lane l has the keys of experts l, l + 32, ..., which it has put there
// itself; NaN counts as -infinity.
__device__ inline void largest(const float* keys, int n, int k, int32_t* ids) {
    const float lowest = from_bits(0xff800000u);
    float last_key = 0.0f;
    int last_id = -1;
    for (int rank = 0; rank < k; ++rank) {
        int best = kMaxExperts;
        float best_key = lowest;
        for (int id = lane_id(); id < n; id += 32) {
            const float key = keys[id] == keys[id] ? keys[id] : lowest;
            if (rank > 0 && !before(last_key, last_id, key, id)) continue;
            if (best == kMaxExperts || before(key, id, best_key, best)) {
                best = id;
                best_key = key;
            }
        }
        for (int step = 16; step > 0; step /= 2) {
            const float key = __shfl_xor_sync(kAllLanes, best_key, step);
            const int id = __shfl_xor_sync(kAllLanes, best, step);
            if (id != kMaxExperts && (best == kMaxExperts || before(key, id, best_key, best))) {
                best = id;
                best_key = key;
            }
        }
        if (lane_id() == 0) ids[rank] = best;
        last_key = best_key;
        last_id = best;
    }
}

// Chooses for one row by a warp: ids and weights [top_k] from logits [experts]. `p` and `keys` have room for them.
__device__ inline void choose(const float* logits, const float* bias, int experts, int top_k, bool by_sigmoid, float scale,
                              float* p, float* keys, int32_t* chosen, float* w) {
    for (int e = lane_id(); e < experts; e += 32) {
        const float x = __ldcg(logits + e);
        p[e] = by_sigmoid ? sigmoid(x) : x;
        keys[e] = by_sigmoid && bias != nullptr ? p[e] + bias[e] : p[e];
    }
    __syncwarp();
    largest(keys, experts, top_k, chosen);
    if (lane_id() == 0) {
        float sum = 0.0f;
        for (int rank = 0; rank < top_k; ++rank) {
            w[rank] = by_sigmoid ? p[chosen[rank]] : exp(p[chosen[rank]] - p[chosen[0]]);
            sum = sum + w[rank];
        }
        if (by_sigmoid) sum = larger(sum, 0x1p-14f);
        for (int rank = 0; rank < top_k; ++rank) {
            w[rank] = w[rank] / sum;
            if (scale != 1.0f) w[rank] = w[rank] * scale;
        }
    }
    __syncwarp();  // the warp's next row is put where this one was
}

// Groups the pairs of a step by a block: a thread for each pair.
__device__ inline void group_pairs(const int32_t* ids, int pairs, Groups* groups) {
    __shared__ int32_t expert[kMaxPairs];
    __shared__ int32_t leads[kMaxPairs];
    const int p = static_cast<int>(threadIdx.x);
    if (p < pairs) expert[p] = ids[p];
    __syncthreads();
    bool leader = p < pairs;
    for (int i = 0; i < p && leader; ++i) leader = expert[i] != expert[p];
    if (p < pairs) leads[p] = leader;
    __syncthreads();
    if (leader) {
        int number = 0, first = 0;  // groups before this one, and their pairs
        for (int i = 0; i < p; ++i) {
            if (!leads[i]) continue;
            ++number;
            for (int j = i; j < pairs; ++j) first += expert[j] == expert[i];
        }
        groups->expert[number] = expert[p];
        groups->first[number] = first;
        for (int j = p; j < pairs; ++j)
            if (expert[j] == expert[p]) groups->pair[first++] = j;
    }
    if (p == 0) {
        int count = 0;
        for (int i = 0; i < pairs; ++i) count += leads[i];
        groups->count = count;
        groups->first[count] = pairs;
    }
}

// The router: logits by all blocks; the last one to end chooses for each row and groups the pairs.
// grid: blocks of the weight; block 32 x kWarps = kMaxPairs; dynamic shared memory: 2 x experts floats for each warp.
// Cost: weight_bytes bytes, 2 * weights operations.
template <int COUNT>
__device__ inline void route(const Batch* batch, Matrix weight, Inputs in, float* logits, uint32_t* counter,
                             const float* bias, int top_k, bool by_sigmoid, float scale, int32_t* ids, float* weights,
                             Groups* groups) {
    static_assert(32 * kWarps >= kMaxPairs, "a thread for each pair");
    SPARK_DYNAMIC_SHARED(float, shared);
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int per_warp = rows_per_warp(weight.columns);
    const int first = (static_cast<int>(blockIdx.x) * kWarps + warp_id()) * per_warp;
    if (first < weight.rows) {
        int target[COUNT];
        for (int b = 0; b < COUNT; ++b) target[b] = b;
        float y[COUNT];
        row_products<COUNT>(weight, first, in, target, batch->rows, stage[warp_id()], y);
        const int lanes = 32 / per_warp;
        const int row = first + lane_id() / lanes;
        if (lane_id() % lanes == 0 && row < weight.rows)
            for (int b = 0; b < COUNT; ++b)
                if (b < batch->rows) logits[static_cast<int64_t>(b) * weight.rows + row] = y[b];
    }
    if (!last_of(counter, gridDim.x)) return;
    for (int row = warp_id(); row < batch->rows; row += kWarps)
        choose(logits + static_cast<int64_t>(row) * weight.rows, bias, weight.rows, top_k, by_sigmoid, scale,
               shared + 2 * warp_id() * weight.rows, shared + (2 * warp_id() + 1) * weight.rows, ids + row * top_k,
               weights + row * top_k);
    __syncthreads();
    group_pairs(ids, batch->rows * top_k, groups);
}

// A piece of a record: gate, up or down.
struct Piece {
    int64_t offset;
    int32_t type, rows, columns, row_bytes;

    __device__ Matrix in(uint64_t record) const { return {record + static_cast<uint64_t>(offset), type, rows, columns, row_bytes}; }
};

// The shared expert of a layer, which every row goes to; `rows` 0: there is none. `scalar`: one row, or rows 0.
struct SharedExpert {
    Matrix gate, up, down, scalar;
    float* inner;
    Quantised forms;
    float* out;
    float* factor;
};

// Gate, up, down inside the records of a layer; inner rows, one for each pair, with their forms; results, one for each.
struct Layer {
    Piece gate, up, down;
    float* inner;
    Quantised forms;
    float* ranked;
    uint32_t* counters;  // [pairs at most + 1][spans of inner rows]
    SharedExpert shared;
};

// inner[target[b]] = silu(gate x) * (up x); the last block of a span of 256 inner rows quantises it. Half of a block's warps
// multiply gate rows, the others the up rows of the same numbers.
// grid (blocks of the longer gate, pairs at most + 2), block 32 x kWarps: a row of blocks for each group, then the shared
// expert, then its scalar.
// Cost: weight_bytes bytes, 2 * weights operations.
template <int COUNT>
__device__ inline void gate_up(const Batch* batch, const Groups* groups, const uint64_t* records, const Layer* layer,
                               int top_k, Inputs in) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int g = static_cast<int>(blockIdx.y);
    const bool is_shared = g == static_cast<int>(gridDim.y) - 2;
    const bool is_scalar = g == static_cast<int>(gridDim.y) - 1;
    const bool routed = !is_shared && !is_scalar;
    if (routed && g >= groups->count) return;
    const SharedExpert& shared = layer->shared;
    const uint64_t record = routed ? records[groups->expert[g]] : 0;
    if (routed && record == 0) return;  // the host computes it
    // What is the same for all threads lies in shared memory: registers are short here.
    __shared__ Matrix weights[2];
    __shared__ int begin, count, x_row[COUNT], target[COUNT];
    __shared__ float gate[kWarps / 2][4][COUNT];
    const auto weight = [&](int side) {
        const Piece* piece = side == 0 ? &layer->gate : &layer->up;
        const Matrix* matrix = is_scalar ? &shared.scalar : side == 0 ? &shared.gate : &shared.up;
        return Matrix{routed ? record + static_cast<uint64_t>(piece->offset) : matrix->address,
                      routed ? piece->type : matrix->type, routed ? piece->rows : matrix->rows,
                      routed ? piece->columns : matrix->columns, routed ? piece->row_bytes : matrix->row_bytes};
    };
    const int thread = static_cast<int>(threadIdx.x);
    const int first_pair = routed ? groups->first[g] : 0;
    const int pairs = routed ? groups->first[g + 1] - first_pair : batch->rows;  // one of each row at most
    if (thread == 0) {
        begin = first_pair;
        count = pairs;
    }
    if (thread < 2) weights[thread] = weight(thread);
    if (thread < COUNT) {
        target[thread] = !routed ? thread : thread < pairs ? groups->pair[first_pair + thread] : 0;
        x_row[thread] = routed ? target[thread] / top_k : thread;
    }
    __syncthreads();
    const int rows = weights[0].rows;
    const int per_warp = rows_per_warp(weights[0].columns);
    const int per_block = kWarps / 2 * per_warp;
    const int first_of_block = static_cast<int>(blockIdx.x) * per_block;
    if (first_of_block >= rows) return;

    const int pair = warp_id() % (kWarps / 2);
    const int side = warp_id() / (kWarps / 2);
    const int first = first_of_block + pair * per_warp;
    const int lanes = 32 / per_warp;
    const int row = first + lane_id() / lanes;
    const bool leads = lane_id() % lanes == 0 && row < rows;
    float y[COUNT];
    if (first < rows && (side == 0 || !is_scalar))
        row_products<COUNT>(weights[side], first, in, x_row, count, stage[warp_id()], y);
    if (leads && side == 0)
        for (int b = 0; b < COUNT; ++b)
            if (b < count) gate[pair][lane_id() / lanes][b] = y[b];
    __syncthreads();
    float* inner = routed ? layer->inner : shared.inner;
    if (leads && side == (is_scalar ? 0 : 1))
        for (int b = 0; b < COUNT; ++b) {
            if (b >= count) break;
            if (is_scalar)
                shared.factor[b] = y[b];
            else
                inner[static_cast<int64_t>(target[b]) * rows + row] = silu(gate[pair][lane_id() / lanes][b]) * y[b];
        }
    const Quantised& forms = routed ? layer->forms : shared.forms;
    if (is_scalar || !forms.wanted()) return;
    const int spans = (layer->gate.rows + 255) / 256;
    const int span = first_of_block / 256;
    const int left = rows - 256 * span < 256 ? rows - 256 * span : 256;
    uint32_t* counter = layer->counters + (routed ? g : kMaxPairs) * spans + span;
    if (!last_of(counter, static_cast<uint32_t>((left + per_block - 1) / per_block))) return;
#pragma unroll 1
    for (int b = 0; b < COUNT; ++b) {
        if (b >= count) break;
        const int64_t place = static_cast<int64_t>(routed ? groups->pair[begin + b] : b) * rows + 256 * span;
        quantise_block(inner + place, left, forms.at(place));
    }
}

// ranked[pair] = down · inner[pair], and the same for the shared expert. grid (blocks of down, pairs at most + 1).
// Cost: weight_bytes bytes, 2 * weights operations.
template <int COUNT>
__device__ inline void down(const Batch* batch, const Groups* groups, const uint64_t* records, const Layer* layer) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int g = static_cast<int>(blockIdx.y);
    const bool is_shared = g == static_cast<int>(gridDim.y) - 1;
    if (!is_shared && g >= groups->count) return;
    const uint64_t record = is_shared ? 0 : records[groups->expert[g]];
    if (!is_shared && record == 0) return;
    const Matrix weight = is_shared ? layer->shared.down : layer->down.in(record);
    const int per_warp = rows_per_warp(weight.columns);
    const int first_row = (static_cast<int>(blockIdx.x) * kWarps + warp_id()) * per_warp;
    if (first_row >= weight.rows) return;
    const int begin = is_shared ? 0 : groups->first[g];
    const int count = is_shared ? batch->rows : groups->first[g + 1] - begin;
    int target[COUNT];
    for (int b = 0; b < COUNT; ++b) target[b] = is_shared ? b : b < count ? groups->pair[begin + b] : 0;
    const Quantised& q = is_shared ? layer->shared.forms : layer->forms;
    const Inputs in = {is_shared ? layer->shared.inner : layer->inner, q.q256, q.a256, q.q32, q.a32};
    float y[COUNT];
    row_products<COUNT>(weight, first_row, in, target, count, stage[warp_id()], y);
    float* out = is_shared ? layer->shared.out : layer->ranked;
    const int lanes = 32 / per_warp;
    const int row = first_row + lane_id() / lanes;
    if (lane_id() % lanes == 0 && row < weight.rows)
        for (int b = 0; b < COUNT; ++b)
            if (b < count) out[static_cast<int64_t>(target[b]) * weight.rows + row] = y[b];
}

// Tells the host, in its memory, which of the chosen experts have no record here: `told` is the number of rows, then of
// each pair its expert or -1; `host_x` gets the rows that chose any. grid (ceil(width / 256), rows), block 256.
// Cost: 8 * width bytes, top_k operations.
extern "C" __global__ void tell_host(const Batch* batch, const int32_t* ids, const uint64_t* records, const float* x,
                                     int top_k, int width, int32_t* told, float* host_x) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (i == 0 && row == 0) told[0] = batch->rows;
    if (row >= batch->rows) return;
    bool any = false;
    for (int rank = 0; rank < top_k; ++rank) any = any || records[ids[row * top_k + rank]] == 0;
    if (i < top_k) {
        const int pair = row * top_k + i;
        told[1 + pair] = records[ids[pair]] == 0 ? ids[pair] : -1;
    }
    const int64_t place = static_cast<int64_t>(row) * width + i;
    if (any && i < width) host_x[place] = x[place];
}

// Puts what the host has computed where the sum looks for it. grid (ceil(width / 256), rows), block 256.
// Cost: 8 * top_k * width bytes, top_k operations.
extern "C" __global__ void take_host(const Batch* batch, const int32_t* ids, const uint64_t* records, const float* results,
                                     int top_k, int width, float* ranked) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    for (int pair = row * top_k; pair < (row + 1) * top_k; ++pair) {
        const int64_t place = static_cast<int64_t>(pair) * width + i;
        if (records[ids[pair]] == 0) ranked[place] = results[place];
    }
}

// out = the sum over ranks in order, first copied. grid (ceil(width / 256), rows), block 256.
// Cost: 4 * (top_k + 1) * width bytes, 2 * top_k * width operations.
extern "C" __global__ void weighted_sum(const Batch* batch, const float* ranked, const float* weights, int top_k, int width,
                                        float* out) {
    const int row = static_cast<int>(blockIdx.y);
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (row >= batch->rows || i >= width) return;
    const float* w = weights + row * top_k;
    const float* y = ranked + static_cast<int64_t>(row) * top_k * width + i;
    float sum = w[0] * y[0];
    for (int rank = 1; rank < top_k; ++rank) sum = fma(w[rank], y[static_cast<int64_t>(rank) * width], sum);
    out[static_cast<int64_t>(row) * width + i] = sum;
}

#define SPARK_EXPERTS(COUNT)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)                                                            \
        route_##COUNT(const Batch* batch, const uint8_t* weight, int type, int rows, int columns, int row_bytes,         \
                      const float* x, const int8_t* q256, const float* a256, const int8_t* q32, const float* a32,        \
                      float* logits, uint32_t* counter, const float* bias, int top_k, int by_sigmoid, float scale,       \
                      int32_t* ids, float* weights, Groups* groups) {                                                    \
        route<COUNT>(batch, {reinterpret_cast<uint64_t>(weight), type, rows, columns, row_bytes},                        \
                     {x, q256, a256, q32, a32}, logits, counter, bias, top_k, by_sigmoid != 0, scale, ids, weights,      \
                     groups);                                                                                            \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)                                                            \
        gate_up_##COUNT(const Batch* batch, const Groups* groups, const uint64_t* records, const Layer* layer,           \
                        int top_k, const float* x, const int8_t* q256, const float* a256, const int8_t* q32,             \
                        const float* a32) {                                                                              \
        gate_up<COUNT>(batch, groups, records, layer, top_k, {x, q256, a256, q32, a32});                                 \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)                                                            \
        down_##COUNT(const Batch* batch, const Groups* groups, const uint64_t* records, const Layer* layer) {            \
        down<COUNT>(batch, groups, records, layer);                                                                      \
    }
SPARK_COUNTS(SPARK_EXPERTS)

}  // namespace spark
