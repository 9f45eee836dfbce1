// 64 bytes in one 512-bit register, and sums of their products. vectors_avx2.h has the same names for two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/vectors_256.h"

namespace spark::vectors {

constexpr const char* kPath = "avx512-vnni";

struct Bytes {
    __m512i v;
};
using Sum = __m512i;  // int32 lanes that add up to one sum

inline Bytes load64(const void* p) { return {_mm512_loadu_si512(p)}; }
// The same 32 bytes in both halves.
inline Bytes twice32(const void* p) {
    return {_mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline Bytes join(__m256i low, __m256i high) { return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)}; }
inline Bytes both(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Bytes masked(Bytes a, uint8_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
// LOW in all 64-bit lanes of the lower half, HIGH in those of the upper.
template <int64_t LOW, int64_t HIGH>
inline __m512i halves_of() {
    return _mm512_set_epi64(HIGH, HIGH, HIGH, HIGH, LOW, LOW, LOW, LOW);
}
// 32-bit lanes turned right, those of the lower half by LOW bits, of the upper by HIGH: for bit fields of bytes, which
// the caller masks.
template <int LOW, int HIGH>
inline Bytes turned(Bytes a) {
    constexpr int low = (LOW + 32) % 32, high = (HIGH + 32) % 32;
    if constexpr (low == high) return {_mm512_ror_epi32(a.v, low)};
    constexpr int64_t k = 0x0000000100000001;
    return {_mm512_rorv_epi32(a.v, halves_of<low * k, high * k>())};
}

inline Sum no_sum() { return _mm512_setzero_si512(); }
inline Sum widened(__m256i lanes) { return _mm512_zextsi256_si512(lanes); }

// sum += u * x * scale for unsigned u <= 127; `scale` has one int16 for every two bytes.
inline Sum add_scaled(Sum sum, Bytes u, Bytes x, Bytes scale) {
    return _mm512_dpwssd_epi32(sum, _mm512_maddubs_epi16(u.v, x.v), scale.v);
}
// The same for signed w >= -127: its sign goes to x.
inline Sum add_scaled_signed(Sum sum, Bytes w, Bytes x, Bytes scale) {
    const __m512i turned_x = _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), x.v);
    return add_scaled(sum, {_mm512_abs_epi8(w.v)}, {turned_x}, scale);
}

// Scales of a block of 256: chunk<C> has those of elements 64 C .. 64 C + 63, one int16 for every two elements.
struct Scales32 {  // eight, one per 32 elements
    __m512i v;
    explicit Scales32(__m128i scales) : v(_mm512_broadcast_i32x4(scales)) {}
    template <int C>
    Bytes chunk() const {
        constexpr int64_t k = 0x0202020202020202, low = 0x0100010001000100;
        return {_mm512_shuffle_epi8(v, halves_of<2 * C * k + low, (2 * C + 1) * k + low>())};
    }
};
struct Scales32Bytes {  // the same from unsigned bytes
    __m512i v;
    explicit Scales32Bytes(uint64_t scales) : v(_mm512_set1_epi64(static_cast<int64_t>(scales))) {}
    template <int C>
    Bytes chunk() const {
        constexpr int64_t k = 0x0001000100010001, none = static_cast<int64_t>(0x8000800080008000);
        return {_mm512_shuffle_epi8(v, halves_of<(none | 2 * C * k), (none | (2 * C + 1) * k)>())};
    }
};
struct Scales16 {  // sixteen, one per 16 elements
    __m512i v;
    explicit Scales16(__m256i scales) : v(_mm512_broadcast_i64x4(scales)) {}
    template <int C>
    Bytes chunk() const {
        constexpr int64_t k = 0x0001000100010001;
        const __m512i lane = _mm512_set_epi64((4 * C + 3) * k, (4 * C + 3) * k, (4 * C + 2) * k, (4 * C + 2) * k,
                                              (4 * C + 1) * k, (4 * C + 1) * k, 4 * C * k, 4 * C * k);
        return {_mm512_permutexvar_epi16(lane, v)};
    }
};

// Lane i: the sum of all lanes of v[i].
inline __m256i eight_sums(const Sum* v) {
    const auto pair = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const auto quad = [&](const Sum* s) {
        const __m512i a = pair(s[0], s[1]), b = pair(s[2], s[3]);
        return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    };
    // In each quarter one part of the sums of four.
    const __m512i low = quad(v), high = quad(v + 4);
    const __m512i halves =
        _mm512_add_epi32(_mm512_shuffle_i64x2(low, high, 0x44), _mm512_shuffle_i64x2(low, high, 0xee));
    const __m256i a = _mm512_castsi512_si256(halves), b = _mm512_extracti64x4_epi64(halves, 1);
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// Sums over each four bytes of u * x.
inline __m256i dot_unsigned(__m256i u, __m256i x) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, x); }

// Of signed w the instruction sees w + kSignedBias.
constexpr int kSignedBias = 128;
inline __m256i dot_signed(__m256i w, __m256i x) {
    return dot_unsigned(_mm256_xor_si256(w, _mm256_set1_epi8(-128)), x);
}

// --- floats

constexpr int kLanes = 16;
using Floats = __m512;

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats everywhere(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
// As `larger`, lane by lane.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
// Lanes for which something holds.
using Lanes = __mmask16;
inline Lanes below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Lanes within(Floats begin, Floats end, Floats x) {
    return static_cast<Lanes>(below(x, end) & ~below(x, begin));
}
inline Floats select(Lanes lanes, Floats a, Floats b) { return _mm512_mask_blend_ps(lanes, b, a); }
inline Floats from_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }

// The 32 partials of a dot32, those of lanes j and j + 16 in registers 0 and 1.
struct Partials {
    Floats v[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    void add(const Floats* x, const Floats* w) {
        for (int k = 0; k < 2; ++k) v[k] = multiply_add(x[k], w[k], v[k]);
    }
    // The first step of the halving tree.
    Floats folded() const { return _mm512_add_ps(v[0], v[1]); }
};

// Lane i: what the further steps of the halving tree (8, 4, 2, 1) make of v[i].
inline Floats trees(const Floats* v) {
    Floats a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {  // [v[i] | v[i + 8]], eight partials each
        a[i] = add(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    }
    for (int i = 0; i < 4; ++i) {  // four partials of i, i + 8, i + 4, i + 12
        b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    }
    for (int i = 0; i < 2; ++i)  // two partials of b[i], two of b[i + 2] in each quarter
        c[i] = add(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    // In each quarter b[0], b[2], b[1], b[3].
    const Floats sums = add(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, sums);
}

}  // namespace spark::vectors
