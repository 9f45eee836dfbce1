// Sixteen weight rows, unpacked once, times many activation rows: for prompts.
//
// A register holds four consecutive columns of sixteen weight rows, a row per 32-bit lane, so that integer scales,
// factors and partial sums are lanes too and nothing is added up across lanes.
#pragma once

#include "cpu/row_products.h"

#if SPARK_VECTORS == 512

namespace spark::tile_products {

using namespace layouts;
using row_products::QuantisedRow;

constexpr int kRows = 16;

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

// Unpacked rows. Scales and minima of sub-blocks 2p and 2p + 1 are the int16 halves of a lane, as dpwssd takes them.
struct Tile {
    __m512i* q;            // [columns / 4]
    __m512i* scale;        // [columns / sub]: int32
    __m512i* scale_pairs;  // [columns / sub / 2], types with a bias
    __m512i* min_pairs;    // [columns / sub / 2], types with an offset
    __m512* d;             // [columns / block]
    __m512* o;             // [columns / block], types with an offset

    static int64_t bytes(int columns) { return 64 * (padded(columns) / 4 + 4 * (padded(columns) / 16) + 64); }

    Tile(void* memory, int columns) {
        const int n = padded(columns);
        q = reinterpret_cast<__m512i*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        scale = q + n / 4;
        scale_pairs = scale + n / 16;
        min_pairs = scale_pairs + n / 32;
        d = reinterpret_cast<__m512*>(min_pairs + n / 32);
        o = d + n / 32;
    }

  private:
    static int padded(int columns) { return (columns + 63) / 64 * 64; }
};

// The float16 at `offset` of one block of each row.
inline __m512 row_halves(const uint8_t* block, int64_t row_bytes, int offset, int rows) {
    alignas(32) uint16_t words[kRows] = {};
    for (int r = 0; r < rows; ++r) words[r] = load_as<uint16_t>(block + r * row_bytes + offset);
    return _mm512_cvtph_ps(load_256(words));
}

template <class T>
inline void store_chunk(__m512i* v, __m512i* q) {
    transpose(v);
    for (int i = 0; i < 16; ++i) q[i] = T::kSigned ? _mm512_xor_si512(v[i], _mm512_set1_epi8(-128)) : v[i];
}

template <class T, int C>
inline void unpack_chunk(const uint8_t* block, int64_t row_bytes, int rows, __m512i* q) {
    __m512i v[kRows];
    for (int r = 0; r < kRows; ++r)
        v[r] = r < rows ? T::template chunk<C>(block + r * row_bytes).v : _mm512_setzero_si512();
    store_chunk<T>(v, q + 16 * C);
}

template <class T>
void unpack_wide(const uint8_t* w, int64_t row_bytes, int rows, int columns, const Tile& tile) {
    constexpr int pairs = 128 / T::kSub;
    for (int i = 0; i < columns / 256; ++i) {
        const uint8_t* block = w + static_cast<int64_t>(i) * T::kBytes;
        unpack_chunk<T, 0>(block, row_bytes, rows, tile.q + 64 * i);
        unpack_chunk<T, 1>(block, row_bytes, rows, tile.q + 64 * i);
        unpack_chunk<T, 2>(block, row_bytes, rows, tile.q + 64 * i);
        unpack_chunk<T, 3>(block, row_bytes, rows, tile.q + 64 * i);
        // Of each row first its pairs of scales, then those of its minima.
        __m512i v[kRows];
        for (int r = 0; r < kRows; ++r) {
            alignas(64) int16_t words[32] = {};
            if (r < rows) {
                const auto scales = T::scales(block + r * row_bytes);
                std::memcpy(words, &scales, sizeof scales);
                if constexpr (T::kOffset) {
                    const auto minima = T::minima(block + r * row_bytes);
                    std::memcpy(words + 2 * pairs, &minima, sizeof minima);
                }
            }
            v[r] = _mm512_load_si512(words);
        }
        transpose(v);
        for (int p = 0; p < pairs; ++p) {
            tile.scale[2 * (pairs * i + p)] = _mm512_srai_epi32(_mm512_slli_epi32(v[p], 16), 16);
            tile.scale[2 * (pairs * i + p) + 1] = _mm512_srai_epi32(v[p], 16);
            tile.scale_pairs[pairs * i + p] = v[p];
            if constexpr (T::kOffset) tile.min_pairs[pairs * i + p] = v[pairs + p];
        }
        tile.d[i] = row_halves(block, row_bytes, T::kD, rows);
        if constexpr (T::kOffset) tile.o[i] = row_halves(block, row_bytes, T::kO, rows);
    }
}

template <class T>
void unpack_narrow(const uint8_t* w, int64_t row_bytes, int rows, int columns, const Tile& tile) {
    const int blocks = columns / 32;
    for (int i = 0; i < blocks; i += 2) {
        const uint8_t* block = w + static_cast<int64_t>(i) * T::kBytes;
        __m512i v[kRows];
        for (int r = 0; r < kRows; ++r) {
            v[r] = _mm512_setzero_si512();
            if (r >= rows) continue;
            const uint8_t* b = block + r * row_bytes;
            const __m256i second = i + 1 < blocks ? T::values(b + T::kBytes) : _mm256_setzero_si256();
            v[r] = join(T::values(b), second).v;
        }
        store_chunk<T>(v, tile.q + 8 * i);
        for (int j = i; j < std::min(i + 2, blocks); ++j) {
            const uint8_t* b = w + static_cast<int64_t>(j) * T::kBytes;
            alignas(64) float d[kRows] = {};
            for (int r = 0; r < rows; ++r)
                d[r] = _mm256_cvtss_f32(T::template d<T::kBytes>(b + r * row_bytes, 1));
            tile.d[j] = _mm512_load_ps(d);
            if constexpr (T::kOffset) tile.o[j] = row_halves(b, row_bytes, 2, rows);
        }
    }
}

// A dword of `p` in every lane.
inline __m512i everywhere(const void* p) { return _mm512_set1_epi32(load_as<int32_t>(p)); }

// Σ pairs · sums over `count` pairs of sub-blocks.
inline __m512i pair_sums(const __m512i* pairs, const int16_t* sums, int count) {
    __m512i sum = _mm512_setzero_si512();
    for (int p = 0; p < count; ++p) sum = _mm512_dpwssd_epi32(sum, pairs[p], everywhere(sums + 2 * p));
    return sum;
}

// The term t of a block of each row. `d`, `o`: factors; a K type's field is -o.
template <class T, bool NEGATED>
inline __m512 term(__m512 d, const __m512* o, float a, __m512i isum, __m512i msum) {
    const __m512 x = _mm512_set1_ps(a), da = _mm512_mul_ps(d, x), i = _mm512_cvtepi32_ps(isum);
    if constexpr (!T::kOffset) return _mm512_mul_ps(da, i);
    const __m512 other = _mm512_mul_ps(_mm512_mul_ps(*o, x), _mm512_cvtepi32_ps(msum));
    return NEGATED ? _mm512_fmsub_ps(da, i, other) : _mm512_fmadd_ps(da, i, other);
}

// Sums of products of four bytes: M activation rows with STEPS registers of weights.
template <int M, int STEPS>
inline void dots(const __m512i* w, const int8_t* const* q, int64_t first, __m512i* sums) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int k = 0; k < STEPS; ++k) {
        const __m512i weights = w[k];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], weights, everywhere(q[m] + first + 4 * k));
    }
}

template <class T, int M>
void wide_products(const Tile& tile, int columns, const QuantisedRow* x, __m512* results) {
    constexpr int subs = 256 / T::kSub, steps = T::kSub / 4;
    constexpr int bias = T::kSigned ? kSignedBias : T::kBias;
    const int8_t* q[M];
    for (int m = 0; m < M; ++m) q[m] = x[m].q;
    __m512 partial[8][M];
    for (auto& row : partial)
        for (__m512& p : row) p = _mm512_setzero_ps();
    for (int i = 0; i < columns / 256; ++i) {
        __m512i isum[M], dot[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) isum[m] = _mm512_setzero_si512();
        for (int s = 0; s < subs; ++s) {
            dots<M, steps>(tile.q + 64 * i + steps * s, q, 256 * i + T::kSub * s, dot);
            const __m512i scale = tile.scale[subs * i + s];
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) isum[m] = _mm512_add_epi32(isum[m], _mm512_mullo_epi32(dot[m], scale));
        }
        for (int m = 0; m < M; ++m) {
            const int16_t* sums = T::kSub == 32 ? x[m].sums32 + 8 * i : x[m].sums16 + 16 * i;
            __m512i msum = _mm512_setzero_si512();
            if constexpr (T::kOffset) msum = pair_sums(tile.min_pairs + subs / 2 * i, sums, subs / 2);
            if constexpr (bias != 0) {
                const __m512i surplus = pair_sums(tile.scale_pairs + subs / 2 * i, sums, subs / 2);
                isum[m] = _mm512_sub_epi32(isum[m], _mm512_mullo_epi32(surplus, _mm512_set1_epi32(bias)));
            }
            const __m512 t = term<T, true>(tile.d[i], tile.o + i, x[m].a[i], isum[m], msum);
            partial[i % 8][m] = _mm512_add_ps(partial[i % 8][m], t);
        }
    }
    for (int step = 4; step > 0; step /= 2)
        for (int c = 0; c < step; ++c)
            for (int m = 0; m < M; ++m) partial[c][m] = _mm512_add_ps(partial[c][m], partial[c + step][m]);
    for (int m = 0; m < M; ++m) results[m] = partial[0][m];
}

template <class T, int M>
void narrow_products(const Tile& tile, int columns, const QuantisedRow* x, __m512* results) {
    constexpr int bias = T::kSigned ? kSignedBias : T::kBias;
    const int8_t* q[M];
    for (int m = 0; m < M; ++m) q[m] = x[m].q;
    __m512 partial[8][M];
    for (auto& row : partial)
        for (__m512& p : row) p = _mm512_setzero_ps();
    for (int i = 0; i < columns / 32; ++i) {
        __m512i isum[M];
        dots<M, 8>(tile.q + 8 * i, q, 32 * i, isum);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const __m512i sum = _mm512_set1_epi32(x[m].sums32[i]);
            if constexpr (bias != 0) isum[m] = _mm512_sub_epi32(isum[m], _mm512_set1_epi32(bias * x[m].sums32[i]));
            const __m512 t = term<T, false>(tile.d[i], tile.o + i, x[m].a[i], isum[m], sum);
            partial[i / 8 % 8][m] = _mm512_add_ps(partial[i / 8 % 8][m], t);
        }
    }
    for (int step = 4; step > 0; step /= 2)
        for (int c = 0; c < step; ++c)
            for (int m = 0; m < M; ++m) partial[c][m] = _mm512_add_ps(partial[c][m], partial[c + step][m]);
    for (int m = 0; m < M; ++m) results[m] = partial[0][m];
}

template <class T>
void unpack(const uint8_t* w, int64_t row_bytes, int rows, int columns, void* memory) {
    const Tile tile(memory, columns);
    if constexpr (T::kBytes > 64)
        unpack_wide<T>(w, row_bytes, rows, columns, tile);
    else
        unpack_narrow<T>(w, row_bytes, rows, columns, tile);
}

template <class T, int M>
void multiply(const Tile& tile, int columns, const QuantisedRow* x, float* const* out, __mmask16 rows) {
    __m512 results[M];
    if constexpr (T::kBytes > 64)
        wide_products<T, M>(tile, columns, x, results);
    else
        narrow_products<T, M>(tile, columns, x, results);
    for (int m = 0; m < M; ++m) _mm512_mask_storeu_ps(out[m], rows, results[m]);
}

// out[m][o] = row o of the unpacked tile · x[m] for `count` <= 8 activation rows.
template <class T>
void products(const void* memory, int rows, int columns, const QuantisedRow* x, int count, float* const* out) {
    const Tile tile(const_cast<void*>(memory), columns);
    const auto lanes = static_cast<__mmask16>((1u << rows) - 1);
    int m = 0;
    for (; m + 8 <= count; m += 8) multiply<T, 8>(tile, columns, x + m, out + m, lanes);
    for (; m + 4 <= count; m += 4) multiply<T, 4>(tile, columns, x + m, out + m, lanes);
    for (; m + 2 <= count; m += 2) multiply<T, 2>(tile, columns, x + m, out + m, lanes);
    for (; m < count; ++m) multiply<T, 1>(tile, columns, x + m, out + m, lanes);
}

}  // namespace spark::tile_products

#endif
