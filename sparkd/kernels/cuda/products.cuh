// Products of weight rows with up to eight activation rows, by a warp; one read of the weights for all of them.
//
// A weight row is `units` of 32 elements. A warp takes one row of more than 16 units (lane l has units l, l + 32, ...),
// two rows of 9 to 16, or four of at most 8. So the eight lanes of a team hold one span of 256 elements at a time, and
// spans of class c (docs/arithmetic.md: span number mod 8) always belong to the same team: to its first partial for
// classes 0 to 3, to its second for 4 to 7. The halving tree is then one addition in the lane and two shuffles.
#pragma once

#include "decode.cuh"

// The types that are compiled: an executor names those of its model, as one needs a fifth of the time for four types.
#ifndef SPARK_TYPES
#define SPARK_TYPES(INT256, INT32, FLOAT)                                                                             \
    INT256(Q4_K) INT256(Q6_K) INT256(Q5_K) INT256(Q2_K) INT256(Q3_K) INT256(IQ4_XS) INT32(Q8_0) INT32(Q4_0) INT32(Q4_1) \
    INT32(Q5_0) INT32(Q5_1) INT32(IQ4_NL) INT32(MXFP4) FLOAT(F32) FLOAT(F16) FLOAT(BF16) FLOAT(IQ2_XXS) FLOAT(IQ2_XS)  \
    FLOAT(IQ2_S) FLOAT(IQ3_XXS) FLOAT(IQ3_S) FLOAT(NVFP4)
#endif
// The numbers of rows that there are kernels for.
#ifndef SPARK_COUNTS
#define SPARK_COUNTS(KERNELS) KERNELS(1) KERNELS(2) KERNELS(4) KERNELS(8)
#endif

namespace spark {

// A weight in memory that the device can read: rows of `row_bytes` (docs: sparkd/executors/cuda.py lays them out).
struct Matrix {
    uint64_t address;
    int32_t type, rows, columns, row_bytes;
};

// Activation rows in every form that some product needs; unused forms are null. Rows are `columns` wide.
struct Inputs {
    const float* x;
    const int8_t* q256;
    const float* a256;
    const int8_t* q32;
    const float* a32;
};

constexpr int kWarps = 4;                           // of a block that multiplies
constexpr int kBlocks = 5;                          // of those at a time: so the compiler has registers enough and spills none
constexpr int kTurnUnits = 64;                      // units of a row that a warp stages at a time
constexpr int kStageBytes = kTurnUnits * 34 + 32;   // Q8_0 has the largest; 16 bytes before and after for alignment

// Weight rows that one warp multiplies at a time.
SPARK_FN int rows_per_warp(int columns) { return columns > 512 ? 1 : columns > 256 ? 2 : 4; }

// Copies bytes begin .. end - 1 to shared memory, whole 16-byte words of memory: allocations are 64-byte aligned and as
// long. The place of `begin` in there.
__device__ inline const uint8_t* staged(const uint8_t* begin, int64_t bytes, uint4* shared) {
    const uint64_t first = reinterpret_cast<uint64_t>(begin) & ~static_cast<uint64_t>(15);
    const int skip = static_cast<int>(reinterpret_cast<uint64_t>(begin) & 15);
    const int words = static_cast<int>((skip + bytes + 15) / 16);
    const uint4* from = reinterpret_cast<const uint4*>(first);
    __syncwarp();
    for (int i = lane_id(); i < words; i += 32) shared[i] = from[i];
    __syncwarp();
    return reinterpret_cast<const uint8_t*>(shared) + skip;
}

__device__ inline int32_t dot4(int32_t a, int32_t b, int32_t c) { return __dp4a(a, b, c); }

// `sum` and the product of a span, of which each lane of a team has a unit with d and o of its block, with its part of an
// activation row: the unit's 32 integers, and their factor. Of 256 elements with one factor as one, else block after block
// for the first `there` lanes; every lane of the team gets it. `here`: whether this lane has a unit. For whole warps.
template <class D>
__device__ inline float plus_span(float sum, const Unit& unit, float d, float o, const int8_t* q, const float* scale,
                                  bool here, int there) {
    int32_t isum = 0, msum = 0;
    if (here) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int4 x = reinterpret_cast<const int4*>(q)[h];
            const int32_t* u = unit.u + 4 * h;
            const int32_t s = dot4(u[3], x.w, dot4(u[2], x.z, dot4(u[1], x.y, dot4(u[0], x.x, 0))));
            const int32_t one = 0x01010101;
            int32_t ones = 0;
            if (D::kBias != 0 || D::kOffset) ones = dot4(one, x.w, dot4(one, x.z, dot4(one, x.y, dot4(one, x.x, 0))));
            isum += unit.scale[h] * (s - D::kBias * ones);
            if (D::kOffset) msum += unit.min[h] * ones;
        }
    }
    if (D::kBlock == 256) {
        isum = warp_sum(isum, 8);
        if (D::kOffset) msum = warp_sum(msum, 8);
    }
    float t = 0.0f;
    if (here) {
        const float factor = *scale;
        t = (d * factor) * static_cast<float>(isum);
        if (D::kOffset) t = fma(d * factor, static_cast<float>(isum), (o * factor) * static_cast<float>(msum));
    }
    if (D::kBlock == 256) return here ? sum + t : sum;
    const int team = lane_id() & ~7;
    for (int i = 0; i < 8; ++i) {
        const float other = __shfl_sync(kAllLanes, t, team + i);
        if (i < there) sum = sum + other;
    }
    return sum;
}

// y[b] of the row that this lane works on (all its lanes get it) for activation rows `target[b]`, b < COUNT; those from
// `count` on are not read. `first` is the first weight row of the warp.
template <class D, int COUNT>
__device__ inline void integer_rows(const Matrix& w, int first, const int8_t* q, const float* a, const int* target,
                                    int count, uint4* shared, float* y) {
    const int units = w.columns / 32;
    const int per_warp = rows_per_warp(w.columns);
    const int lanes = 32 / per_warp;
    const int lane = lane_id();
    const int in_row = lane % lanes;
    const int row = lane / lanes;
    const int present = w.rows - first < per_warp ? w.rows - first : per_warp;
    const uint8_t* base = reinterpret_cast<const uint8_t*>(w.address) + static_cast<int64_t>(first) * w.row_bytes;
    float partial[COUNT][2];
    for (int b = 0; b < COUNT; ++b) partial[b][0] = partial[b][1] = 0.0f;

    for (int turn = 0; turn < units; turn += kTurnUnits) {
        const int left = units - turn < kTurnUnits ? units - turn : kTurnUnits;
        const int64_t offset = static_cast<int64_t>(turn) * 32 / D::kBlock * D::kBytes;
        const int64_t bytes = per_warp > 1 ? static_cast<int64_t>(present) * w.row_bytes
                                           : static_cast<int64_t>(left) * 32 / D::kBlock * D::kBytes;
        const uint8_t* span = staged(base + offset, bytes, shared);
#pragma unroll 1  // two halves at once take more registers than there are
        for (int half = 0; half < 2 && turn + 32 * half < units; ++half) {
            const int unit_number = turn + half * 32 + in_row;
            const bool here = unit_number < units && row < present;
            Unit unit;
            float d = 0.0f, o = 0.0f;
            if (here) {
                const int local = unit_number - turn;
                const uint8_t* block = span + row * static_cast<int64_t>(w.row_bytes) + local * 32 / D::kBlock * D::kBytes;
                D::unit(Bytes{block}, local % (D::kBlock / 32), unit);
                d = D::d(Bytes{block});
                o = D::o(Bytes{block});
            }
            // Units of this lane's span from its first one on; activation rows are few: their places fit into 32 bits.
            const int there = row < present ? units - (unit_number - in_row % 8) : 0;
#pragma unroll
            for (int b = 0; b < COUNT; ++b) {
                if (b < count) {
                    const int place = target[b] * units + unit_number;
                    const float* scale = a + (D::kBlock == 256 ? place / 8 : place);
                    float sum = half == 0 ? partial[b][0] : partial[b][1];
                    sum = plus_span<D>(sum, unit, d, o, q + 32 * place, scale, here, there);
                    if (half == 0)
                        partial[b][0] = sum;
                    else
                        partial[b][1] = sum;
                }
            }
        }
    }
#pragma unroll
    for (int b = 0; b < COUNT; ++b) {
        if (b >= count) break;
        float sum = partial[b][0] + partial[b][1];
        if (lanes == 32) sum = sum + __shfl_xor_sync(kAllLanes, sum, 16);
        if (lanes >= 16) sum = sum + __shfl_xor_sync(kAllLanes, sum, 8);
        y[b] = sum;
    }
}

// Element `e` of a block with a code book: one of the eight that share a factor (common/codebooks.h).
template <Eight (*EIGHT)(float, const uint8_t*, int), int BYTES>
__device__ inline float book_element(const uint8_t* row, int i) {
    const uint8_t* block = row + static_cast<int64_t>(i / 256) * BYTES;
    return value_of(EIGHT(load_f16(block), block, i % 256 / 8), i % 8);
}

// The same of NVFP4, without the other seven.
__device__ inline float nvfp4_element(const uint8_t* row, int i) {
    const uint8_t* block = row + static_cast<int64_t>(i / 64) * 36;
    const int sub = i % 64 / 16;
    const uint32_t nibble = nibble_of(block[4 + 8 * sub + i % 8], i % 16 / 8);
    const uint32_t code = nibble & 7u;
    const int magnitude = static_cast<int>(code < 5 ? code : code == 5 ? 6u : code == 6 ? 8u : 12u);
    const float value = static_cast<float>(magnitude) * half_e4m3(block[sub]);
    return nibble > 8 ? -value : value;
}

template <int TYPE>
__device__ inline float float_element(const uint8_t* row, int i) {
    switch (TYPE) {
        case IQ2_XXS: return book_element<eight_iq2_xxs, 66>(row, i);
        case IQ2_XS: return book_element<eight_iq2_xs, 74>(row, i);
        case IQ2_S: return book_element<eight_iq2_s, 82>(row, i);
        case IQ3_XXS: return book_element<eight_iq3_xxs, 98>(row, i);
        case IQ3_S: return book_element<eight_iq3_s, 110>(row, i);
        case NVFP4: return nvfp4_element(row, i);
        default: break;
    }
    if (TYPE == F32) return reinterpret_cast<const float*>(row)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
    return TYPE == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// The same for the float class; every weight row by the whole warp, so that lane l has the partial l of dot32. Rows of
// float weights begin at multiples of the element's size.
template <int TYPE, int COUNT>
__device__ inline void float_rows(const Matrix& w, int first, const float* x, const int* target, int count, float* y) {
    const int per_warp = rows_per_warp(w.columns);
    const int mine = lane_id() / (32 / per_warp);
    for (int r = 0; r < per_warp && first + r < w.rows; ++r) {
        const uint8_t* row = reinterpret_cast<const uint8_t*>(w.address) + static_cast<int64_t>(first + r) * w.row_bytes;
        float partial[COUNT];
        for (int b = 0; b < COUNT; ++b) partial[b] = 0.0f;
        for (int i = lane_id(); i < w.columns; i += 32) {
            const float weight = float_element<TYPE>(row, i);
#pragma unroll
            for (int b = 0; b < COUNT; ++b)
                if (b < count) partial[b] = fma(x[static_cast<int64_t>(target[b]) * w.columns + i], weight, partial[b]);
        }
#pragma unroll
        for (int b = 0; b < COUNT; ++b) {
            if (b >= count) break;
            const float sum = warp_tree(partial[b]);
            if (r == mine) y[b] = sum;
        }
    }
}

// y[b] = weight row · activation row target[b], for the weight row that this lane works on: `first` plus lane / (32 /
// rows_per_warp). Every lane of the warp calls this.
template <int COUNT>
__device__ inline void row_products(const Matrix& w, int first, const Inputs& in, const int* target, int count,
                                    uint4* shared, float* y) {
    switch (w.type) {
#define SPARK_INT256(TYPE) \
    case TYPE:             \
        return integer_rows<Decoder<TYPE>, COUNT>(w, first, in.q256, in.a256, target, count, shared, y);
#define SPARK_INT32(TYPE) \
    case TYPE:            \
        return integer_rows<Decoder<TYPE>, COUNT>(w, first, in.q32, in.a32, target, count, shared, y);
#define SPARK_FLOAT(TYPE) \
    case TYPE:            \
        return float_rows<TYPE, COUNT>(w, first, in.x, target, count, y);
        SPARK_TYPES(SPARK_INT256, SPARK_INT32, SPARK_FLOAT)
#undef SPARK_INT256
#undef SPARK_INT32
#undef SPARK_FLOAT
        default: __trap();
    }
}

}  // namespace spark
