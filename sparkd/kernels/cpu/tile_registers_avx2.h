// Tiles in 256-bit registers: a weight row per 32-bit lane. The names of tile_registers_avx512.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/layouts.h"

namespace spark::tile_products {

using namespace layouts;

using Ints = __m256i;
constexpr int kRegisters = 2;  // that sixteen rows take
constexpr int kGroup = 4;      // activation rows that share what is loaded of the weights
// Activation rows from which on a tile is faster than row by row.
template <class>
constexpr int kWorthUnpacking = 2;

// A dword of `p` in every lane.
inline Ints everywhere_32(const void* p) { return _mm256_set1_epi32(load_as<int32_t>(p)); }
inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Ints subtract_times(Ints a, Ints b, int factor) {
    return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, _mm256_set1_epi32(factor)));
}
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }

// Lane j of v[i] becomes lane i of v[j].
[[gnu::always_inline]] inline void transpose(__m256i* v) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int g = 0; g < 8; g += 4)
        for (int k = 0; k < 2; ++k) {
            b[g + 2 * k] = _mm256_unpacklo_epi64(a[g + k], a[g + k + 2]);
            b[g + 2 * k + 1] = _mm256_unpackhi_epi64(a[g + k], a[g + k + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

// Signed weights are kept as magnitudes, then as the weights, whose signs go to the activations; or kSignedBias larger.
constexpr bool kMagnitudes = kSignedBias == 0;

// Registers that four columns take.
template <bool SIGNED>
constexpr int kStep = (SIGNED && kMagnitudes ? 2 : 1) * kRegisters;

// 64 columns of sixteen rows, of which bytes(row) has one, to 16 steps of `q`.
template <bool SIGNED, class Row>
inline void store_columns(const Row& bytes, Ints* q) {
    const auto store_half = [&](const auto& half, Ints* out) {
        __m256i v[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i] = half(i);
        transpose(v);
        for (int i = 0; i < 8; ++i) {
            Ints* step = out + i * kStep<SIGNED>;
            if constexpr (!SIGNED) {
                step[0] = v[i];
            } else if constexpr (kMagnitudes) {
                step[0] = _mm256_abs_epi8(v[i]);
                step[kRegisters] = v[i];
            } else {
                step[0] = _mm256_xor_si256(v[i], _mm256_set1_epi8(-128));
            }
        }
    };
    for (int r = 0; r < kRegisters; ++r) {
        store_half([&](int i) { return bytes(8 * r + i).low; }, q + r);
        store_half([&](int i) { return bytes(8 * r + i).high; }, q + r + 8 * kStep<SIGNED>);
    }
}

// Regions of 32 bytes of a block of eight rows, turned: of each row four bytes. The interface is that of Packed.
struct Turned {
    const __m256i* regions;  // [region][8]
    int fields, place;       // of 0 .. 7: which four bytes
    __m256i load32(int offset) const { return regions[(offset - fields) / 4 + place]; }
    Bytes load64(int offset) const { return {load32(offset), load32(offset + 32)}; }
    Bytes twice32(int offset) const { return {load32(offset), load32(offset)}; }
};

template <class T, int C>
inline void store_turned(const __m256i* regions, Ints* q) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const Bytes v = T::template chunk<C>(Turned{regions, T::kFields, i});
        q[(16 * C + i) * kRegisters] = v.low;
        q[(16 * C + 8 + i) * kRegisters] = v.high;
    }
}

// A block of 256 of sixteen rows.
template <class T>
inline void store_block(const uint8_t* const* blocks, Ints* q) {
    if constexpr (T::kRegions > 0) {
        for (int r = 0; r < kRegisters; ++r) {
            __m256i regions[8 * T::kRegions];
            for (int region = 0; region < T::kRegions; ++region) {
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i)
                    regions[8 * region + i] = load32(blocks[8 * r + i] + T::kFields + 32 * region);
                transpose(regions + 8 * region);
            }
            store_turned<T, 0>(regions, q + r);
            store_turned<T, 1>(regions, q + r);
            store_turned<T, 2>(regions, q + r);
            store_turned<T, 3>(regions, q + r);
        }
    } else {
        constexpr int chunk = 16 * kStep<T::kSigned>;
        store_columns<T::kSigned>([&](int i) { return T::template chunk<0>(Packed{blocks[i]}); }, q);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<1>(Packed{blocks[i]}); }, q + chunk);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<2>(Packed{blocks[i]}); }, q + 2 * chunk);
        store_columns<T::kSigned>([&](int i) { return T::template chunk<3>(Packed{blocks[i]}); }, q + 3 * chunk);
    }
}

// Bytes A and B of each lane as its halves; nothing, kNoByte.
constexpr int kNoByte = 0x80;
template <int A, int B>
inline Ints two_bytes(Ints v) {
    constexpr int k = static_cast<int>(0x80008000u | A | B << 16);
    const __m256i lanes = _mm256_setr_epi32(k, k + 0x00040004, k + 0x00080008, k + 0x000c000c, k, k + 0x00040004,
                                            k + 0x00080008, k + 0x000c000c);
    return _mm256_shuffle_epi8(v, lanes);
}

#if SPARK_VNNI
// What add_dots takes as scales: int32.
inline Ints first_scale(Ints pair) { return _mm256_srai_epi32(_mm256_slli_epi32(pair, 16), 16); }
inline Ints second_scale(Ints pair) { return _mm256_srai_epi32(pair, 16); }
// Byte A of each lane as a scale.
template <int A>
inline Ints byte_scale(Ints v) {
    return two_bytes<A, kNoByte>(v);
}
#else
// What add_dots takes as scales: each in both halves of a lane.
inline Ints first_scale(Ints pair) {
    return _mm256_or_si256(_mm256_slli_epi32(pair, 16), _mm256_and_si256(pair, _mm256_set1_epi32(0xffff)));
}
inline Ints second_scale(Ints pair) {
    return _mm256_or_si256(_mm256_srli_epi32(pair, 16), _mm256_andnot_si256(_mm256_set1_epi32(0xffff), pair));
}
// Byte A of each lane as a scale.
template <int A>
inline Ints byte_scale(Ints v) {
    return two_bytes<A, A>(v);
}
#endif

// Six-bit scales and minima (layouts.h, Offsets) of eight rows at a time.
template <class Part>
inline void store_six_bits(const uint8_t* const* blocks, Part& part) {
    for (int r = 0; r < kRegisters; ++r) {
        const EightOffsets of([&](int i) { return blocks[8 * r + i]; });
        for (int half = 0; half < 2; ++half) {
            Ints* scale = part.scale + 4 * half * kRegisters + r;
            scale[0] = byte_scale<0>(of.scales[half]);
            scale[kRegisters] = byte_scale<1>(of.scales[half]);
            scale[2 * kRegisters] = byte_scale<2>(of.scales[half]);
            scale[3 * kRegisters] = byte_scale<3>(of.scales[half]);
            part.min_pairs[2 * half * kRegisters + r] = two_bytes<0, 1>(of.minima[half]);
            part.min_pairs[(2 * half + 1) * kRegisters + r] = two_bytes<2, 3>(of.minima[half]);
        }
        part.d[r] = of.d;
        part.o[r] = of.o;
    }
}

// The same for other types.
template <class T, class Part>
inline void store_other_scales(const uint8_t* const* blocks, Part& part) {
    constexpr int pairs = 128 / T::kSub;
    for (int r = 0; r < kRegisters; ++r) {
        const uint8_t* const* rows = blocks + 8 * r;
        __m256i v[8];
        for (int i = 0; i < 8; ++i)
            if constexpr (T::kSub == 16) v[i] = T::scales(rows[i]);
            else v[i] = _mm256_castsi128_si256(T::scales(rows[i]));
        transpose(v);
        for (int p = 0; p < pairs; ++p) {
            part.pairs[p * kRegisters + r] = v[p];
            part.scale[2 * p * kRegisters + r] = first_scale(v[p]);
            part.scale[(2 * p + 1) * kRegisters + r] = second_scale(v[p]);
        }
        const auto row = [&](int i) { return rows[i]; };
        part.d[r] = halves(row, T::kD, 8);
        if constexpr (T::kOffset) {
            for (int i = 0; i < 8; ++i) v[i] = T::minima(rows[i]);
            transpose(v);
            for (int p = 0; p < pairs; ++p) part.min_pairs[p * kRegisters + r] = v[p];
            part.o[r] = halves(row, T::kO, 8);
        }
    }
}

// Scales, minima and factors of a block of 256 of sixteen rows.
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
    for (int r = 0; r < kRegisters; ++r) {
        const auto block = [&](int i) { return rows[8 * r + i] + j * T::kBytes; };
        part.d[j * kRegisters + r] = T::d(block, 8);
        if constexpr (T::kOffset) part.o[j * kRegisters + r] = halves(block, 2, 8);
    }
}

#if SPARK_VNNI

inline Ints unit_scale() { return _mm256_set1_epi32(1); }

// isum[m][r] += scale[r] * (weights · activations) over STEPS * 4 columns.
template <class T, int STEPS, int M>
inline void add_dots(const Ints* w, const int8_t* const* x, const Ints* scale, Ints* isum) {
    constexpr bool plain = T::kSub == 32 && T::kBytes <= 64;
    Ints sums[M * kRegisters];
#pragma GCC unroll 8
    for (int i = 0; i < M * kRegisters; ++i) sums[i] = plain ? isum[i] : no_ints();
#pragma GCC unroll 8
    for (int k = 0; k < STEPS; ++k) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Ints activations = everywhere_32(x[m] + 4 * k);
#pragma GCC unroll 2
            for (int r = 0; r < kRegisters; ++r) {
                Ints& sum = sums[m * kRegisters + r];
                sum = _mm256_dpbusd_avx_epi32(sum, w[k * kRegisters + r], activations);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M * kRegisters; ++i)
        isum[i] = plain ? sums[i] : _mm256_add_epi32(isum[i], _mm256_mullo_epi32(sums[i], scale[i % kRegisters]));
}

#else

inline Ints unit_scale() { return _mm256_set1_epi16(1); }

// Keeps a value in its register at this place: left alone, compilers collect all products of a run before they add them,
// in memory, as there are not that many registers.
inline void stay(Ints& v) { asm("" : "+x"(v)); }

// isum[m][r] += scale[r] * (weights · activations) over STEPS * 4 columns. Weights are at most MOST in magnitude: as
// many products as an int16 holds are added up before they are widened.
template <class T, int STEPS, int M>
inline void add_dots(const Ints* w, const int8_t* const* x, const Ints* scale, Ints* isum) {
    constexpr int fit = 32767 / (2 * 127 * T::kMost), run = fit >= 8 && STEPS >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
    static_assert(STEPS % run == 0);
#pragma GCC unroll 8
    for (int first = 0; first < STEPS; first += run) {
        Ints sums[M * kRegisters];
#pragma GCC unroll 8
        for (int k = 0; k < run; ++k) {
            const Ints* weights = w + (first + k) * kStep<T::kSigned>;
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                const Ints activations = everywhere_32(x[m] + 4 * (first + k));
#pragma GCC unroll 2
                for (int r = 0; r < kRegisters; ++r) {
                    Ints a = activations;
                    if constexpr (T::kSigned) a = _mm256_sign_epi8(a, weights[kRegisters + r]);
                    const Ints products = _mm256_maddubs_epi16(weights[r], a);
                    Ints& sum = sums[m * kRegisters + r];
                    sum = k == 0 ? products : _mm256_add_epi16(sum, products);
                    stay(sum);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < M * kRegisters; ++i) {
            isum[i] = add_pairs(isum[i], sums[i], scale[i % kRegisters]);
            if constexpr (run < 2) stay(isum[i]);
        }
    }
}

#endif

}  // namespace spark::tile_products
