// What all kernels share: the batch in device memory, and warp operations.
//
// The same sources are taken by nvcc, by NVRTC (with no header but those of kernels/common, put in by the executor) and
// by g++ behind the host emulator of the tests. Compile with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true.
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

// Rows of a step at most: the weight bytes read are the same for all of them.
constexpr int kMaxRows = 8;
constexpr int kPagePositions = 64;
constexpr unsigned kAllLanes = 0xffffffffu;

// Consecutive rows of one sequence.
struct SegmentRows {
    int32_t row, length, start, slot;
};

// The batch of a step. A graph covers a fixed number of rows; only the first `rows` of them exist.
struct Batch {
    int32_t rows, segments, logits, unused;
    int32_t token[kMaxRows];
    int32_t position[kMaxRows];
    int32_t segment_of[kMaxRows];
    int32_t logits_row[kMaxRows];
    SegmentRows segment[kMaxRows];
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

// Quantises 256 elements by a block of 256 threads, one each: `value` is that of element `threadIdx.x`, and lanes of the
// first `count` elements take part (a multiple of 32). Writes the form of 256 (count 256 only) and that of 32; a null
// pointer: that form is not wanted. `shared` has 8 words. Every thread of the block calls this.
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

__device__ inline void quantise_span(float value, int count, int8_t* q256, float* a256, int8_t* q32, float* a32,
                                     uint32_t* shared) {
    const int e = static_cast<int>(threadIdx.x);
    const uint32_t largest = warp_largest(bits_of(value) & 0x7fffffffu);
    float a;
    if (q32 != nullptr && e < count) {
        q32[e] = quantised(value, largest, &a);
        if (e % 32 == 0) a32[e / 32] = a;
    }
    if (q256 == nullptr) return;
    if (e % 32 == 0) shared[e / 32] = largest;
    __syncthreads();
    uint32_t all = 0;
    for (int i = 0; i < 8; ++i) all = shared[i] > all ? shared[i] : all;
    q256[e] = quantised(value, all, &a);
    if (e == 0) a256[0] = a;
    __syncthreads();
}

}  // namespace spark
