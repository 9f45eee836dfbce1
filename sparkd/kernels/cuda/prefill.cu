// Prompts: products of many rows, and the routed experts by groups of rows. A batch of these kernels is of one segment.
#include "tiles.cuh"

namespace spark {

// Rows that a block multiplies: `count` places from `first` on, of one expert whose record is there.
struct Item {
    uint64_t record;
    int32_t first, count;
};

// All rows with all rows of the weights of a launch; `first_block` of a task is in tiles of weight rows.
// grid (tiles of rows, tiles of all weights), block kTileThreads.
// Cost: weight_bytes // 32 bytes, 2 * weights operations.
extern "C" __global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    prefill_linear(const Batch* batch, const Task* tasks, int count, const float* x, const int8_t* q256, const float* a256,
                   const int8_t* q32, const float* a32) {
    __shared__ Tile tile;
    __shared__ int target[kTileRows];
    int t = 0;
    while (t + 1 < count && static_cast<int>(blockIdx.y) >= tasks[t + 1].first_block) ++t;
    const Task task = tasks[t];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kTileRows) {
        const int row = static_cast<int>(blockIdx.x) * kTileRows + thread;
        target[thread] = row < batch->rows ? row : -1;
    }
    __syncthreads();
    const int first_row = (static_cast<int>(blockIdx.y) - task.first_block) * kTileWeights;
    tile_products(task.weight, first_row, Inputs{x, q256, a256, q32, a32}, target, tile, [&](int row, int r, float y) {
        const int64_t place = static_cast<int64_t>(target[r]) * task.out_width + row;
        task.out[place] = task.residual == nullptr ? y : task.residual[place] + y;
    });
}

// The router's choice of each row, from its logits. grid ceil(rows / 4), block 128; dynamic shared memory: 2 x experts
// floats for each warp.
// Cost: 4 * experts bytes, top_k * experts operations.
extern "C" __global__ void prefill_choose(const Batch* batch, const float* logits, const float* bias, int experts, int top_k,
                                          int by_sigmoid, float scale, int32_t* ids, float* weights) {
    SPARK_DYNAMIC_SHARED(float, shared);
    const int row = static_cast<int>(blockIdx.x) * 4 + warp_id();
    if (row >= batch->rows) return;
    float* p = shared + 2 * warp_id() * experts;
    choose(logits + static_cast<int64_t>(row) * experts, bias, experts, top_k, by_sigmoid != 0, scale, p, p + experts,
           ids + row * top_k, weights + row * top_k);
}

// Sorts the (row, rank) pairs by expert: those of expert e are pair[first[e]] .. pair[first[e + 1] - 1], ascending. A
// warp for each expert, which counts the pairs of lower ones by itself. grid ceil(experts / 8), block 256.
// Cost: 4 * top_k * experts bytes, 0 operations.
extern "C" __global__ void sort_pairs(const Batch* batch, const int32_t* ids, int top_k, int experts, int32_t* first,
                                      int32_t* pair) {
    const int expert = static_cast<int>(blockIdx.x) * 8 + warp_id();
    if (expert >= experts) return;
    const int pairs = batch->rows * top_k;
    const int lane = lane_id();
    int before = 0;
    for (int base = 0; base < pairs; base += 32)
        before += __popc(__ballot_sync(kAllLanes, base + lane < pairs && ids[base + lane] < expert));
    int place = before;
    for (int base = 0; base < pairs; base += 32) {
        const bool mine = base + lane < pairs && ids[base + lane] == expert;
        const unsigned all = __ballot_sync(kAllLanes, mine);
        if (mine) pair[place + __popc(all & ((1u << lane) - 1u))] = base + lane;
        place += __popc(all);
    }
    if (lane != 0) return;
    first[expert] = before;
    if (expert == experts - 1) first[experts] = pairs;
}

// `down` 0: of the row of each place its products with gate (to inner) and up (to `up`); 1: ranked[pair] = down ·
// inner[place]. grid (tiles of weight rows, items, 1 for down, else 2), block kTileThreads.
// Cost: weight_bytes // min(32, rows_of_expert) bytes, 2 * weights operations.
extern "C" __global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    prefill_experts(const Item* items, const int32_t* pair, const Layer* layer, int top_k, int down, float* up, const float* x,
                    const int8_t* q256, const float* a256, const int8_t* q32, const float* a32) {
    // What is the same for all threads lies in shared memory: registers are short here.
    __shared__ Tile tile;
    __shared__ int target[kTileRows];
    __shared__ float* to[kTileRows];
    __shared__ Matrix weight;
    __shared__ Inputs in;
    const Item item = items[blockIdx.y];
    const bool is_up = blockIdx.z == 1;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kTileRows) {
        const bool here = thread < item.count;
        const int64_t place = item.first + thread;
        target[thread] = !here ? -1 : down ? static_cast<int>(place) : pair[place] / top_k;
        to[thread] = !here ? nullptr : down ? layer->ranked + static_cast<int64_t>(pair[place]) * layer->down.rows
                                            : (is_up ? up : layer->inner) + place * layer->gate.rows;
    }
    if (thread == 0) {
        weight = (down ? layer->down : is_up ? layer->up : layer->gate).in(item.record);
        const Quantised& forms = layer->forms;
        in = down ? Inputs{layer->inner, forms.q256, forms.a256, forms.q32, forms.a32} : Inputs{x, q256, a256, q32, a32};
    }
    __syncthreads();
    tile_products(weight, static_cast<int>(blockIdx.x) * kTileWeights, in, target, tile,
                  [&](int row, int r, float y) { to[r][row] = y; });
}

// inner = silu(inner) * up for the rows of items, and their quantised forms. grid (ceil(inner width / 256), items), block 256.
// Cost: 4 * 4 * top_k * width bytes, 30 * top_k * width operations.
extern "C" __global__ void prefill_inner(const Item* items, const Layer* layer, const float* up) {
    const Item item = items[blockIdx.y];
    const int width = layer->gate.rows;
    const int column = static_cast<int>(blockIdx.x) * 256;
    const int left = width - column < 256 ? width - column : 256;
    const int thread = static_cast<int>(threadIdx.x);
    for (int r = 0; r < item.count; ++r) {
        const int64_t place = static_cast<int64_t>(item.first + r) * width + column;
        if (thread < left) layer->inner[place + thread] = silu(layer->inner[place + thread]) * up[place + thread];
        quantise_block(layer->inner + place, left, layer->forms.at(place));
    }
}

}  // namespace spark
