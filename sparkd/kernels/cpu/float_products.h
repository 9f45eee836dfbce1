// Weight rows of the float class times activation rows: dot32 (docs/arithmetic.md) in registers.
#pragma once

#include "cpu/row_products.h"

#if SPARK_VECTORS

namespace spark::float_products {

using namespace layouts;

struct Single {
    static constexpr int kType = F32, kBytes = 4;
    static __m256 eight(const uint8_t* w) { return _mm256_loadu_ps(reinterpret_cast<const float*>(w)); }
    static float one(const uint8_t* w) { return load_as<float>(w); }
};

struct Half {
    static constexpr int kType = F16, kBytes = 2;
    static __m256 eight(const uint8_t* w) { return _mm256_cvtph_ps(load_128(w)); }
    static float one(const uint8_t* w) { return load_f16(w); }
};

struct Brain {
    static constexpr int kType = BF16, kBytes = 2;
    static __m256 eight(const uint8_t* w) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(w)), 16));
    }
    static float one(const uint8_t* w) { return bf16_to_f32(load_as<uint16_t>(w)); }
};

// Types with blocks of BLOCK elements and code books (common/codebooks.h), eight values at a time.
template <int TYPE, int BLOCK, int BYTES, Eight (*EIGHT)(float, const uint8_t*, int)>
struct Coded {
    static constexpr int kType = TYPE, kBlock = BLOCK, kBytes = BYTES;
    static float factor(const uint8_t* b) { return _cvtsh_ss(load_as<uint16_t>(b)); }
    static __m256 eight(float d, const uint8_t* b, int n) {
        const Eight e = EIGHT(d, b, n);
        const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(e.magnitudes));
        const __m256 magnitudes = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        // Bit j of the signs becomes the sign of lane j.
        const __m256i turned = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(e.signs)),
                                                 _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
        const __m256 signs = _mm256_and_ps(_mm256_castsi256_ps(turned), _mm256_set1_ps(-0.0f));
        return _mm256_xor_ps(_mm256_mul_ps(_mm256_set1_ps(e.factor), magnitudes), signs);
    }
};

using IQ2XXS = Coded<IQ2_XXS, 256, 66, eight_iq2_xxs>;
using IQ2XS = Coded<IQ2_XS, 256, 74, eight_iq2_xs>;
using IQ2S = Coded<IQ2_S, 256, 82, eight_iq2_s>;
using IQ3XXS = Coded<IQ3_XXS, 256, 98, eight_iq3_xxs>;
using IQ3S = Coded<IQ3_S, 256, 110, eight_iq3_s>;

struct NVF4 {
    static constexpr int kType = NVFP4, kBlock = 64, kBytes = 36;
    static float factor(const uint8_t*) { return 0.0f; }
    static __m256 eight(float, const uint8_t* b, int n) {
        const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 4 + n / 2 * 8));
        const __m128i nibbles = _mm_and_si128(_mm_srl_epi16(packed, _mm_cvtsi32_si128(n % 2 * 4)), _mm_set1_epi8(15));
        const __m256i values = _mm256_cvtepi8_epi32(_mm_shuffle_epi8(load_128(fp4_book()), nibbles));
        return _mm256_mul_ps(_mm256_set1_ps(half_e4m3(b[n / 2])), _mm256_cvtepi32_ps(values));
    }
};

// A row of a type with blocks as floats.
template <class T>
inline void dequantise(const uint8_t* w, int columns, float* out) {
    for (; columns > 0; columns -= T::kBlock, w += T::kBytes, out += T::kBlock) {
        const float d = T::factor(w);
        for (int n = 0; n < T::kBlock / 8; ++n) _mm256_storeu_ps(out + 8 * n, T::eight(d, w, n));
    }
}

// ROWS weight rows of a type with blocks at a time, as `dots`.
template <class T, int ROWS>
inline void coded_dots(const uint8_t* w, int64_t row_bytes, int columns, const float* x, float* out) {
    __m256 partial[ROWS][4];
    for (auto& row : partial)
        for (__m256& p : row) p = _mm256_setzero_ps();
    for (; columns > 0; columns -= T::kBlock, w += T::kBytes, x += T::kBlock) {
        float d[ROWS];
        for (int r = 0; r < ROWS; ++r) d[r] = T::factor(w + r * row_bytes);
        for (int n = 0; n < T::kBlock / 8; n += 4)
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const __m256 activations = _mm256_loadu_ps(x + 8 * (n + k));
#pragma GCC unroll 2
                for (int r = 0; r < ROWS; ++r)
                    partial[r][k] =
                        _mm256_fmadd_ps(activations, T::eight(d[r], w + r * row_bytes, n + k), partial[r][k]);
            }
    }
    for (int r = 0; r < ROWS; ++r) {
        alignas(32) float lanes[32];
        for (int k = 0; k < 4; ++k) _mm256_store_ps(lanes + 8 * k, partial[r][k]);
        out[r] = halving_tree(lanes, 32);
    }
}

template <class T>
void coded_products(const uint8_t* w, int64_t row_bytes, int64_t rows, int columns, const float* x, float* out) {
    int64_t row = 0;
    for (; row + 2 <= rows; row += 2) coded_dots<T, 2>(w + row * row_bytes, row_bytes, columns, x, out + row);
    if (row < rows) coded_dots<T, 1>(w + row * row_bytes, row_bytes, columns, x, out + row);
}

// ROWS weight rows at a time; register k of a row has the partials 8 k .. 8 k + 7.
template <class T, int ROWS>
inline void dots(const uint8_t* w, int64_t row_bytes, int columns, const float* x, float* out) {
    __m256 partial[ROWS][4];
    for (auto& row : partial)
        for (__m256& p : row) p = _mm256_setzero_ps();
    int i = 0;
    for (; i + 32 <= columns; i += 32)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const __m256 activations = _mm256_loadu_ps(x + i + 8 * k);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
                partial[r][k] =
                    _mm256_fmadd_ps(activations, T::eight(w + r * row_bytes + (i + 8 * k) * T::kBytes), partial[r][k]);
        }
    for (int r = 0; r < ROWS; ++r) {
        alignas(32) float lanes[32];
        for (int k = 0; k < 4; ++k) _mm256_store_ps(lanes + 8 * k, partial[r][k]);
        for (int j = 0; i + j < columns; ++j)
            lanes[j] = fma(x[i + j], T::one(w + r * row_bytes + (i + j) * T::kBytes), lanes[j]);
        out[r] = halving_tree(lanes, 32);
    }
}

template <class T>
void products(const uint8_t* w, int64_t row_bytes, int64_t rows, int columns, const float* x, float* out) {
    int64_t row = 0;
    for (; row + 2 <= rows; row += 2) dots<T, 2>(w + row * row_bytes, row_bytes, columns, x, out + row);
    if (row < rows) dots<T, 1>(w + row * row_bytes, row_bytes, columns, x, out + row);
}

// --- tiles: sixteen weight rows times kGroup activation rows, for prompts

constexpr int kRows = 16, kGroup = 4;
constexpr int kPiece = 512;  // columns at a time, so that those of the activations stay in the nearest cache

// [weight row][activation row][partial] of a tile.
struct TileMemory {
    alignas(64) float partial[kRows][kGroup][32];
};

// Adds `columns`, a multiple of 32, of W weight rows and M activation rows to their partials: eight of the 32 at a time,
// since all do not fit into registers.
template <class T, int W, int M>
inline void add_columns(const uint8_t* w, int64_t row_bytes, int columns, const float* const* x, int first,
                        float (*partial)[kGroup][32]) {
    for (int k = 0; k < 32; k += 8) {
        __m256 sums[W][M];
        for (int r = 0; r < W; ++r)
            for (int m = 0; m < M; ++m) sums[r][m] = _mm256_load_ps(partial[r][m] + k);
        for (int i = first + k; i < first + columns; i += 32) {
            __m256 weights[W];
#pragma GCC unroll 2
            for (int r = 0; r < W; ++r) weights[r] = T::eight(w + r * row_bytes + static_cast<int64_t>(i) * T::kBytes);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const __m256 activations = _mm256_loadu_ps(x[m] + i);
#pragma GCC unroll 2
                for (int r = 0; r < W; ++r) sums[r][m] = _mm256_fmadd_ps(activations, weights[r], sums[r][m]);
            }
        }
        for (int r = 0; r < W; ++r)
            for (int m = 0; m < M; ++m) _mm256_store_ps(partial[r][m] + k, sums[r][m]);
    }
}

// out[m][o] = weight row o · x[m] for `rows` <= kRows weight rows and M activation rows.
template <class T, int M>
inline void tile(const uint8_t* w, int64_t row_bytes, int rows, int columns, const float* const* x, float* const* out,
                 TileMemory& memory) {
    const int whole = columns / 32 * 32;
    std::memset(memory.partial, 0, static_cast<size_t>(rows) * sizeof memory.partial[0]);
    for (int first = 0; first < whole; first += kPiece) {
        const int n = std::min(kPiece, whole - first);
        int row = 0;
        for (; row + 2 <= rows; row += 2)
            add_columns<T, 2, M>(w + row * row_bytes, row_bytes, n, x, first, memory.partial + row);
        if (row < rows) add_columns<T, 1, M>(w + row * row_bytes, row_bytes, n, x, first, memory.partial + row);
    }
    for (int row = 0; row < rows; ++row)
        for (int m = 0; m < M; ++m) {
            float* lanes = memory.partial[row][m];
            for (int i = whole; i < columns; ++i)
                lanes[i - whole] = fma(x[m][i], T::one(w + row * row_bytes + static_cast<int64_t>(i) * T::kBytes),
                                       lanes[i - whole]);
            const __m256 low = _mm256_add_ps(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 16));
            const __m256 high = _mm256_add_ps(_mm256_load_ps(lanes + 8), _mm256_load_ps(lanes + 24));
            out[m][row] = _mm256_cvtss_f32(row_products::tree<8>(_mm256_add_ps(low, high)));
        }
}

}  // namespace spark::float_products

#endif
