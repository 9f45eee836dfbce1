// Products of tiles of weight rows with many activation rows, for prompts: weights are unpacked once for 32 rows.
//
// A block of four warps has 64 weight rows and 32 activation rows, a warp 32 and 16 of them. A lane has sixteen sums: of
// weight rows g, g + 8, g + 16, g + 24 (g = lane div 4) and activation rows 2q, 2q + 1, 2q + 8, 2q + 9 (q = lane mod 4).
// That is how `mma` leaves its results, so integers come from tensor cores (m16n8k32, m16n8k16 where sub-blocks have 16)
// or from dp4a, and all that follows is the same: integers are exact in any order, and floats are added in the order of
// docs/arithmetic.md, class by class, with at most three partials parked beside the sum that grows.
#pragma once

#include "products.cuh"

// Integers by tensor cores. Those of sm_75 have other shapes: there it is dp4a.
#ifndef SPARK_TENSOR_CORES
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define SPARK_TENSOR_CORES 1
#else
#define SPARK_TENSOR_CORES 0
#endif
#endif

namespace spark {

constexpr int kTileWeights = 64;
constexpr int kTileRows = 32;
constexpr int kTileThreads = 128;
constexpr int kTileBlocks = 2;                     // of those at a time: so none spills registers
constexpr int kTileUnits = 4;                      // units of 32 columns that are in shared memory at a time
constexpr int kTileLine = 32 * kTileUnits + 16;    // bytes of a row there: rows begin four banks apart

// What a block has in shared memory of one product.
struct Tile {
    uint4 w[kTileWeights * kTileLine / 16];
    uint4 x[kTileRows * kTileLine / 16];
    int8_t scale[kTileWeights][2 * kTileUnits];  // of sub-blocks of 16, or of the first of each two where they have 32
    int8_t min[kTileWeights][2 * kTileUnits];
    float d[kTileUnits][kTileWeights];
    float o[kTileUnits][kTileWeights];
    float a[kTileUnits][kTileRows];
    int16_t ones[2 * kTileUnits][kTileRows];     // sums of 16 activations each
};

// Whether sub-blocks of a type have 16 elements.
template <int TYPE>
constexpr bool kSmallSubs = TYPE == Q2_K || TYPE == Q3_K || TYPE == Q6_K;

// u - bias in each byte; u is below 128.
__device__ inline int32_t without_bias(int32_t u, int bias) {
    return static_cast<int32_t>(((static_cast<uint32_t>(u) | 0x80808080u) - static_cast<uint32_t>(bias) * 0x01010101u) ^ 0x80808080u);
}

// c += a 16 x K by K x 8 product of bytes by a warp: `a` words of rows g and g + 8, `b` words of column g, K / 16 each.
#if SPARK_TENSOR_CORES
#if defined(SIMT_HOST)
__device__ inline void mma32(int (&c)[4], const int (&a)[4], const int (&b)[2]) { simt_mma_m16n8k32_s8(c, a, b, c); }
__device__ inline void mma16(int (&c)[4], int a0, int a1, int b) { simt_mma_m16n8k16_s8(c, {a0, a1}, {b}, c); }
#else
__device__ inline void mma32(int (&c)[4], const int (&a)[4], const int (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma16(int (&c)[4], int a0, int a1, int b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
#endif
#endif

// The sixteen sums of a lane over one unit: of its first 16 columns to s[0], of the others to s[1]; all to s[0] where
// sub-blocks have 32. `w` and `x` lead to the unit in the warp's first row of the tile.
template <bool SMALL>
__device__ inline void unit_sums(const int32_t* w, const int32_t* x, int32_t (&s)[SMALL ? 2 : 1][4][4]) {
    constexpr int kWords = kTileLine / 4;
    const int g = lane_id() / 4, q = lane_id() % 4;
#if SPARK_TENSOR_CORES
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
        const int32_t* column = x + (8 * ni + g) * kWords + q;
        const int b[2] = {column[0], column[4]};
#pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
            const int32_t* upper = w + (16 * mi + g) * kWords + q;
            const int32_t* lower = upper + 8 * kWords;
            const int a[4] = {upper[0], lower[0], upper[4], lower[4]};
#pragma unroll
            for (int h = 0; h < (SMALL ? 2 : 1); ++h) {
                int c[4] = {0, 0, 0, 0};
                if (SMALL)
                    mma16(c, a[2 * h], a[2 * h + 1], b[h]);
                else
                    mma32(c, a, b);
#pragma unroll
                for (int r = 0; r < 4; ++r) s[h][2 * mi + r / 2][2 * ni + r % 2] = c[r];
            }
        }
    }
#else
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int4 row[4], column[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            row[i] = *reinterpret_cast<const int4*>(w + (g + 8 * i) * kWords + 4 * h);
            column[i] = *reinterpret_cast<const int4*>(x + (2 * q + i % 2 + 8 * (i / 2)) * kWords + 4 * h);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int32_t sum = SMALL || h == 0 ? 0 : s[0][i][j];
                sum = dot4(row[i].x, column[j].x, sum);
                sum = dot4(row[i].y, column[j].y, sum);
                sum = dot4(row[i].z, column[j].z, sum);
                s[SMALL ? h : 0][i][j] = dot4(row[i].w, column[j].w, sum);
            }
    }
#endif
}

// Puts units first .. first + count - 1 of the block's weight rows into the tile, unpacked.
template <int TYPE>
__device__ inline void stage_weights(const Matrix& w, int first_row, int first, int count, Tile& tile) {
    using D = Decoder<TYPE>;
    for (int i = static_cast<int>(threadIdx.x); i < kTileWeights * kTileUnits; i += kTileThreads) {
        const int r = i / kTileUnits, u = i % kTileUnits;
        if (u >= count || first_row + r >= w.rows) continue;
        const int number = first + u;
        const uint8_t* block = reinterpret_cast<const uint8_t*>(w.address) + static_cast<int64_t>(first_row + r) * w.row_bytes +
                               static_cast<int64_t>(number * 32 / D::kBlock) * D::kBytes;
        Unit unit;
        D::unit(Bytes{block}, number % (D::kBlock / 32), unit);
        int32_t* line = reinterpret_cast<int32_t*>(tile.w) + r * (kTileLine / 4) + 8 * u;
#pragma unroll
        for (int k = 0; k < 8; ++k) line[k] = D::kBias == 0 ? unit.u[k] : without_bias(unit.u[k], D::kBias);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            tile.scale[r][2 * u + h] = static_cast<int8_t>(unit.scale[h]);
            tile.min[r][2 * u + h] = static_cast<int8_t>(unit.min[h]);
        }
        const int place = D::kBlock == 256 ? 0 : u;
        if (D::kBlock == 32 || u == 0) {
            tile.d[place][r] = D::d(Bytes{block});
            tile.o[place][r] = D::o(Bytes{block});
        }
    }
}

// The same for the activation rows target[r] (negative: none, which counts as zeros). `form` is 32 or 256 elements.
__device__ inline void stage_rows(const int8_t* q, const float* a, int form, int columns, const int* target, int first,
                                  int count, bool sums, Tile& tile) {
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * 2 * kTileUnits; i += kTileThreads) {
        const int r = i / (2 * kTileUnits), half = i % (2 * kTileUnits);
        if (half / 2 >= count) continue;
        const int column = 32 * first + 16 * half;
        int4 words = {0, 0, 0, 0};
        float factor = 0.0f;
        if (target[r] >= 0) {
            words = *reinterpret_cast<const int4*>(q + static_cast<int64_t>(target[r]) * columns + column);
            factor = a[static_cast<int64_t>(target[r]) * (columns / form) + column / form];
        }
        *reinterpret_cast<int4*>(reinterpret_cast<uint8_t*>(tile.x) + r * kTileLine + 16 * half) = words;
        if (half % 2 == 0 && (form == 32 || half == 0)) tile.a[form == 32 ? half / 2 : 0][r] = factor;
        if (sums)
            tile.ones[half][r] = static_cast<int16_t>(dot4(
                0x01010101, words.w, dot4(0x01010101, words.z, dot4(0x01010101, words.y, dot4(0x01010101, words.x, 0)))));
    }
}

// put(weight row, r, product of it with activation row target[r]) for the block's weight rows from `first_row` on and
// all r whose target is not negative. `target` [kTileRows] lies in shared memory; every thread of the block calls this.
template <int TYPE, class Put>
__device__ inline void integer_tile(const Matrix& w, int first_row, const int8_t* q, const float* a, const int* target,
                                    Tile& tile, const Put& put) {
    using D = Decoder<TYPE>;
    constexpr bool kSmall = kSmallSubs<TYPE>;
    const int units = w.columns / 32;
    const int g = lane_id() / 4, pair = lane_id() % 4;
    const int row_base = warp_id() / 2 * 32 + g, column_base = warp_id() % 2 * 16 + 2 * pair;
    const int32_t* lines = reinterpret_cast<const int32_t*>(tile.w) + warp_id() / 2 * 32 * (kTileLine / 4);
    const int32_t* columns = reinterpret_cast<const int32_t*>(tile.x) + warp_id() % 2 * 16 * (kTileLine / 4);
    float sum[4][4], parked[3][4][4];

    // Classes in the order 0 4 2 6 1 5 3 7: each sum of the halving tree is made as soon as its two terms are there.
#pragma unroll 1
    for (int walk = 0; walk < 8; ++walk) {
        const int cls = (walk & 1) << 2 | (walk & 2) | walk >> 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;
#pragma unroll 1
        for (int span = 8 * cls; span < units; span += 64) {
            int32_t isum[4][4], msum[4][4];
#pragma unroll 1
            for (int first = span; first < span + 8 && first < units; first += kTileUnits) {
                const int count = units - first < kTileUnits ? units - first : kTileUnits;
                __syncthreads();
                stage_weights<TYPE>(w, first_row, first, count, tile);
                stage_rows(q, a, D::kBlock, w.columns, target, first, count, D::kOffset, tile);
                __syncthreads();
#pragma unroll 1
                for (int u = 0; u < count; ++u) {
                    int32_t s[kSmall ? 2 : 1][4][4];
                    unit_sums<kSmall>(lines + 8 * u, columns + 8 * u, s);
                    const bool begins = D::kBlock == 32 || (first == span && u == 0);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int8_t* scale = &tile.scale[row_base + 8 * i][2 * u];
                        const int8_t* min = &tile.min[row_base + 8 * i][2 * u];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const int column = column_base + j % 2 + 8 * (j / 2);
                            int32_t scaled = scale[0] * s[0][i][j];
                            if (kSmall) scaled += scale[1] * s[kSmall ? 1 : 0][i][j];
                            isum[i][j] = begins ? scaled : isum[i][j] + scaled;
                            if (D::kOffset) {
                                const int32_t low = tile.ones[2 * u][column], high = tile.ones[2 * u + 1][column];
                                const int32_t less = kSmall ? min[0] * low + min[1] * high : min[0] * (low + high);
                                msum[i][j] = begins ? less : msum[i][j] + less;
                            }
                        }
                    }
                    if (D::kBlock == 256 && !(first + u == span + 7)) continue;
                    const int place = D::kBlock == 256 ? 0 : u;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float d = tile.d[place][row_base + 8 * i], o = tile.o[place][row_base + 8 * i];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const float scale = tile.a[place][column_base + j % 2 + 8 * (j / 2)];
                            const float t = D::kOffset ? fma(d * scale, static_cast<float>(isum[i][j]), (o * scale) * static_cast<float>(msum[i][j]))
                                                       : (d * scale) * static_cast<float>(isum[i][j]);
                            sum[i][j] = sum[i][j] + t;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& total = sum[i][j];
                if (!(walk & 1)) {
                    parked[0][i][j] = total;
                    continue;
                }
                total = parked[0][i][j] + total;
                if (!(walk & 2)) {
                    parked[1][i][j] = total;
                    continue;
                }
                total = parked[1][i][j] + total;
                if (!(walk & 4)) {
                    parked[2][i][j] = total;
                    continue;
                }
                total = parked[2][i][j] + total;
            }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = first_row + row_base + 8 * i, column = column_base + j % 2 + 8 * (j / 2);
            if (row < w.rows && target[column] >= 0) put(row, column, sum[i][j]);
        }
}

// The same for the float class: lane l has partial l of dot32, of 4 weight rows and 16 activation rows at a time.
template <int TYPE, class Put>
__device__ inline void float_tile(const Matrix& w, int first_row, const float* x, const int* target, const Put& put) {
    constexpr int kAtOnce = 4, kColumns = 16;
    const int column_base = warp_id() % 2 * kColumns;
    if (target[column_base] < 0) return;  // rows that are there come first
    for (int r = warp_id() / 2 * 32; r < warp_id() / 2 * 32 + 32 && first_row + r < w.rows; r += kAtOnce) {
        const uint8_t* rows[kAtOnce];
        float partial[kAtOnce][kColumns];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first_row + r + i < w.rows ? first_row + r + i : w.rows - 1;
            rows[i] = reinterpret_cast<const uint8_t*>(w.address) + static_cast<int64_t>(row) * w.row_bytes;
#pragma unroll
            for (int j = 0; j < kColumns; ++j) partial[i][j] = 0.0f;
        }
        for (int c = lane_id(); c < w.columns; c += 32) {
            float weight[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) weight[i] = float_element<TYPE>(rows[i], c);
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                const int row = target[column_base + j];
                const float value = row < 0 ? 0.0f : x[static_cast<int64_t>(row) * w.columns + c];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) partial[i][j] = fma(value, weight[i], partial[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                const float sum = warp_tree(partial[i][j]);
                if (lane_id() == j && first_row + r + i < w.rows && target[column_base + j] >= 0)
                    put(first_row + r + i, column_base + j, sum);
            }
    }
}

template <class Put>
__device__ inline void tile_products(const Matrix& w, int first_row, const Inputs& in, const int* target, Tile& tile,
                                     const Put& put) {
    switch (w.type) {
#define SPARK_INT256(TYPE) \
    case TYPE:             \
        return integer_tile<TYPE>(w, first_row, in.q256, in.a256, target, tile, put);
#define SPARK_INT32(TYPE) \
    case TYPE:            \
        return integer_tile<TYPE>(w, first_row, in.q32, in.a32, target, tile, put);
#define SPARK_FLOAT(TYPE) \
    case TYPE:            \
        return float_tile<TYPE>(w, first_row, in.x, target, put);
        SPARK_TYPES(SPARK_INT256, SPARK_INT32, SPARK_FLOAT)
#undef SPARK_INT256
#undef SPARK_INT32
#undef SPARK_FLOAT
        default: __trap();
    }
}

}  // namespace spark
