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

// The k largest keys, best first. Lane l has the keys of experts l, l + 32, ...; NaN counts as -infinity.
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
    __syncwarp();
}

// ids and weights [rows][top_k] from logits [rows][experts]. grid rows, block 32.
extern "C" __global__ void route(const Batch* batch, const float* logits, const float* bias, int experts, int top_k,
                                 int by_sigmoid, float scale, int32_t* ids, float* weights) {
    __shared__ float p[kMaxExperts];
    __shared__ float keys[kMaxExperts];
    const int row = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const float* x = logits + static_cast<int64_t>(row) * experts;
    for (int e = lane_id(); e < experts; e += 32) {
        p[e] = by_sigmoid ? sigmoid(x[e]) : x[e];
        keys[e] = by_sigmoid && bias != nullptr ? p[e] + bias[e] : p[e];
    }
    __syncwarp();
    int32_t* chosen = ids + row * top_k;
    float* w = weights + row * top_k;
    largest(keys, experts, top_k, chosen);
    if (lane_id() != 0) return;
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

// grid 1, block kMaxPairs: a thread for each pair
extern "C" __global__ void group(const Batch* batch, const int32_t* ids, int top_k, Groups* groups) {
    __shared__ int32_t expert[kMaxPairs];
    __shared__ int32_t leads[kMaxPairs];
    const int pairs = batch->rows * top_k;
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

// A piece of a record: gate, up or down.
struct Piece {
    int64_t offset;
    int32_t type, rows, columns, row_bytes;

    __device__ Matrix in(uint64_t record) const { return {record + static_cast<uint64_t>(offset), type, rows, columns, row_bytes}; }
};

// inner[pair] = silu(gate x) * (up x). grid (ceil(rows / (kWarps * rows per warp)), pairs at most), block 32 x kWarps.
template <int COUNT>
__device__ inline void gate_up(const Groups* groups, const uint64_t* records, Piece gate, Piece up, int top_k, Inputs in,
                               float* inner) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int g = static_cast<int>(blockIdx.y);
    if (g >= groups->count) return;
    const int per_warp = rows_per_warp(gate.columns);
    const int first_row = (static_cast<int>(blockIdx.x) * kWarps + warp_id()) * per_warp;
    if (first_row >= gate.rows) return;
    const uint64_t record = records[groups->expert[g]];
    const int begin = groups->first[g];
    const int pairs = groups->first[g + 1] - begin;  // one of each row at most
    int target[COUNT], pair[COUNT];
    for (int b = 0; b < COUNT; ++b) {
        pair[b] = b < pairs ? groups->pair[begin + b] : 0;
        target[b] = pair[b] / top_k;
    }
    float gates[COUNT], ups[COUNT];
    row_products<COUNT>(gate.in(record), first_row, in, target, pairs, stage[warp_id()], gates);
    row_products<COUNT>(up.in(record), first_row, in, target, pairs, stage[warp_id()], ups);
    const int lanes = 32 / per_warp;
    const int row = first_row + lane_id() / lanes;
    if (lane_id() % lanes == 0 && row < gate.rows)
        for (int b = 0; b < COUNT; ++b)
            if (b < pairs) inner[static_cast<int64_t>(pair[b]) * gate.rows + row] = silu(gates[b]) * ups[b];
}

// ranked[pair] = down · inner[pair]. grid and block as above, by rows of down.
template <int COUNT>
__device__ inline void down(const Groups* groups, const uint64_t* records, Piece piece, Inputs in, float* ranked) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int g = static_cast<int>(blockIdx.y);
    if (g >= groups->count) return;
    const int per_warp = rows_per_warp(piece.columns);
    const int first_row = (static_cast<int>(blockIdx.x) * kWarps + warp_id()) * per_warp;
    if (first_row >= piece.rows) return;
    const int begin = groups->first[g];
    const int pairs = groups->first[g + 1] - begin;
    int target[COUNT];
    for (int b = 0; b < COUNT; ++b) target[b] = b < pairs ? groups->pair[begin + b] : 0;
    float y[COUNT];
    row_products<COUNT>(piece.in(records[groups->expert[g]]), first_row, in, target, pairs, stage[warp_id()], y);
    const int lanes = 32 / per_warp;
    const int row = first_row + lane_id() / lanes;
    if (lane_id() % lanes == 0 && row < piece.rows)
        for (int b = 0; b < COUNT; ++b)
            if (b < pairs) ranked[static_cast<int64_t>(target[b]) * piece.rows + row] = y[b];
}

// out = the sum over ranks in order, first copied. grid (ceil(width / 256), rows), block 256.
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

#define SPARK_EXPERTS(COUNT)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * kWarps) gate_up_##COUNT(                                          \
        const Groups* groups, const uint64_t* records, const Piece* pieces, int top_k, const float* x,                  \
        const int8_t* q256, const float* a256, const int8_t* q32, const float* a32, float* inner) {                     \
        gate_up<COUNT>(groups, records, pieces[0], pieces[1], top_k, {x, q256, a256, q32, a32}, inner);                 \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * kWarps) down_##COUNT(                                             \
        const Groups* groups, const uint64_t* records, const Piece* pieces, const float* x, const int8_t* q256,         \
        const float* a256, const int8_t* q32, const float* a32, float* ranked) {                                        \
        down<COUNT>(groups, records, pieces[2], {x, q256, a256, q32, a32}, ranked);                                     \
    }
SPARK_COUNTS(SPARK_EXPERTS)

}  // namespace spark
