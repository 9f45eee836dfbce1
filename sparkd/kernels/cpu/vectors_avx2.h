// 64 bytes in two 256-bit registers, and sums of their products: the names of vectors_avx512.h. Where the processor has
// AVX-VNNI, products of bytes are added up by it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/vectors_256.h"

namespace spark::vectors {

#if defined(__AVXVNNI__)
#define SPARK_VNNI 1
constexpr const char* kPath = "avx-vnni";
#else
#define SPARK_VNNI 0
constexpr const char* kPath = "avx2";
#endif

struct Bytes {
    __m256i low, high;
};
using Sum = __m256i;  // int32 lanes that add up to one sum

inline __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Bytes load64(const void* p) { return {load32(p), load32(static_cast<const uint8_t*>(p) + 32)}; }
// The same 32 bytes in both halves.
inline Bytes twice32(const void* p) { return {load32(p), load32(p)}; }
inline Bytes join(__m256i low, __m256i high) { return {low, high}; }
inline Bytes both(Bytes a, Bytes b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Bytes masked(Bytes a, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_and_si256(a.low, m), _mm256_and_si256(a.high, m)};
}
template <int BITS>
inline __m256i shifted(__m256i v) {
    if constexpr (BITS >= 0) return _mm256_srli_epi32(v, BITS);
    return _mm256_slli_epi32(v, -BITS);
}
// Lanes of the lower half shifted right by LOW bits, of the upper by HIGH (left, where negative): for bit fields of
// bytes, which the caller masks.
template <int LOW, int HIGH>
inline Bytes turned(Bytes a) {
    return {shifted<LOW>(a.low), shifted<HIGH>(a.high)};
}

inline Sum no_sum() { return _mm256_setzero_si256(); }
inline Sum widened(__m256i lanes) { return lanes; }

// sum + a * b over the int16 halves of each lane.
inline __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
#if SPARK_VNNI
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

// sum += u * x * scale for unsigned u <= 127; `scale` has one int16 for every two bytes.
inline Sum add_scaled(Sum sum, Bytes u, Bytes x, Bytes scale) {
    sum = add_pairs(sum, _mm256_maddubs_epi16(u.low, x.low), scale.low);
    return add_pairs(sum, _mm256_maddubs_epi16(u.high, x.high), scale.high);
}
// The same for signed w >= -127: its sign goes to x.
inline Sum add_scaled_signed(Sum sum, Bytes w, Bytes x, Bytes scale) {
    const Bytes turned_x = {_mm256_sign_epi8(x.low, w.low), _mm256_sign_epi8(x.high, w.high)};
    return add_scaled(sum, {_mm256_abs_epi8(w.low), _mm256_abs_epi8(w.high)}, turned_x, scale);
}

// Scales of a block of 256: chunk<C> has those of elements 64 C .. 64 C + 63, one int16 for every two elements.
struct Scales32 {  // eight, one per 32 elements
    __m256i v;
    explicit Scales32(__m128i scales) : v(_mm256_broadcastsi128_si256(scales)) {}
    template <int C>
    Bytes chunk() const {
        constexpr short low = 4 * C | (4 * C + 1) << 8, high = (4 * C + 2) | (4 * C + 3) << 8;
        return {_mm256_shuffle_epi8(v, _mm256_set1_epi16(low)), _mm256_shuffle_epi8(v, _mm256_set1_epi16(high))};
    }
};
struct Scales32Bytes {  // the same from unsigned bytes
    __m256i v;
    explicit Scales32Bytes(uint64_t scales) : v(_mm256_set1_epi64x(static_cast<int64_t>(scales))) {}
    template <int C>
    Bytes chunk() const {
        constexpr auto low = static_cast<short>(0x8000 | 2 * C), high = static_cast<short>(0x8000 | (2 * C + 1));
        return {_mm256_shuffle_epi8(v, _mm256_set1_epi16(low)), _mm256_shuffle_epi8(v, _mm256_set1_epi16(high))};
    }
};
struct Scales16 {  // sixteen, one per 16 elements
    __m256i low, high;
    explicit Scales16(__m256i scales)
        : low(_mm256_permute2x128_si256(scales, scales, 0x00)), high(_mm256_permute2x128_si256(scales, scales, 0x11)) {}
    template <int C>
    Bytes chunk() const {
        const __m256i v = C < 2 ? low : high;
        return {pair<4 * C % 8>(v), pair<4 * C % 8 + 2>(v)};
    }

  private:
    template <int S>
    static __m256i pair(__m256i v) {
        constexpr short first = 2 * S | (2 * S + 1) << 8, second = (2 * S + 2) | (2 * S + 3) << 8;
        return _mm256_shuffle_epi8(v, _mm256_setr_m128i(_mm_set1_epi16(first), _mm_set1_epi16(second)));
    }
};

// Lane i: the sum of all lanes of v[i].
inline __m256i eight_sums(const Sum* v) { return eight_sums_256(v); }

#if SPARK_VNNI

// Sums over each four bytes of u * x.
inline __m256i dot_unsigned(__m256i u, __m256i x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), u, x); }

// Of signed w the instruction sees w + kSignedBias.
constexpr int kSignedBias = 128;
inline __m256i dot_signed(__m256i w, __m256i x) {
    return dot_unsigned(_mm256_xor_si256(w, _mm256_set1_epi8(-128)), x);
}

#else

// Sums over each four bytes of u * x, u <= 128.
inline __m256i dot_unsigned(__m256i u, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1));
}

// The instruction sees signed w as it is, its sign having gone to x (which is never -128; w may be).
constexpr int kSignedBias = 0;
inline __m256i dot_signed(__m256i w, __m256i x) {
    return dot_unsigned(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

#endif

// --- floats

constexpr int kLanes = 8;
using Floats = __m256;

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats everywhere(float x) { return _mm256_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
// As `larger`, lane by lane.
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
// Lanes for which something holds.
using Lanes = __m256;
inline Lanes below(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Lanes within(Floats begin, Floats end, Floats x) { return _mm256_andnot_ps(below(x, begin), below(x, end)); }
inline Floats select(Lanes lanes, Floats a, Floats b) { return _mm256_blendv_ps(b, a, lanes); }
inline Floats from_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }

// The 32 partials of a dot32, eight in each register.
struct Partials {
    Floats v[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    void add(const Floats* x, const Floats* w) {
        for (int k = 0; k < 4; ++k) v[k] = multiply_add(x[k], w[k], v[k]);
    }
    // The first two steps of the halving tree.
    Floats folded() const { return _mm256_add_ps(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3])); }
};

// Lane i: what the further steps of the halving tree (4, 2, 1) make of v[i].
inline Floats trees(const Floats* v) {
    Floats a[4], b[2];
    for (int i = 0; i < 4; ++i)  // [v[i] | v[i + 4]], four partials each
        a[i] = add(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 2; ++i)  // two partials of a[i], two of a[i + 2] in each half
        b[i] = add(_mm256_shuffle_ps(a[i], a[i + 2], 0x44), _mm256_shuffle_ps(a[i], a[i + 2], 0xee));
    // In each half a[0], a[2], a[1], a[3].
    const Floats sums = add(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
    return _mm256_permute_ps(sums, 0xd8);
}

}  // namespace spark::vectors
