// Packed weight rows times one activation row, straight from where they lie: for steps of a few rows.
//
// Eight lanes of 256 columns go side by side: of one weight row the eight partial sums that its product is made of
// (docs/arithmetic.md, "Products"), of rows with fewer than eight such parts those of several rows.
#pragma once

#include "cpu/layouts.h"

#if SPARK_VECTORS

namespace spark::row_products {

using namespace layouts;

// Bytes ahead of the block in hand that are fetched: the hardware alone does not run far enough ahead. The nearest cache
// is for what comes soon, as of what is fetched into it farther ahead a part is gone again when its turn comes; memory
// needs more time than that gives.
constexpr int kAhead = 2048;     // into the nearest cache
constexpr int kFarAhead = 8192;  // into the next

// Fetches what lies as far ahead of `bytes` from `b`.
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* b, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(b) + kAhead + line, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(b) + kFarAhead + line, _MM_HINT_T1);
    }
}

struct QuantisedRow {
    const int8_t* q;
    const float* a;
    const int16_t* sums16;
    const int16_t* sums32;
};

// Adds up the lanes of each weight row: the halving tree, whose last steps are these (absent partials are +0, which
// changes no partial, as none is -0). The result is in the row's first lane.
template <int LANES>
inline __m256 tree(__m256 v) {
    if constexpr (LANES >= 8) v = _mm256_add_ps(v, _mm256_permute2f128_ps(v, v, 0x01));
    if constexpr (LANES >= 4) v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
    if constexpr (LANES >= 2) v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    return v;
}

inline __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// isum of a block of 256 as lanes that add up to it.
template <class T, class Scales>
[[gnu::always_inline]] inline Sum block_sum(const uint8_t* b, const Scales& scales, const QuantisedRow& x, int64_t block) {
    const int8_t* q = x.q + 256 * block;
    fetch_ahead(b, T::kBytes);
    Sum sum = no_sum();
    if constexpr (T::kBias != 0) {
        // Two sub-blocks per lane: what the bias made too much, shifted by its power of two.
        const __m256i surplus = _mm256_madd_epi16(T::scales(b), load_256(x.sums16 + 16 * block));
        sum = widened(_mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(surplus, T::kBias == 32 ? 5 : 2)));
    }
    const auto add = [&](Bytes w, Bytes activations, Bytes scale) {
        sum = T::kSigned ? add_scaled_signed(sum, w, activations, scale) : add_scaled(sum, w, activations, scale);
    };
    add(T::template chunk<0>(Packed{b}), load64(q), scales.template chunk<0>());
    add(T::template chunk<1>(Packed{b}), load64(q + 64), scales.template chunk<1>());
    add(T::template chunk<2>(Packed{b}), load64(q + 128), scales.template chunk<2>());
    add(T::template chunk<3>(Packed{b}), load64(q + 192), scales.template chunk<3>());
    return sum;
}

// msum likewise, of types with an offset.
template <class T>
inline __m128i minima_sum(const uint8_t* b, const QuantisedRow& x, int64_t block) {
    static_assert(T::kSub == 16);
    const __m256i both = _mm256_madd_epi16(T::minima(b), load_256(x.sums16 + 16 * block));
    return _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}

// Lane i: the sum of the four lanes of v[i].
inline __m256i eight_quads(const __m128i* v) {
    const auto both = [&](int i) { return _mm256_setr_m128i(v[i], v[i + 4]); };
    return _mm256_hadd_epi32(_mm256_hadd_epi32(both(0), both(1)), _mm256_hadd_epi32(both(2), both(3)));
}

// The terms t of blocks `base` to `base + present - 1` of `rows` <= 8 / LANES weight rows, one per lane; +0 in the lanes
// left over, of which there are none if FULL.
template <class T, int LANES, bool FULL>
inline __m256 wide_terms(const uint8_t* w, int64_t row_bytes, int rows, int base, int present, const QuantisedRow& x) {
    const __m256i lane_of_row = _mm256_and_si256(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(LANES - 1));
    const auto there = [&](int lane) { return FULL || (lane / LANES < rows && lane % LANES < present); };
    const auto block_at = [&](int lane) {
        return w + lane / LANES * row_bytes + static_cast<int64_t>(base + lane % LANES) * T::kBytes;
    };
    Sum isum[8];
    __m128i msum[8];
    __m256 d, o;
    if constexpr (std::is_base_of_v<Offsets, T>) {
        alignas(32) uint64_t scales[8], minima[8];
        const EightOffsets of([&](int lane) { return block_at(there(lane) ? lane : 0); });
        EightOffsets::store(of.scales, scales);
        EightOffsets::store(of.minima, minima);
        alignas(32) int32_t mask[8];
        for (int lane = 0; lane < 8; ++lane) mask[lane] = there(lane) ? -1 : 0;
        const __m256 present_lanes = _mm256_load_ps(reinterpret_cast<const float*>(mask));
        d = FULL ? of.d : _mm256_and_ps(of.d, present_lanes);
        o = FULL ? of.o : _mm256_and_ps(of.o, present_lanes);
#pragma GCC unroll 1  // eight copies are slower out of cache and no faster in it (measured with g++ 12)
        for (int lane = 0; lane < 8; ++lane) {
            isum[lane] = no_sum();
            msum[lane] = _mm_setzero_si128();
            if (!there(lane)) continue;
            const int block = base + lane % LANES, place = EightOffsets::kPlace[lane];
            isum[lane] = block_sum<T>(block_at(lane), Scales32Bytes(scales[place]), x, block);
            msum[lane] = _mm_madd_epi16(eight_words(minima[place]), load_128(x.sums32 + int64_t{8} * block));
        }
    } else {
        for (int lane = 0; lane < 8; ++lane) {
            isum[lane] = no_sum();
            if constexpr (T::kOffset) msum[lane] = _mm_setzero_si128();
            if (!there(lane)) continue;
            const int block = base + lane % LANES;
            const uint8_t* b = block_at(lane);
            isum[lane] = block_sum<T>(b, T::spread_scales(b), x, block);
            if constexpr (T::kOffset) msum[lane] = minima_sum<T>(b, x, block);
        }
        const auto factors = [&](int offset) {
            const auto at = [&](int lane) { return there(lane) ? load_as<int16_t>(block_at(lane) + offset) : int16_t{0}; };
            return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
        };
        d = factors(T::kD);
        if constexpr (T::kOffset) o = factors(T::kO);
    }
    const __m256 a = _mm256_permutevar8x32_ps(_mm256_maskload_ps(x.a + base, first_lanes(present)), lane_of_row);
    const __m256 da = _mm256_mul_ps(d, a);
    const __m256 i = _mm256_cvtepi32_ps(eight_sums(isum));
    if constexpr (T::kOffset) {
        // The field is -o, and a sign changes no rounding.
        const __m256 oa = _mm256_mul_ps(o, a);
        return _mm256_fmsub_ps(da, i, _mm256_mul_ps(oa, _mm256_cvtepi32_ps(eight_quads(msum))));
    }
    return _mm256_mul_ps(da, i);
}

// Products of `rows` <= 8 / LANES weight rows of blocks of 256 with x.
template <class T, int LANES>
inline __m256 wide_rows(const uint8_t* w, int64_t row_bytes, int rows, int blocks, const QuantisedRow& x) {
    __m256 partial = _mm256_setzero_ps();
    for (int base = 0; base < blocks; base += LANES) {
        const int present = std::min(LANES, blocks - base);
        const bool full = rows == 8 / LANES && present == LANES;
        partial = _mm256_add_ps(partial, full ? wide_terms<T, LANES, true>(w, row_bytes, rows, base, present, x)
                                              : wide_terms<T, LANES, false>(w, row_bytes, rows, base, present, x));
    }
    return tree<LANES>(partial);
}

// Terms t of `count` <= 8 blocks of 32 that follow each other, one per lane; +0 in the lanes after them.
template <class T>
inline __m256 narrow_terms(const uint8_t* b, const QuantisedRow& x, int64_t block, int count) {
    constexpr int bias = T::kSigned ? kSignedBias : T::kBias;
    __m256i sums[8];
    fetch_ahead(b, 8 * T::kBytes);
    for (int j = 0; j < 8; ++j) {
        sums[j] = _mm256_setzero_si256();
        if (j >= count) continue;
        const __m256i w = T::values(b + j * T::kBytes), q = load_256(x.q + 32 * (block + j));
        sums[j] = T::kSigned ? dot_signed(w, q) : dot_unsigned(w, q);
    }
    const __m256i present = first_lanes(count);
    alignas(16) int16_t words[8] = {};
    std::memcpy(words, x.sums32 + block, static_cast<size_t>(count) * sizeof(int16_t));
    const __m256i sum_of_x = _mm256_cvtepi16_epi32(load_128(words));
    const __m256 a = _mm256_maskload_ps(x.a + block, present);
    const auto at = [&](int i) { return b + i * T::kBytes; };
    const __m256 da = _mm256_mul_ps(T::d(at, count), a);
    const __m256i isum = _mm256_sub_epi32(eight_sums_256(sums), _mm256_mullo_epi32(sum_of_x, _mm256_set1_epi32(bias)));
    if constexpr (!T::kOffset) return _mm256_mul_ps(da, _mm256_cvtepi32_ps(isum));
    const __m256 oa = _mm256_mul_ps(halves(at, 2, count), a);
    return _mm256_fmadd_ps(da, _mm256_cvtepi32_ps(isum), _mm256_mul_ps(oa, _mm256_cvtepi32_ps(sum_of_x)));
}

// v[i] lane j becomes v[j] lane i.
inline void transpose(__m256* v) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 2; ++k) {
            b[4 * i + 2 * k] = _mm256_shuffle_ps(a[4 * i + k], a[4 * i + 2 + k], 0x44);
            b[4 * i + 2 * k + 1] = _mm256_shuffle_ps(a[4 * i + k], a[4 * i + 2 + k], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

// Products of `rows` <= 8 / LANES weight rows of blocks of 32 with x.
template <class T, int LANES>
inline __m256 narrow_rows(const uint8_t* w, int64_t row_bytes, int rows, int blocks, const QuantisedRow& x) {
    __m256 partial = _mm256_setzero_ps();
    for (int base = 0; base < blocks; base += 8 * LANES) {
        __m256 t[8];
        for (int lane = 0; lane < 8; ++lane) {
            const int block = base + lane % LANES * 8;
            const int count = lane / LANES < rows ? std::min(8, blocks - block) : 0;
            const uint8_t* b = w + lane / LANES * row_bytes + static_cast<int64_t>(block) * T::kBytes;
            if (count == 8)
                t[lane] = narrow_terms<T>(b, x, block, 8);
            else
                t[lane] = count > 0 ? narrow_terms<T>(b, x, block, count) : _mm256_setzero_ps();
        }
        transpose(t);
        for (const __m256& term : t) partial = _mm256_add_ps(partial, term);
    }
    return tree<LANES>(partial);
}

template <class T, int LANES>
inline void run(const uint8_t* w, int64_t row_bytes, int64_t rows, int columns, const QuantisedRow& x, float* out) {
    constexpr int group = 8 / LANES;
    alignas(32) float results[8];
    for (int64_t row = 0; row < rows; row += group) {
        const int count = static_cast<int>(std::min<int64_t>(group, rows - row));
        const uint8_t* first = w + row * row_bytes;
        if constexpr (T::kBytes > 64)
            _mm256_store_ps(results, wide_rows<T, LANES>(first, row_bytes, count, columns / 256, x));
        else
            _mm256_store_ps(results, narrow_rows<T, LANES>(first, row_bytes, count, columns / 32, x));
        for (int i = 0; i < count; ++i) out[row + i] = results[i * LANES];
    }
}

// out[o] = weight row o · x for `rows` rows of `row_bytes` from `w`.
template <class T>
void products(const uint8_t* w, int64_t row_bytes, int64_t rows, int columns, const QuantisedRow& x, float* out) {
    const int parts = (columns + 255) / 256;
    if (parts > 4) return run<T, 8>(w, row_bytes, rows, columns, x, out);
    if (parts > 2) return run<T, 4>(w, row_bytes, rows, columns, x, out);
    if (parts > 1) return run<T, 2>(w, row_bytes, rows, columns, x, out);
    return run<T, 1>(w, row_bytes, rows, columns, x, out);
}

}  // namespace spark::row_products

#endif
