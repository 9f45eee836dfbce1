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
// Activation rows from which on a tile is faster than row by row; rows of Q8_0 need no unpacking.
template <class T>
constexpr int kWorthUnpacking = std::is_same_v<T, Q80> ? 3 : 2;

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

// 16 bytes of sixteen rows, of which quarter(row) has one: register j has bytes 4 j .. 4 j + 3 of each row.
template <class Quarter>
[[gnu::always_inline]] inline void transpose_quarters(const Quarter& quarter, Ints* out) {
    // Rows i, 4 + i, 8 + i and 12 + i side by side, so that all rows come to their places within quarters.
    const auto four = [&](int i) {
        const __m256i low = _mm256_setr_m128i(quarter(i), quarter(4 + i));
        const __m256i high = _mm256_setr_m128i(quarter(8 + i), quarter(12 + i));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    const __m512i v[4] = {four(0), four(1), four(2), four(3)};
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// 64 columns, the first 32 and the others: four of each. The functions are those of Bytes.
struct Halves {
    Ints low, high;
};
inline Halves both(Halves a, Halves b) { return {_mm512_or_si512(a.low, b.low), _mm512_or_si512(a.high, b.high)}; }
inline Halves masked(Halves a, uint8_t mask) {
    const Ints m = _mm512_set1_epi8(static_cast<char>(mask));
    return {_mm512_and_si512(a.low, m), _mm512_and_si512(a.high, m)};
}
template <int LOW, int HIGH>
inline Halves turned(Halves a) {
    return {_mm512_ror_epi32(a.low, (LOW + 32) % 32), _mm512_ror_epi32(a.high, (HIGH + 32) % 32)};
}

// Half of each region of 32 bytes of a block of sixteen rows: of each row four bytes. The interface is that of Packed.
struct Turned {
    const Ints* regions;  // [region][4]
    int fields, place;    // of 0 .. 3: which four bytes
    Ints load32(int offset) const { return regions[(offset - fields) / 8 + place]; }
    Halves load64(int offset) const { return {load32(offset), load32(offset + 32)}; }
    Halves twice32(int offset) const { return {load32(offset), load32(offset)}; }
};

template <class T, int C>
[[gnu::always_inline]] inline void store_turned(const Ints* regions, Ints* q) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Halves v = T::template chunk<C>(Turned{regions, T::kFields, i});
        q[16 * C + i] = v.low;
        q[16 * C + 8 + i] = v.high;
    }
}

// A block of 256 of sixteen rows.
template <class T>
inline void store_block(const uint8_t* const* blocks, Ints* q) {
    if constexpr (T::kRegions > 0) {
        for (int half = 0; half < 2; ++half) {
            Ints regions[4 * T::kRegions];
#pragma GCC unroll 6
            for (int region = 0; region < T::kRegions; ++region)
                transpose_quarters(
                    [&](int i) { return load_128(blocks[i] + T::kFields + 32 * region + 16 * half); },
                    regions + 4 * region);
            store_turned<T, 0>(regions, q + 4 * half);
            store_turned<T, 1>(regions, q + 4 * half);
            store_turned<T, 2>(regions, q + 4 * half);
            store_turned<T, 3>(regions, q + 4 * half);
        }
    } else {
        store_columns<T::kSigned>([&](int i) { return T::template chunk<0>(Packed{blocks[i]}); }, q);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<1>(Packed{blocks[i]}); }, q + 16);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<2>(Packed{blocks[i]}); }, q + 32);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<3>(Packed{blocks[i]}); }, q + 48);
    }
}

inline Floats sixteen(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// Bytes A and B of each lane as its halves; nothing, kNoByte.
constexpr int kNoByte = 0x80;
template <int A, int B>
inline Ints two_bytes(Ints v) {
    constexpr int k = static_cast<int>(0x80008000u | A | B << 16);
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi32(k, k + 0x00040004, k + 0x00080008, k + 0x000c000c)));
}

// Six-bit scales and minima (layouts.h, Offsets).
template <class Part>
inline void store_six_bits(const uint8_t* const* blocks, Part& part) {
    const Ints four = _mm512_set1_epi8(0x0f), two = _mm512_set1_epi8(0x30), six = _mm512_set1_epi8(0x3f);
    Ints word[4];
    transpose_quarters([&](int i) { return load_128(blocks[i]); }, word);
    const auto joined = [&](Ints low, Ints high) {
        return _mm512_or_si512(_mm512_and_si512(low, four), _mm512_and_si512(_mm512_srli_epi32(high, 2), two));
    };
    const Ints scales[2] = {_mm512_and_si512(word[1], six), joined(word[3], word[1])};
    const Ints minima[2] = {_mm512_and_si512(word[2], six), joined(_mm512_srli_epi32(word[3], 4), word[2])};
    for (int half = 0; half < 2; ++half) {
        Ints* scale = part.scale + 4 * half;
        scale[0] = two_bytes<0, kNoByte>(scales[half]);
        scale[1] = two_bytes<1, kNoByte>(scales[half]);
        scale[2] = two_bytes<2, kNoByte>(scales[half]);
        scale[3] = two_bytes<3, kNoByte>(scales[half]);
        part.min_pairs[2 * half] = two_bytes<0, 1>(minima[half]);
        part.min_pairs[2 * half + 1] = two_bytes<2, 3>(minima[half]);
    }
    part.d[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word[0]));
    part.o[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word[0], 16)));
}

// The same for other types.
template <class T, class Part>
inline void store_other_scales(const uint8_t* const* blocks, Part& part) {
    constexpr int pairs = 128 / T::kSub;
    const auto store_pairs = [](const auto& words, Ints* out) {  // words(row): int16
        transpose_quarters([&](int i) { return _mm256_castsi256_si128(words(i)); }, out);
        if constexpr (pairs > 4)
            transpose_quarters([&](int i) { return _mm256_extracti128_si256(words(i), 1); }, out + 4);
    };
    if constexpr (T::kSub == 16)
        store_pairs([&](int i) { return T::scales(blocks[i]); }, part.pairs);
    else
        store_pairs([&](int i) { return _mm256_castsi128_si256(T::scales(blocks[i])); }, part.pairs);
    for (int p = 0; p < pairs; ++p) {
        part.scale[2 * p] = _mm512_srai_epi32(_mm512_slli_epi32(part.pairs[p], 16), 16);
        part.scale[2 * p + 1] = _mm512_srai_epi32(part.pairs[p], 16);
    }
    const auto low = [&](int i) { return blocks[i]; };
    const auto high = [&](int i) { return blocks[8 + i]; };
    part.d[0] = sixteen(halves(low, T::kD, 8), halves(high, T::kD, 8));
    if constexpr (T::kOffset) {
        store_pairs([&](int i) { return T::minima(blocks[i]); }, part.min_pairs);
        part.o[0] = sixteen(halves(low, T::kO, 8), halves(high, T::kO, 8));
    }
}

// Scales (as add_dots takes them: int32; and in pairs), minima and factors of a block of 256 of sixteen rows.
template <class T, class Part>
inline void store_scales(const uint8_t* const* blocks, Part& part) {
    if constexpr (std::is_base_of_v<Offsets, T>)
        store_six_bits(blocks, part);
    else
        store_other_scales<T>(blocks, part);
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
