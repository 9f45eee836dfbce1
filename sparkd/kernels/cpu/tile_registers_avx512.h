// Tiles in 512-bit registers: a weight row per 32-bit lane. tile_registers_avx2.h has the same names.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/layouts.h"

namespace spark::tile_products {

using namespace layouts;

using Ints = __m512i;
constexpr int kRegisters = 1;  // that sixteen rows take
constexpr int kGroup = 8;      // activation rows that share what is loaded of the weights
constexpr int kWorthUnpacking = 4;  // activation rows from which on a tile is faster than row by row

// A dword of `p` in every lane.
inline Ints everywhere_32(const void* p) { return _mm512_set1_epi32(load_as<int32_t>(p)); }
inline Ints no_ints() { return _mm512_setzero_si512(); }
// sum + a * b over the int16 halves of each lane.
inline Ints add_pairs(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
inline Ints subtract_times(Ints a, Ints b, int factor) {
    return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, _mm512_set1_epi32(factor)));
}
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }

// Lane j of v[i] becomes lane i of v[j].
inline void transpose(__m512i* v) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int g = 0; g < 16; g += 4)
        for (int k = 0; k < 2; ++k) {
            b[g + 2 * k] = _mm512_unpacklo_epi64(a[g + k], a[g + k + 2]);
            b[g + 2 * k + 1] = _mm512_unpackhi_epi64(a[g + k], a[g + k + 2]);
        }
    for (int c = 0; c < 4; ++c) {
        const __m512i p = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x44), q = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xee);
        const __m512i r = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x44);
        const __m512i s = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xee);
        v[c] = _mm512_shuffle_i32x4(p, r, 0x88);
        v[c + 4] = _mm512_shuffle_i32x4(p, r, 0xdd);
        v[c + 8] = _mm512_shuffle_i32x4(q, s, 0x88);
        v[c + 12] = _mm512_shuffle_i32x4(q, s, 0xdd);
    }
}

// Registers that four columns take.
template <bool SIGNED>
constexpr int kStep = 1;

// 64 columns of sixteen rows, of which bytes(row) has one, to 16 steps of `q`; signed ones become kSignedBias larger.
template <bool SIGNED, class Row>
inline void store_columns(const Row& bytes, Ints* q) {
    __m512i v[16];
    for (int i = 0; i < 16; ++i) v[i] = bytes(i).v;
    transpose(v);
    for (int i = 0; i < 16; ++i) q[i] = SIGNED ? _mm512_xor_si512(v[i], _mm512_set1_epi8(-128)) : v[i];
}

// A block of 256 of sixteen rows.
template <class T>
inline void store_block(const uint8_t* const* blocks, Ints* q) {
    store_columns<T::kSigned>([&](int i) { return T::template chunk<0>(Packed{blocks[i]}); }, q);
    store_columns<T::kSigned>([&](int i) { return T::template chunk<1>(Packed{blocks[i]}); }, q + 16);
    store_columns<T::kSigned>([&](int i) { return T::template chunk<2>(Packed{blocks[i]}); }, q + 32);
    store_columns<T::kSigned>([&](int i) { return T::template chunk<3>(Packed{blocks[i]}); }, q + 48);
}

inline Floats sixteen(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// Scales (as add_dots takes them: int32; and in pairs), minima and factors of a block of 256 of sixteen rows.
template <class T, class Part>
inline void store_scales(const uint8_t* const* blocks, Part& part) {
    constexpr int pairs = 128 / T::kSub;
    // Of each row first its scales, then its minima.
    __m512i v[16];
    for (int i = 0; i < 16; ++i) {
        alignas(64) int16_t words[32] = {};
        const auto scales = T::scales(blocks[i]);
        std::memcpy(words, &scales, sizeof scales);
        if constexpr (T::kOffset) {
            const auto minima = T::minima(blocks[i]);
            std::memcpy(words + 2 * pairs, &minima, sizeof minima);
        }
        v[i] = _mm512_load_si512(words);
    }
    transpose(v);
    for (int p = 0; p < pairs; ++p) {
        part.scale[2 * p] = _mm512_srai_epi32(_mm512_slli_epi32(v[p], 16), 16);
        part.scale[2 * p + 1] = _mm512_srai_epi32(v[p], 16);
        part.pairs[p] = v[p];
        if constexpr (T::kOffset) part.min_pairs[p] = v[pairs + p];
    }
    const auto low = [&](int i) { return blocks[i]; };
    const auto high = [&](int i) { return blocks[8 + i]; };
    part.d[0] = sixteen(halves(low, T::kD, 8), halves(high, T::kD, 8));
    if constexpr (T::kOffset) part.o[0] = sixteen(halves(low, T::kO, 8), halves(high, T::kO, 8));
}

// Factors of block `j` of a part of blocks of 32.
template <class T, class Part>
inline void store_factors(const uint8_t* const* rows, int j, Part& part) {
    const auto low = [&](int i) { return rows[i] + j * T::kBytes; };
    const auto high = [&](int i) { return rows[8 + i] + j * T::kBytes; };
    part.d[j] = sixteen(T::d(low, 8), T::d(high, 8));
    if constexpr (T::kOffset) part.o[j] = sixteen(halves(low, 2, 8), halves(high, 2, 8));
}

inline Ints unit_scale() { return _mm512_set1_epi32(1); }

// isum[m] += scale * (weights · activations) over STEPS * 4 columns.
template <class T, int STEPS, int M>
inline void add_dots(const Ints* w, const int8_t* const* x, const Ints* scale, Ints* isum) {
    Ints sums[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m] = T::kSub == 32 && T::kBytes <= 64 ? isum[m] : no_ints();
#pragma GCC unroll 8
    for (int k = 0; k < STEPS; ++k) {
        const Ints weights = w[k];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], weights, everywhere_32(x[m] + 4 * k));
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
        isum[m] = T::kBytes <= 64 ? sums[m] : _mm512_add_epi32(isum[m], _mm512_mullo_epi32(sums[m], scale[0]));
}

}  // namespace spark::tile_products
