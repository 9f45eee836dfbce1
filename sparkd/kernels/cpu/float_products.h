// Weight rows of the float class times one activation row: dot32 (docs/arithmetic.md) in registers.
#pragma once

#include "cpu/layouts.h"

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

}  // namespace spark::float_products

#endif
