// The float32 arithmetic of sparkd: docs/arithmetic.md defines it, this header says the same in C++ and CUDA C++.
//
// Taken as it is by g++, nvcc and NVRTC: no standard library, no exceptions, no libm call but fused multiply-add and
// square root. Compile with -ffp-contract=off (nvcc, NVRTC: -fmad=false -ftz=false -prec-div=true -prec-sqrt=true).
#pragma once

#if defined(__CUDACC_RTC__)
#define SPARK_FN __device__ inline
namespace spark {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace spark
#else
#include <stdint.h>
#if defined(__CUDACC__)
#define SPARK_FN __host__ __device__ inline
#else
#define SPARK_FN inline
#endif
#endif

namespace spark {

// Bits of a float32 and back.

SPARK_FN uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    return u;
#endif
}

SPARK_FN float from_bits(uint32_t u) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(u);
#else
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
#endif
}

SPARK_FN float canonical_nan() { return from_bits(0x7fc00000u); }
SPARK_FN bool is_finite(float x) { return (bits_of(x) & 0x7fffffffu) < 0x7f800000u; }

// a*b + c, rounded once.
SPARK_FN float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

SPARK_FN float square_root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

// Nearest integer, ties to even, for |x| <= 2^22: the sum has no bits left below 1.
SPARK_FN float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// Larger of two by compare and select: `b` when either is NaN.
SPARK_FN float larger(float a, float b) { return a > b ? a : b; }

// Conversions.

SPARK_FN float f16_to_f32(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    // Denormals (common as block scales) by way of an integer: a denormal float32 operand would cost a microcode assist.
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    uint32_t value = magnitude < 0x0400u ? bits_of(small) : (magnitude << 13) + (112u << 23);
    value = magnitude == 0x7c00u ? 0x7f800000u : value;
    return from_bits(magnitude > 0x7c00u ? 0x7fc00000u : sign | value);
}

// Nearest float16, ties to even; beyond +-65504 (infinities too) the largest finite value; NaN becomes 0x7e00.
SPARK_FN uint16_t f32_to_f16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t magnitude = u & 0x7fffffffu;
    const uint32_t sign = (u >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7e00u;
    uint32_t h;
    if (magnitude >= 0x477fe000u) {  // 65504
        h = 0x7bffu;
    } else if (magnitude < 0x38800000u) {  // 2^-14: the step of 0.5 + x is 2^-24, the step of float16 denormals
        h = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        h = ((magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    }
    return static_cast<uint16_t>(sign | h);
}

SPARK_FN float bf16_to_f32(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

// Functions.

// e^x within 1 ulp. Above 88 as at 88; below -87.33654 (where e^x would be denormal) +0; NaN stays NaN.
SPARK_FN float exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    const float clamped = x < -0x1.5d589ep+6f ? -0x1.5d589ep+6f : x;
    const float n = round_even(clamped * 0x1.715476p+0f);
    float r = fma(n, -0x1.62e430p-1f, clamped);  // ln 2 = high + low; this step is exact
    r = fma(n, 0x1.05c610p-29f, r);
    float p = 0x1.6a4960p-10f;
    p = fma(p, r, 0x1.1239a0p-7f);
    p = fma(p, r, 0x1.5558b4p-5f);
    p = fma(p, r, 0x1.555492p-3f);
    p = fma(p, r, 0x1.fffffcp-2f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    // n is in -126 .. 127. A NaN is turned to 0 before it becomes an integer; p is NaN then, and so is the result.
    const int32_t exponent = static_cast<int32_t>(n == n ? n : 0.0f);
    const float result = p * from_bits(static_cast<uint32_t>(exponent + 127) << 23);
    return x < -0x1.5d589ep+6f ? 0.0f : result;
}

SPARK_FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

SPARK_FN float silu(float x) { return x * sigmoid(x); }

// ln(1 + u) for 0 <= u <= 1: 2 atanh(s), s = u / (2 + u), by an odd polynomial.
SPARK_FN float log1p_unit(float u) {
    const float s = u / (2.0f + u);
    const float z = s * s;
    float q = 0x1.f090c2p-4f;
    q = fma(q, z, 0x1.b72ad6p-4f);
    q = fma(q, z, 0x1.250514p-3f);
    q = fma(q, z, 0x1.9996d8p-3f);
    q = fma(q, z, 0x1.555558p-2f);
    const float twice = s + s;
    return fma(twice * z, q, twice);
}

SPARK_FN float softplus(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    return larger(x, 0.0f) + log1p_unit(exp(-magnitude));
}

// Sums over float vectors: element i to partial i mod 32, then a halving tree.

SPARK_FN float halving_tree(float* partial, int n) {
    for (int step = n / 2; step > 0; step /= 2)
        for (int j = 0; j < step; ++j) partial[j] = partial[j] + partial[j + step];
    return partial[0];
}

SPARK_FN float dot32(const float* x, const float* w, int n) {
    float partial[32];
    for (int j = 0; j < 32; ++j) partial[j] = 0.0f;
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 32; ++j) partial[j] = fma(x[i + j], w[i + j], partial[j]);
    for (int j = 0; i + j < n; ++j) partial[j] = fma(x[i + j], w[i + j], partial[j]);
    return halving_tree(partial, 32);
}

// Factor of an RMS norm over n elements; the norm is (x * factor) * weight.
SPARK_FN float rms_factor(const float* x, int n, float eps) {
    return 1.0f / square_root(dot32(x, x, n) / static_cast<float>(n) + eps);
}

// Factor of an l2 norm; the norm is x * factor.
SPARK_FN float l2_factor(const float* x, int n, float eps) { return 1.0f / square_root(dot32(x, x, n) + eps); }

// Attention: a softmax that is not finished is (m, l, o[n]): the largest score, the sum of e^(score - m), the sum of
// e^(score - m) * v.

// One more position, in order; m is the largest score of the whole page.
SPARK_FN void accumulate(float score, float m, const float* v, int n, float& l, float* o) {
    const float e = exp(score - m);
    l = l + e;
    for (int i = 0; i < n; ++i) o[i] = fma(e, v[i], o[i]);
}

// (m1, l1, o1) becomes the merge of itself and the later (m2, l2, o2).
SPARK_FN void merge(float& m1, float& l1, float* o1, float m2, float l2, const float* o2, int n) {
    const float m = larger(m1, m2);
    const float c1 = exp(m1 - m);
    const float c2 = exp(m2 - m);
    l1 = fma(l2, c2, l1 * c1);
    for (int i = 0; i < n; ++i) o1[i] = fma(o2[i], c2, o1[i] * c1);
    m1 = m;
}

}  // namespace spark
