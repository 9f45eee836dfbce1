// Packed blocks of the integer classes in registers: the layouts of docs/arithmetic.md, "Weight formats".
//
// A type's values come as unsigned numbers that are `kBias` too large (kSigned: as they are), in order of elements; `kMost` is
// the largest magnitude.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/blocks.h"
#include "cpu/vectors.h"

#if SPARK_VECTORS

namespace spark::layouts {

using namespace vectors;

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

template <class T>
inline T load_as(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// The float16 at `offset` of block(0) to block(count - 1), count <= 8; 0 in the lanes after them.
template <class Block>
inline __m256 halves(const Block& block, int offset, int count) {
    const auto at = [&](int i) { return static_cast<short>(i < count ? load_as<uint16_t>(block(i) + offset) : 0); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}

// --- blocks of 256: chunk<C> has elements 64 C .. 64 C + 63
//
// Of types whose fields of bits begin at `kFields`, `kRegions` regions of 32 bytes, an element depends on the bytes at
// its own place (mod 32) alone; a tile therefore turns those before they are taken apart.

// Where a block of one row lies.
struct Packed {
    const uint8_t* bytes;
    Bytes load64(int offset) const { return vectors::load64(bytes + offset); }
    Bytes twice32(int offset) const { return vectors::twice32(bytes + offset); }
};

// Eight 6-bit scales and minima in 12 bytes, as bytes.
struct SixBits {
    uint64_t scales, minima;
    [[gnu::always_inline]] explicit SixBits(const uint8_t* s) {
        constexpr uint32_t four = 0x0f0f0f0fu, two = 0x30303030u, six = 0x3f3f3f3fu;
        const uint32_t a = load_as<uint32_t>(s), b = load_as<uint32_t>(s + 4), c = load_as<uint32_t>(s + 8);
        scales = (a & six) | static_cast<uint64_t>((c & four) | ((a >> 2) & two)) << 32;
        minima = (b & six) | static_cast<uint64_t>(((c >> 4) & four) | ((b >> 2) & two)) << 32;
    }
};

inline __m128i eight_words(uint64_t bytes) { return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))); }

struct Offsets {  // d and -o as float16 at the start of the block, 6-bit scales and minima of 32 elements
    static constexpr bool kOffset = true, kSigned = false;
    static constexpr int kBias = 0, kSub = 32, kD = 0, kO = 2;
    static __m128i scales(const uint8_t* b) { return eight_words(SixBits(b + 4).scales); }
    static __m128i minima(const uint8_t* b) { return eight_words(SixBits(b + 4).minima); }
};

// Of eight such blocks, one per 32-bit lane: d, -o; bytes of the scales of elements 0 .. 127, of 128 .. 255; minima.
struct EightOffsets {
    __m256 d, o;
    __m256i scales[2], minima[2];

    // block(i): where block i lies.
    template <class Block>
    [[gnu::always_inline]] explicit EightOffsets(const Block& block) {
        const __m256i four = _mm256_set1_epi8(0x0f), two = _mm256_set1_epi8(0x30), six = _mm256_set1_epi8(0x3f);
        __m256i v[4], a[4], word[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) v[i] = _mm256_setr_m128i(load_128(block(i)), load_128(block(i + 4)));
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            word[2 * i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
            word[2 * i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        }
        const auto both = [&](__m256i low, __m256i high) {
            return _mm256_or_si256(low, _mm256_and_si256(_mm256_srli_epi32(high, 2), two));
        };
        scales[0] = _mm256_and_si256(word[1], six);
        scales[1] = both(_mm256_and_si256(word[3], four), word[1]);
        minima[0] = _mm256_and_si256(word[2], six);
        minima[1] = both(_mm256_and_si256(_mm256_srli_epi32(word[3], 4), four), word[2]);
        const __m256i factors = _mm256_permute4x64_epi64(
            _mm256_packus_epi32(_mm256_and_si256(word[0], _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(word[0], 16)),
            0xd8);
        d = _mm256_cvtph_ps(_mm256_castsi256_si128(factors));
        o = _mm256_cvtph_ps(_mm256_extracti128_si256(factors, 1));
    }

    // Bytes of both halves of a block: of block i at out[kPlace[i]].
    static constexpr int kPlace[8] = {0, 1, 4, 5, 2, 3, 6, 7};
    static void store(const __m256i* halves, uint64_t* out) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi32(halves[0], halves[1]));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 4), _mm256_unpackhi_epi32(halves[0], halves[1]));
    }
};

struct Q4K : Offsets {
    static constexpr int kFields = 16, kRegions = 4;
    static constexpr int kType = Q4_K, kBytes = 144, kMost = 15;
    template <int C, class Block>
    static auto chunk(const Block& b) {
        return masked(turned<0, 4>(b.twice32(16 + 32 * C)), 0x0f);
    }
};

struct Q5K : Offsets {
    static constexpr int kFields = 16, kRegions = 5;
    static constexpr int kType = Q5_K, kBytes = 176, kMost = 31;
    template <int C, class Block>
    static auto chunk(const Block& b) {
        const auto low = masked(turned<0, 4>(b.twice32(48 + 32 * C)), 0x0f);
        return both(low, masked(turned<2 * C - 4, 2 * C + 1 - 4>(b.twice32(16)), 0x10));
    }
};

struct Q2K {
    static constexpr int kFields = 16, kRegions = 2;
    static constexpr int kType = Q2_K, kBytes = 84, kBias = 0, kSub = 16, kD = 80, kO = 82, kMost = 3;
    static constexpr bool kOffset = true, kSigned = false;
    static Scales16 spread_scales(const uint8_t* b) { return Scales16(scales(b)); }
    static __m256i scales(const uint8_t* b) {
        return _mm256_cvtepu8_epi16(_mm_and_si128(load_128(b), _mm_set1_epi8(15)));
    }
    static __m256i minima(const uint8_t* b) {
        return _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(load_128(b), 4), _mm_set1_epi8(15)));
    }
    template <int C, class Block>
    static auto chunk(const Block& b) {
        return masked(turned<4 * (C % 2), 4 * (C % 2) + 2>(b.twice32(16 + 32 * (C / 2))), 0x03);
    }
};

struct Q3K {
    static constexpr int kFields = 0, kRegions = 3;
    static constexpr int kType = Q3_K, kBytes = 110, kBias = 4, kSub = 16, kD = 108, kMost = 7;
    static constexpr bool kOffset = false, kSigned = false;
    static Scales16 spread_scales(const uint8_t* b) { return Scales16(scales(b)); }
    static __m256i scales(const uint8_t* b) {
        const uint8_t* s = b + 96;
        const uint64_t low = load_as<uint64_t>(s), high = load_as<uint32_t>(s + 8);
        constexpr uint64_t four = 0x0f0f0f0f0f0f0f0f, two = 0x30303030;
        const uint64_t high_0_7 = ((high << 4) & two) | ((high << 2) & two) << 32;
        const uint64_t high_8_15 = (high & two) | ((high >> 2) & two) << 32;
        const __m128i six = _mm_set_epi64x(static_cast<int64_t>(((low >> 4) & four) | high_8_15),
                                           static_cast<int64_t>((low & four) | high_0_7));
        return _mm256_sub_epi16(_mm256_cvtepu8_epi16(six), _mm256_set1_epi16(32));
    }
    template <int C, class Block>
    static auto chunk(const Block& b) {
        const auto low = masked(turned<4 * (C % 2), 4 * (C % 2) + 2>(b.twice32(32 + 32 * (C / 2))), 0x03);
        return both(low, masked(turned<2 * C - 2, 2 * C + 1 - 2>(b.twice32(0)), 0x04));
    }
};

struct Q6K {
    static constexpr int kFields = 0, kRegions = 6;
    static constexpr int kType = Q6_K, kBytes = 210, kBias = 32, kSub = 16, kD = 208, kMost = 63;
    static constexpr bool kOffset = false, kSigned = false;
    static Scales16 spread_scales(const uint8_t* b) { return Scales16(scales(b)); }
    static __m256i scales(const uint8_t* b) { return _mm256_cvtepi8_epi16(load_128(b + 192)); }
    template <int C, class Block>
    static auto chunk(const Block& b) {
        constexpr int half = C / 2, odd = C % 2;
        const auto low = masked(turned<4 * odd, 4 * odd>(b.load64(64 * half)), 0x0f);
        return both(low, masked(turned<4 * odd - 4, 4 * odd - 2>(b.twice32(128 + 32 * half)), 0x30));
    }
};

// 16 bytes of nibbles as 32 bytes: the low ones first.
inline __m256i nibbles(const uint8_t* b) {
    const __m128i bytes = load_128(b);
    return _mm256_and_si256(_mm256_setr_m128i(bytes, _mm_srli_epi16(bytes, 4)), _mm256_set1_epi8(15));
}

inline __m256i from_book(const int8_t* book, __m256i nibbles) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(book)), nibbles);
}

struct IQ4XS {
    static constexpr int kFields = 0, kRegions = 0;
    static constexpr int kType = IQ4_XS, kBytes = 136, kBias = 0, kSub = 32, kD = 0, kMost = 127;
    static constexpr bool kOffset = false, kSigned = true;
    static Scales32 spread_scales(const uint8_t* b) { return Scales32(scales(b)); }
    static __m128i scales(const uint8_t* b) {
        const uint32_t low = load_as<uint32_t>(b + 4), high = load_as<uint16_t>(b + 2);
        // Bits 4 and 5 of word i: pair i of `high`. Nibbles of `low` to words the same way.
        const __m128i shifts = _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1);
        const __m128i pairs = _mm_mullo_epi16(_mm_set1_epi16(static_cast<short>(high)), shifts);
        const __m128i upper = _mm_and_si128(_mm_srli_epi16(pairs, 10), _mm_set1_epi16(0x30));
        const __m128i bytes = _mm_cvtsi32_si128(static_cast<int>(low));
        const __m128i both = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));
        const __m128i lower = _mm_cvtepu8_epi16(_mm_and_si128(both, _mm_set1_epi8(15)));
        return _mm_sub_epi16(_mm_or_si128(upper, lower), _mm_set1_epi16(32));
    }
    template <int C, class Block>
    static auto chunk(const Block& b) {
        return join(from_book(iq4_book(), nibbles(b.bytes + 8 + 32 * C)),
                    from_book(iq4_book(), nibbles(b.bytes + 24 + 32 * C)));
    }
};

// --- blocks of 32

struct Plain {  // d as float16 at the start of the block, no offset
    static constexpr bool kOffset = false, kSigned = false;
    static constexpr int kSub = 32;
    // Factors of block(0) to block(count - 1), as `halves`.
    template <class Block>
    static __m256 d(const Block& block, int count) {
        return halves(block, 0, count);
    }
};

// The 32 bits of `high` as bits 4 of 32 bytes.
inline __m256i fifth_bits(uint32_t high) {
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(high)),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16));
}

struct Q40 : Plain {
    static constexpr int kType = Q4_0, kBytes = 18, kBias = 8, kMost = 15;
    static __m256i values(const uint8_t* b) { return nibbles(b + 2); }
};

struct Q41 : Plain {
    static constexpr int kType = Q4_1, kBytes = 20, kBias = 0, kMost = 15;
    static constexpr bool kOffset = true;
    static __m256i values(const uint8_t* b) { return nibbles(b + 4); }
};

struct Q50 : Plain {
    static constexpr int kType = Q5_0, kBytes = 22, kBias = 16, kMost = 31;
    static __m256i values(const uint8_t* b) {
        return _mm256_or_si256(nibbles(b + 6), fifth_bits(load_as<uint32_t>(b + 2)));
    }
};

struct Q51 : Plain {
    static constexpr int kType = Q5_1, kBytes = 24, kBias = 0, kMost = 31;
    static constexpr bool kOffset = true;
    static __m256i values(const uint8_t* b) {
        return _mm256_or_si256(nibbles(b + 8), fifth_bits(load_as<uint32_t>(b + 4)));
    }
};

struct Q80 : Plain {
    static constexpr int kType = Q8_0, kBytes = 34, kBias = 0, kMost = 128;
    static constexpr bool kSigned = true;
    static __m256i values(const uint8_t* b) { return load_256(b + 2); }
};

struct IQ4NL : Plain {
    static constexpr int kType = IQ4_NL, kBytes = 18, kBias = 0, kMost = 127;
    static constexpr bool kSigned = true;
    static __m256i values(const uint8_t* b) { return from_book(iq4_book(), nibbles(b + 2)); }
};

struct MXF4 : Plain {
    static constexpr int kType = MXFP4, kBytes = 17, kBias = 0, kMost = 12;
    static constexpr bool kSigned = true;
    static __m256i values(const uint8_t* b) { return from_book(fp4_book(), nibbles(b + 1)); }
    template <class Block>
    static __m256 d(const Block& block, int count) {
        alignas(32) float factors[8] = {};
        for (int i = 0; i < count; ++i) {
            const uint32_t e = *block(i);
            factors[i] = from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        }
        return _mm256_load_ps(factors);
    }
};

}  // namespace spark::layouts

#endif
