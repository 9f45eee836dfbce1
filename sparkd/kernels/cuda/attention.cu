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
    __device__ void store(uint8_t* rows, int64_t i, float value) const {
        if (half)
            reinterpret_cast<uint16_t*>(rows)[i] = f32_to_f16(value);
        else
            reinterpret_cast<float*>(rows)[i] = value;
    }
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
// Cost: (4 + kv_bytes) * 2 * kv_heads * head_dim bytes, 0 operations.
extern "C" __global__ void write_kv(const Batch* batch, const float* k, const float* v, const Cache* caches, int cache) {
    const Cache c = caches[cache];
    const int row = static_cast<int>(blockIdx.y);
    const int head = static_cast<int>(blockIdx.x);
    if (row >= batch->rows) return;
    const int position = batch->position(row);
    const int segment = batch->segment_of(row);
    const int64_t from = (static_cast<int64_t>(row) * c.kv_heads + head) * c.head_dim;
    const int64_t to = static_cast<int64_t>(position % kPagePositions) * c.head_dim;
    uint8_t* k_rows = c.rows(segment, position / kPagePositions, head, c.k_offset);
    uint8_t* v_rows = c.rows(segment, position / kPagePositions, head, c.v_offset);
    for (int i = lane_id(); i < c.head_dim; i += 32) {
        c.store(k_rows, to + i, k[from + i]);
        c.store(v_rows, to + i, v[from + i]);
    }
}

// Everything between the projections and attention: the norm and rotation of each head of q (to q_out), the same for k,
// rounded into the cache, and v into the cache. Heads of q, then of k and of v; head h of q and k begins at `offset` +
// h * `stride` of its row. grid (heads + 2 x kv heads, rows), block 32; dynamic shared memory: one head.
// Cost: 4 * floats bytes, 10 * floats operations.
extern "C" __global__ void prepare_heads(const Batch* batch, const float* q, const float* k, const float* v,
                                         const float* q_weight, const float* k_weight, float* q_out, const Cache* caches,
                                         int cache, int heads, int q_width, int q_stride, int q_offset, int k_width,
                                         int k_stride, int k_offset, float eps, int pairs, const float* cosine,
                                         const float* sine) {
    SPARK_DYNAMIC_SHARED(float, normed);
    const Cache c = caches[cache];
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int n = c.head_dim;
    int head = static_cast<int>(blockIdx.x);
    const int position = batch->position(row);
    const int segment = batch->segment_of(row);
    const int64_t place = static_cast<int64_t>(position % kPagePositions) * n;
    if (head >= heads + c.kv_heads) {
        head -= heads + c.kv_heads;
        const float* from = v + (static_cast<int64_t>(row) * c.kv_heads + head) * n;
        uint8_t* to = c.rows(segment, position / kPagePositions, head, c.v_offset);
        for (int i = lane_id(); i < n; i += 32) c.store(to, place + i, from[i]);
        return;
    }
    const bool is_q = head < heads;
    if (!is_q) head -= heads;
    const float* from = is_q ? q + static_cast<int64_t>(row) * q_width + q_offset + head * q_stride
                             : k + static_cast<int64_t>(row) * k_width + k_offset + head * k_stride;
    const float* weight = is_q ? q_weight : k_weight;
    const float factor = 1.0f / square_root(warp_dot32(from, from, n) / static_cast<float>(n) + eps);
    for (int i = lane_id(); i < n; i += 32) normed[i] = (from[i] * factor) * weight[i];
    __syncwarp();
    float* out = q_out + (static_cast<int64_t>(row) * heads + head) * n;
    uint8_t* to = c.rows(segment, position / kPagePositions, is_q ? 0 : head, c.k_offset);
    const auto put = [&](int i, float value) {
        if (is_q)
            out[i] = value;
        else
            c.store(to, place + i, value);
    };
    for (int i = lane_id(); i < pairs; i += 32) {
        float a = normed[i];
        float b = normed[pairs + i];
        rotate(a, b, cosine[row * pairs + i], sine[row * pairs + i]);
        put(i, a);
        put(pairs + i, b);
    }
    for (int i = 2 * pairs + lane_id(); i < n; i += 32) put(i, normed[i]);
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
// Cost: 2 * kv_bytes * seen * kv_heads * head_dim + 4 * pages * (head_dim + 2) * heads bytes,
//     4 * seen * heads * head_dim operations.
extern "C" __global__ void attend_pages(const Batch* batch, const float* q, const Cache* caches, int cache, int window,
                                        float scale, int pages, float* partials) {
    SPARK_DYNAMIC_SHARED(float, shared);
    const Cache c = caches[cache];
    const int row = static_cast<int>(blockIdx.z);
    if (row >= batch->rows) return;
    const int position = batch->position(row);
    const int segment = batch->segment_of(row);
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

// Merges the pages of one head of a row and leaves the result in `out`: groups side by side by `warps` warps, of which
// this is number `warp`, then in order by the first. Every warp of the block calls this with the same page numbers.
__device__ inline void merge_head(float* memory, int first, int last, int n, int warp, int warps, float* out) {
    const auto place = [&](int page) { return memory + static_cast<int64_t>(page - first) * (n + 2); };
    Partial all, next;
    for (int group = first / kGroupPages + warp; group <= last / kGroupPages; group += warps) {
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
    if (warp != 0) return;
    all.load(place(first), n);
    for (int group = first / kGroupPages + 1; group <= last / kGroupPages; ++group) {
        next.load(place(group * kGroupPages), n);
        all.merge_with(next);
    }
    const float inverse = 1.0f / all.l;
    for (int d = 0; d < kLaneDims; ++d)
        if (32 * d + lane_id() < n) out[32 * d + lane_id()] = all.o[d] * inverse;
}

// Merges the pages of each row and head. grid (heads, rows), block 32 x warps.
// Cost: 4 * (pages * (head_dim + 2) + head_dim) * heads bytes, 4 * pages * head_dim * heads operations.
extern "C" __global__ void merge_pages(const Batch* batch, float* partials, int window, int pages, int n, float* out) {
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int position = batch->position(row);
    const int64_t head = static_cast<int64_t>(row) * gridDim.x + blockIdx.x;
    merge_head(partials + head * pages * (n + 2), first_page(position, window), position / kPagePositions, n, warp_id(),
               static_cast<int>(blockDim.x / 32u), out + head * n);
}

// The same, then the gate of each head's result (`per_head`: one number for all of it) and the quantised forms, whose
// spans of 256 elements are `together` heads. grid (heads / together, rows), block 256: the warps share the heads.
// Cost: 4 * (pages * (head_dim + 2) * heads + floats) bytes, (4 * pages + 1) * head_dim * heads operations.
extern "C" __global__ void merge_and_gate(const Batch* batch, float* partials, int window, int pages, int n, int heads,
                                          int together, const float* gate, int gate_width, int softly, int per_head,
                                          int stride, int offset, float* out, int8_t* q256, float* a256, int8_t* q32,
                                          float* a32) {
    const int row = static_cast<int>(blockIdx.y);
    if (row >= batch->rows) return;
    const int position = batch->position(row);
    const int first = static_cast<int>(blockIdx.x) * together;
    const int warps = static_cast<int>(blockDim.x / 32u) / together;
    const int head = first + warp_id() / warps;
    const int64_t number = static_cast<int64_t>(row) * heads + head;
    merge_head(partials + number * pages * (n + 2), first_page(position, window), position / kPagePositions, n,
               warp_id() % warps, warps, out + number * n);
    __syncthreads();
    const int64_t span = (static_cast<int64_t>(row) * heads + first) * n;
    for (int i = static_cast<int>(threadIdx.x); i < together * n; i += static_cast<int>(blockDim.x)) {
        const float g = gate[static_cast<int64_t>(row) * gate_width + offset + (first + i / n) * stride + (per_head ? 0 : i % n)];
        out[span + i] = out[span + i] * (softly ? softplus(g) : sigmoid(g));
    }
    const Quantised forms = {q256, a256, q32, a32};
    if (forms.wanted()) quantise_block(out + span, together * n, forms.at(span));
}

}  // namespace spark
