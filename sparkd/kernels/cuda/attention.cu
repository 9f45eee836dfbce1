// Attention over paged K and V: each page by itself, then pages merged in the order that docs/arithmetic.md says.
#include "device.cuh"

namespace spark {

constexpr int kGroupPages = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kLaneDims = kMaxHeadDim / 32;  // of a vector that a warp holds: lane l has elements l, l + 32, ...

// Where one cache lies: pages of its group, what they hold of this cache, and the tables [segment][table_width] that turn
// page numbers of a sequence into pages.
struct Cache {
    uint8_t* pages;
    const int32_t* table;
    int64_t page_bytes, k_offset, v_offset;
    int32_t table_width, kv_heads, head_dim, half;

    __device__ int64_t row_bytes() const { return head_dim * (half ? 2 : 4); }
    // K or V of KV head `head` on page `number` of a segment, position 0 of the page.
    __device__ uint8_t* rows(int segment, int number, int head, int64_t offset) const {
        return pages + table[segment * table_width + number] * page_bytes + offset + head * kPagePositions * row_bytes();
    }
};

__device__ inline float cached(const uint8_t* rows, int half, int64_t i) {
    return half ? f16_to_f32(reinterpret_cast<const uint16_t*>(rows)[i]) : reinterpret_cast<const float*>(rows)[i];
}

__device__ inline int first_page(int position, int window) {
    return window > 0 && position >= window ? (position - window + 1) / kPagePositions : 0;
}

// Writes K and V of the step's rows. grid (kv heads, rows), block 32.
extern "C" __global__ void write_kv(const Batch* batch, const float* k, const float* v, const Cache* caches, int cache) {
    const Cache c = caches[cache];
    const int row = static_cast<int>(blockIdx.y);
    const int head = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const int position = batch->position[row];
    const int segment = batch->segment_of[row];
    const int64_t from = (static_cast<int64_t>(row) * c.kv_heads + head) * c.head_dim;
    const int64_t to = static_cast<int64_t>(position % kPagePositions) * c.head_dim;
    uint8_t* k_rows = c.rows(segment, position / kPagePositions, head, c.k_offset);
    uint8_t* v_rows = c.rows(segment, position / kPagePositions, head, c.v_offset);
    for (int i = lane_id(); i < c.head_dim; i += 32) {
        if (c.half) {
            reinterpret_cast<uint16_t*>(k_rows)[to + i] = f32_to_f16(k[from + i]);
            reinterpret_cast<uint16_t*>(v_rows)[to + i] = f32_to_f16(v[from + i]);
        } else {
            reinterpret_cast<float*>(k_rows)[to + i] = k[from + i];
            reinterpret_cast<float*>(v_rows)[to + i] = v[from + i];
        }
    }
}

// dot32 in one lane: `q` and `row` in shared memory.
__device__ inline float lane_dot32(const float* q, const uint8_t* row, int half, int n) {
    float partial[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) partial[j] = 0.0f;
    for (int i = 0; i < n; i += 32)
#pragma unroll
        for (int j = 0; j < 32; ++j)
            if (i + j < n) partial[j] = fma(q[i + j], cached(row, half, i + j), partial[j]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int j = 0; j < step; ++j) partial[j] = partial[j] + partial[j + step];
    return partial[0];
}

// (m, l, o) of each page that a row sees, to partials[row][head][page - first page][2 + head_dim]. A warp for each query
// head of a KV head; a lane scores a position, then has every 32nd element of o.
// grid (kv heads, pages that a row may see, rows), block 32 x heads of a KV head; dynamic shared memory: the warps'
// queries, then 32 rows of K, each one word longer than it is so that lanes read from different banks.
extern "C" __global__ void attend_pages(const Batch* batch, const float* q, const Cache* caches, int cache, int window,
                                        float scale, int pages, float* partials) {
    SPARK_DYNAMIC_SHARED(float, shared);
    const Cache c = caches[cache];
    const int row = static_cast<int>(blockIdx.z);
    if (row >= batch->rows) return;
    const int position = batch->position[row];
    const int segment = batch->segment_of[row];
    const int number = first_page(position, window) + static_cast<int>(blockIdx.y);
    if (number > position / kPagePositions) return;
    const int n = c.head_dim;
    const int group = static_cast<int>(blockDim.x / 32u);
    const int head = static_cast<int>(blockIdx.x) * group + warp_id();
    const int heads = c.kv_heads * group;
    const int start = number * kPagePositions;
    const int begin = window > 0 && position - window + 1 > start ? position - window + 1 - start : 0;
    const int end = position - start < kPagePositions - 1 ? position - start + 1 : kPagePositions;
    const uint8_t* k = c.rows(segment, number, static_cast<int>(blockIdx.x), c.k_offset);
    const uint8_t* v = c.rows(segment, number, static_cast<int>(blockIdx.x), c.v_offset);

    float* mine = shared + warp_id() * n;
    for (int i = lane_id(); i < n; i += 32) mine[i] = q[(static_cast<int64_t>(row) * heads + head) * n + i];
    uint32_t* staged_k = reinterpret_cast<uint32_t*>(shared + group * n);
    const int words = static_cast<int>(c.row_bytes() / 4);
    float score[2];
    float m = from_bits(0xff800000u);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < 32 * words; i += static_cast<int>(blockDim.x)) {
            const int t = 32 * half + i / words;
            if (t >= begin && t < end) staged_k[i / words * (words + 1) + i % words] = reinterpret_cast<const uint32_t*>(k)[t * words + i % words];
        }
        __syncthreads();
        const int t = 32 * half + lane_id();
        const bool visible = t >= begin && t < end;
        score[half] = 0.0f;
        if (visible) {
            score[half] = lane_dot32(mine, reinterpret_cast<const uint8_t*>(staged_k + lane_id() * (words + 1)), c.half, n) * scale;
            m = larger(score[half], m);
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        // The largest of all that are not NaN; a NaN makes l a NaN, whatever m is.
        const float other = __shfl_xor_sync(kAllLanes, m, step);
        m = larger(other, m);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) score[half] = exp(score[half] - m);

    float o[kLaneDims];
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) o[d] = 0.0f;
    float l = 0.0f;
    for (int t = begin; t < end; ++t) {
        const float first = __shfl_sync(kAllLanes, score[0], t % 32);
        const float second = __shfl_sync(kAllLanes, score[1], t % 32);
        const float e = t < 32 ? first : second;
        l = l + e;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d)
            if (32 * d + lane_id() < n) o[d] = fma(e, cached(v, c.half, static_cast<int64_t>(t) * n + 32 * d + lane_id()), o[d]);
    }
    float* out = partials + ((static_cast<int64_t>(row) * heads + head) * pages + blockIdx.y) * (n + 2);
    if (lane_id() == 0) {
        out[0] = m;
        out[1] = l;
    }
    for (int d = 0; d < kLaneDims; ++d)
        if (32 * d + lane_id() < n) out[2 + 32 * d + lane_id()] = o[d];
}

// A softmax that is not finished, in the registers of a warp.
struct Partial {
    float m, l, o[kLaneDims];

    __device__ void load(const float* memory, int n) {
        m = memory[0];
        l = memory[1];
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) o[d] = 32 * d + lane_id() < n ? memory[2 + 32 * d + lane_id()] : 0.0f;
    }
    __device__ void merge_with(const Partial& later) { merge(m, l, o, later.m, later.l, later.o, kLaneDims); }
};

// Merges the pages of each row and head: groups side by side, then in order. grid (heads, rows), block 32 x warps.
extern "C" __global__ void merge_pages(const Batch* batch, float* partials, int window, int pages, int n, float* out) {
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int warps = static_cast<int>(blockDim.x / 32u);
    const int position = batch->position[row];
    const int first = first_page(position, window);
    const int last = position / kPagePositions;
    const int64_t head = static_cast<int64_t>(row) * gridDim.x + blockIdx.x;
    float* memory = partials + head * pages * (n + 2);
    const auto place = [&](int page) { return memory + static_cast<int64_t>(page - first) * (n + 2); };
    Partial all, next;
    for (int group = first / kGroupPages + warp_id(); group <= last / kGroupPages; group += warps) {
        const int begin = group * kGroupPages > first ? group * kGroupPages : first;
        const int end = (group + 1) * kGroupPages - 1 < last ? (group + 1) * kGroupPages - 1 : last;
        all.load(place(begin), n);
        for (int page = begin + 1; page <= end; ++page) {
            next.load(place(page), n);
            all.merge_with(next);
        }
        // The group's result takes the place of its first page.
        float* result = place(begin);
        __syncwarp();
        if (lane_id() == 0) {
            result[0] = all.m;
            result[1] = all.l;
        }
        for (int d = 0; d < kLaneDims; ++d)
            if (32 * d + lane_id() < n) result[2 + 32 * d + lane_id()] = all.o[d];
    }
    __syncthreads();
    if (warp_id() != 0) return;
    all.load(place(first), n);
    for (int group = first / kGroupPages + 1; group <= last / kGroupPages; ++group) {
        next.load(place(group * kGroupPages), n);
        all.merge_with(next);
    }
    const float inverse = 1.0f / all.l;
    for (int d = 0; d < kLaneDims; ++d)
        if (32 * d + lane_id() < n) out[head * n + 32 * d + lane_id()] = all.o[d] * inverse;
}

}  // namespace spark
