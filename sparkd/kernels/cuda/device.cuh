// What all kernels share: the batch in device memory, and warp operations.
//
// The same sources are taken by nvcc, by NVRTC (with no header but those of kernels/common, put in by the executor) and
// by g++ behind the host emulator of the tests. Compile with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true.
// Beside each kernel stands its cost for one row: bytes that it must read and write, and operations. bench/roofline.py
// reads them, with the names that it gives them: `weights` are elements, in `weight_bytes`; `floats` those of the values
// that are read and written, `width` those of one row that is written; the others are as in sparkd/graph/ops.py.
// Everything that changes from step to step lies in device memory, so that a captured graph of launches can be replayed.
#pragma once

#include "../common/arithmetic.h"
#include "../common/blocks.h"
#include "../common/rope.h"

// Dynamic shared memory of a kernel; the host emulator has its own way.
#ifndef SPARK_DYNAMIC_SHARED
#define SPARK_DYNAMIC_SHARED(T, name)                         \
    extern __shared__ __align__(16) unsigned char name##_raw[]; \
    T* name = reinterpret_cast<T*>(name##_raw)
#endif

namespace spark {

// Rows of a replayed step at most: the weight bytes read are the same for all of them.
constexpr int kMaxRows = 8;
constexpr int kPagePositions = 64;
constexpr unsigned kAllLanes = 0xffffffffu;

// Consecutive rows of one sequence.
struct SegmentRows {
    int32_t row, length, start, slot;
};

// The batch of a step. A graph covers a fixed number of rows; only the first `rows` of them exist. A batch of one segment
// may have more rows than `kMaxRows`: as many as there is memory for tokens behind it.
struct Batch {
    int32_t rows, segments, logits, best_of;
    int32_t logits_row[kMaxRows];
    int32_t owner[kMaxRows];  // the segment of each row
    SegmentRows segment[kMaxRows];
    int32_t token[kMaxRows];

    __device__ int segment_of(int row) const { return segments == 1 ? 0 : owner[row]; }
    __device__ int position(int row) const {
        const SegmentRows& s = segment[segment_of(row)];
        return s.start + row - s.row;
    }
};

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32u); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x / 32u); }

__device__ inline int warp_sum(int v, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
    return v;
}

__device__ inline uint32_t warp_largest(uint32_t v) {
    for (int step = 16; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(kAllLanes, v, step);
        v = other > v ? other : v;
    }
    return v;
}

// The halving tree over one partial of each lane; every lane gets the sum: a + b and b + a have the same bits.
__device__ inline float warp_tree(float partial) {
    for (int step = 16; step > 0; step /= 2) partial = partial + __shfl_xor_sync(kAllLanes, partial, step);
    return partial;
}

// dot32 by a warp: element i belongs to lane i mod 32.
__device__ inline float warp_dot32(const float* x, const float* w, int n) {
    float partial = 0.0f;
    for (int i = lane_id(); i < n; i += 32) partial = fma(x[i], w[i], partial);
    return warp_tree(partial);
}

__device__ inline int8_t quantised(float value, uint32_t largest, float* a) {
    const bool finite = largest < 0x7f800000u;
    if (!finite || largest < 0x0f800000u) {
        *a = finite ? 0.0f : canonical_nan();
        return 0;
    }
    *a = from_bits(largest) / 127.0f;
    float v = value * (127.0f / from_bits(largest));
    v = v > 127.0f ? 127.0f : v;
    v = v < -127.0f ? -127.0f : v;
    return static_cast<int8_t>(static_cast<int32_t>(round_even(v)));
}

// Where a quantised row goes: forms with one factor per 256 and per 32 elements; null: that form is not wanted.
struct Quantised {
    int8_t* q256;
    float* a256;
    int8_t* q32;
    float* a32;

    __device__ bool wanted() const { return q256 != nullptr || q32 != nullptr; }
    // From element `first` of all rows on, a multiple of 32 (of 256 for that form).
    __device__ Quantised at(int64_t first) const {
        return {q256 == nullptr ? nullptr : q256 + first, a256 == nullptr ? nullptr : a256 + first / 256,
                q32 == nullptr ? nullptr : q32 + first, a32 == nullptr ? nullptr : a32 + first / 32};
    }
};

// Quantises `count` elements by a block, whose threads all call this: at most 256, a multiple of 32; 256 for the form of
// 256. `x` may have been written by other threads of the block before a barrier, or by other blocks before a fence. In a
// block of 256 each thread reads the element of its own number: what it has written itself needs no barrier.
__device__ inline void quantise_block(const float* x, int count, Quantised out) {
    __shared__ uint32_t largest[8];
    const int warps = static_cast<int>(blockDim.x / 32u);
    const int lane = lane_id();
    float a;
    for (int sub = warp_id(); sub < count / 32; sub += warps) {
        const float value = __ldcg(x + 32 * sub + lane);
        const uint32_t most = warp_largest(bits_of(value) & 0x7fffffffu);
        if (lane == 0) largest[sub] = most;
        if (out.q32 == nullptr) continue;
        out.q32[32 * sub + lane] = quantised(value, most, &a);
        if (lane == 0) out.a32[sub] = a;
    }
    if (out.q256 == nullptr) return;
    __syncthreads();
    uint32_t all = 0;
    for (int i = 0; i < 8; ++i) all = largest[i] > all ? largest[i] : all;
    for (int sub = warp_id(); sub < 8; sub += warps)
        out.q256[32 * sub + lane] = quantised(__ldcg(x + 32 * sub + lane), all, &a);
    if (threadIdx.x == 0) {
        quantised(0.0f, all, &a);
        out.a256[0] = a;
    }
    __syncthreads();
}

// Counts blocks that have come to the end of a part of the work; true in all threads of the last of `blocks`, which then
// sees what the others wrote. The counter is 0 again afterwards. Every thread of the block calls this.
__device__ inline bool last_of(uint32_t* counter, uint32_t blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

}  // namespace spark
