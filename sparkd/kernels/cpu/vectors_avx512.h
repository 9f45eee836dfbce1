// 64 bytes in one 512-bit register, and sums of their products. vectors_avx2.h has the same names for two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
// 32-bit lanes turned right, those of the lower half by LOW bits, of the upper by HIGH: for bit fields of bytes, which
// the caller masks.
template <int LOW, int HIGH>
inline Bytes turned(Bytes a) {
    constexpr int low = (LOW + 32) % 32, high = (HIGH + 32) % 32;
    const __m512i counts = _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
    return {_mm512_rorv_epi32(a.v, counts)};
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
        const __m512i lane = _mm512_inserti64x4(_mm512_set1_epi16(2 * C), _mm256_set1_epi16(2 * C + 1), 1);
        return {_mm512_permutexvar_epi16(lane, v)};
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

}  // namespace spark::vectors
