// Embedding rows, quantised activations, linear maps and logits.
#include "products.cuh"

namespace spark {

// One weight of a launch: rows of `out` are `out_width` wide; `first_block` is the launch's first block for it. What is
// written is the product, or its sum with `residual`, rows as wide, where that is not null.
struct Task {
    Matrix weight;
    float* out;
    const float* residual;
    int32_t out_width, first_block;
};

// Element `e` of a row, dequantised.
template <class D>
__device__ inline float dequantised(const uint8_t* row, int e) {
    const uint8_t* block = row + static_cast<int64_t>(e / D::kBlock) * D::kBytes;
    Unit unit;
    D::unit(Bytes{block}, e % D::kBlock / 32, unit);
    const int half = e % 32 / 16;
    const int32_t word = unit.u[e % 32 / 4];
    const int u = D::kBias != 0 || D::kOffset ? word >> 8 * (e % 4) & 255 : static_cast<int8_t>(word >> 8 * (e % 4));
    float y = (D::d(Bytes{block}) * static_cast<float>(unit.scale[half])) * static_cast<float>(u - D::kBias);
    if (D::kOffset) y = y + D::o(Bytes{block}) * static_cast<float>(unit.min[half]);
    return y;
}

// A product of all rows of the batch with all rows of the weights of a launch. grid: blocks of all tasks; block: 32 x kWarps.
// Cost: weight_bytes bytes, 2 * weights operations.
template <int COUNT>
__device__ inline void linear(const Batch* batch, const Task* tasks, int count, Inputs in) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    int t = 0;
    while (t + 1 < count && static_cast<int>(blockIdx.x) >= tasks[t + 1].first_block) ++t;
    const Task task = tasks[t];
    const int per_warp = rows_per_warp(task.weight.columns);
    const int first = ((static_cast<int>(blockIdx.x) - task.first_block) * kWarps + warp_id()) * per_warp;
    if (first >= task.weight.rows) return;
    int target[COUNT];
    for (int b = 0; b < COUNT; ++b) target[b] = b;
    float y[COUNT];
    row_products<COUNT>(task.weight, first, in, target, batch->rows, stage[warp_id()], y);
    const int lanes = 32 / per_warp;
    const int row = first + lane_id() / lanes;
    if (lane_id() % lanes == 0 && row < task.weight.rows)
        for (int b = 0; b < COUNT; ++b)
            if (b < batch->rows) {
                const int64_t place = static_cast<int64_t>(b) * task.out_width + row;
                task.out[place] = task.residual == nullptr ? y[b] : task.residual[place] + y[b];
            }
}

// The same for the rows whose logits are wanted: out row i is that of batch->logits_row[i].
// Cost: weight_bytes bytes, 2 * weights operations.
template <int COUNT>
__device__ inline void logits(const Batch* batch, Matrix weight, Inputs in, float* out) {
    __shared__ uint4 stage[kWarps][(kStageBytes + 15) / 16];
    const int per_warp = rows_per_warp(weight.columns);
    const int first = (static_cast<int>(blockIdx.x) * kWarps + warp_id()) * per_warp;
    if (first >= weight.rows || batch->logits == 0) return;
    float y[COUNT];
    row_products<COUNT>(weight, first, in, batch->logits_row, batch->logits, stage[warp_id()], y);
    const int lanes = 32 / per_warp;
    const int row = first + lane_id() / lanes;
    if (lane_id() % lanes == 0 && row < weight.rows)
        for (int b = 0; b < COUNT; ++b)
            if (b < batch->logits) out[static_cast<int64_t>(b) * weight.rows + row] = y[b];
}

// A finite logit and its id as a number: larger for a larger logit, of equal ones for the lower id. One that is not finite
// is larger than all that are.
__device__ inline uint64_t ranking(float logit, int id) {
    const uint32_t bits = bits_of(logit + 0.0f);  // -0 and 0 are equal
    const uint32_t ordered = !is_finite(logit) ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

// The largest of a block's numbers; every thread of the block calls this, all get it. Once more only after a barrier.
__device__ inline uint64_t block_largest(uint64_t mine) {
    __shared__ uint64_t of_warp[8];
    for (int step = 16; step > 0; step /= 2) {
        const uint64_t other = __shfl_xor_sync(kAllLanes, mine, step);
        mine = other > mine ? other : mine;
    }
    if (lane_id() == 0) of_warp[warp_id()] = mine;
    __syncthreads();
    for (int warp = 0; warp < 8; ++warp) mine = of_warp[warp] > mine ? of_warp[warp] : mine;
    return mine;
}

// best[i] = the first of the largest of the first `best_of` logits of row i, as the sampler finds it; where one is not
// finite: -1 - the id of the first such. Nothing when best_of is 0. Reads 4 bytes for each logit.
// grid (blocks, rows), block 256: a part of the row for each block, the last one compares them. counters [rows] 0,
// partials [rows][blocks].
// Cost: 4 * vocab bytes, vocab operations.
extern "C" __global__ void argmax(const Batch* batch, const float* logits, int vocab, uint32_t* counters,
                                  uint64_t* partials, int* best) {
    const int row = static_cast<int>(blockIdx.y);
    if (batch->best_of == 0 || row >= batch->logits) return;
    const int blocks = static_cast<int>(gridDim.x);
    const int number = static_cast<int>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    uint64_t found = 0;
    for (int id = number * 256 + thread; id < batch->best_of; id += 256 * blocks) {
        const uint64_t one = ranking(logits[static_cast<int64_t>(row) * vocab + id], id);
        found = one > found ? one : found;
    }
    found = block_largest(found);
    uint64_t* of_row = partials + static_cast<int64_t>(row) * blocks;
    if (thread == 0) of_row[number] = found;
    if (!last_of(counters + row, static_cast<uint32_t>(blocks))) return;
    found = thread < blocks ? __ldcg(of_row + thread) : 0;
    found = block_largest(found);
    if (thread != 0) return;
    const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(found));
    best[row] = found >> 32 == 0xffffffffu ? -1 - id : id;
}

// grid (ceil(columns / 256), rows), block 256
// Cost: row_bytes + 4 * width bytes, 2 * width operations.
extern "C" __global__ void embed(const Batch* batch, const uint8_t* weight, int type, int columns, int row_bytes, float* out) {
    const int row = static_cast<int>(blockIdx.y);
    const int e = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (row >= batch->rows || e >= columns) return;
    const uint8_t* from = weight + static_cast<int64_t>(batch->token[row]) * row_bytes;
    float value = 0.0f;
    switch (type) {
#define SPARK_INTEGER(TYPE) case TYPE: value = dequantised<Decoder<TYPE>>(from, e); break;
#define SPARK_FLOAT(TYPE) case TYPE: value = float_element<TYPE>(from, e); break;
        SPARK_TYPES(SPARK_INTEGER, SPARK_INTEGER, SPARK_FLOAT)
#undef SPARK_INTEGER
#undef SPARK_FLOAT
        default: __trap();
    }
    out[static_cast<int64_t>(row) * columns + e] = value;
}

// Rows of floats to the forms that are not null. grid (ceil(columns / 256), rows), block 256. `rows`: null for all rows of
// the grid, else how many there are.
// Cost: 5 * columns bytes, 3 * columns operations.
extern "C" __global__ void quantise(const int* rows, const float* x, int columns, int8_t* q256, float* a256, int8_t* q32,
                                    float* a32) {
    const int row = static_cast<int>(blockIdx.y);
    if (rows != nullptr && row >= *rows) return;
    const int first = static_cast<int>(blockIdx.x) * 256;
    const int64_t place = static_cast<int64_t>(row) * columns + first;
    quantise_block(x + place, columns - first < 256 ? columns - first : 256, Quantised{q256, a256, q32, a32}.at(place));
}

#define SPARK_LINEAR(COUNT)                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)                                                    \
        linear_##COUNT(const Batch* batch, const Task* tasks, int count, const float* x,                  \
                       const int8_t* q256, const float* a256, const int8_t* q32, const float* a32) {                    \
        linear<COUNT>(batch, tasks, count, {x, q256, a256, q32, a32});                                           \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)                                                    \
        logits_##COUNT(const Batch* batch, const uint8_t* weight, int type, int rows, int columns, int row_bytes,     \
                       const float* x, const int8_t* q256, const float* a256, const int8_t* q32, const float* a32,      \
                       float* out) {                                                                                    \
        logits<COUNT>(batch, {reinterpret_cast<uint64_t>(weight), type, rows, columns, row_bytes}, {x, q256, a256, q32, a32}, out);         \
    }
SPARK_COUNTS(SPARK_LINEAR)

}  // namespace spark
