// The weight formats of the float class: eight values at a time, and whole rows.
//
// Of the formats with blocks, eight values in a row have a factor of their own and come from a code book: d times a small
// number is exact in float32, so the order of these products does not matter.
#pragma once

#include "arithmetic.h"
#include "formats.h"
#include "grids.h"

namespace spark {

// Eight values: byte j of `magnitudes` times `factor`, negative where bit j of `signs` is set.
struct Eight {
    float factor;
    uint64_t magnitudes;
    uint32_t signs;
};

SPARK_FN float value_of(const Eight& eight, int j) {
    const float magnitude = static_cast<float>(static_cast<int32_t>((eight.magnitudes >> (8 * j)) & 255u)) * eight.factor;
    return (eight.signs >> j) & 1u ? -magnitude : magnitude;
}

// Seven signs, and an eighth that makes the number of negative values even.
SPARK_FN uint32_t even_signs(uint32_t seven) {
    uint32_t odd = seven ^ (seven >> 4);
    odd = odd ^ (odd >> 2);
    odd = odd ^ (odd >> 1);
    return seven | (odd & 1u) << 7;
}

SPARK_FN float half_and(uint32_t scale) { return 0.5f + static_cast<float>(static_cast<int32_t>(scale)); }

SPARK_FN uint32_t nibble_of(uint32_t byte, int odd) { return (byte >> (4 * odd)) & 15u; }

// Eight n (0 .. block / 8 - 1) of the block at b, whose factor is d (the formats with blocks of 256: load_f16(b)).

SPARK_FN Eight eight_iq2_xxs(float d, const uint8_t* b, int n) {
    const uint8_t* group = b + 2 + 8 * (n / 4);
    const uint32_t a = load_u32(group + 4);
    return {d * half_and(a >> 28) * 0.25f, iq2_xxs_grid()[group[n % 4]], even_signs((a >> (7 * (n % 4))) & 127u)};
}

SPARK_FN Eight eight_iq2_xs(float d, const uint8_t* b, int n) {
    const uint32_t w = load_u16(b + 2 + 2 * n);
    const uint32_t scale = nibble_of(b[66 + n / 4], n % 4 / 2);
    return {d * half_and(scale) * 0.25f, iq2_xs_grid()[w & 511u], even_signs(w >> 9)};
}

SPARK_FN Eight eight_iq2_s(float d, const uint8_t* b, int n) {
    const uint32_t index = b[2 + n] | ((static_cast<uint32_t>(b[66 + n / 4]) >> (2 * (n % 4))) & 3u) << 8;
    const uint32_t scale = nibble_of(b[74 + n / 4], n % 4 / 2);
    return {d * half_and(scale) * 0.25f, iq2_s_grid()[index], b[34 + n]};
}

SPARK_FN uint64_t two_fours(uint32_t first, uint32_t second) { return first | static_cast<uint64_t>(second) << 32; }

SPARK_FN Eight eight_iq3_xxs(float d, const uint8_t* b, int n) {
    const uint32_t* grid = iq3_xxs_grid();
    const uint32_t a = load_u32(b + 66 + 4 * (n / 4));
    return {d * half_and(a >> 28) * 0.5f, two_fours(grid[b[2 + 2 * n]], grid[b[3 + 2 * n]]),
            even_signs((a >> (7 * (n % 4))) & 127u)};
}

SPARK_FN Eight eight_iq3_s(float d, const uint8_t* b, int n) {
    const uint32_t* grid = iq3_s_grid();
    const uint32_t high = static_cast<uint32_t>(b[66 + n / 4]) >> (2 * (n % 4));
    const uint32_t first = b[2 + 2 * n] | (high & 1u) << 8;
    const uint32_t second = b[3 + 2 * n] | (high & 2u) << 7;
    const uint32_t scale = nibble_of(b[106 + n / 8], n / 4 % 2);
    return {d * static_cast<float>(static_cast<int32_t>(1u + 2u * scale)), two_fours(grid[first], grid[second]), b[74 + n]};
}

// Half an unsigned E4M3 number; the bit above it is ignored, and what would be a NaN is 0.
SPARK_FN float half_e4m3(uint32_t x) {
    if (x == 0x7fu) return 0.0f;
    const uint32_t exponent = (x >> 3) & 15u, mantissa = x & 7u;
    return exponent == 0 ? static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-10f
                         : from_bits((exponent + 119u) << 23 | mantissa << 20);
}

// Twice the magnitudes of E2M1: bits 0-2 of the eight nibbles.
SPARK_FN Eight eight_nvfp4(float, const uint8_t* b, int n) {
    const uint8_t* nibbles = b + 4 + 8 * (n / 2);
    Eight out = {half_e4m3(b[n / 2]), 0, 0};
    for (int j = 0; j < 8; ++j) {
        const uint32_t nibble = nibble_of(nibbles[j], n % 2), code = nibble & 7u;
        const uint32_t magnitude = code < 5 ? code : code == 5 ? 6u : code == 6 ? 8u : 12u;
        out.magnitudes |= static_cast<uint64_t>(magnitude) << (8 * j);
        out.signs |= (nibble > 8 ? 1u : 0u) << j;  // -0 is 0
    }
    return out;
}

SPARK_FN float no_factor(const uint8_t*) { return 0.0f; }

template <float (*FACTOR)(const uint8_t*), Eight (*EIGHT)(float, const uint8_t*, int)>
SPARK_FN void dequantise_eights(const Format& format, const uint8_t* row, int columns, float* out) {
    for (int i = 0; i < columns / format.block; ++i) {
        const uint8_t* b = row + i * format.bytes;
        const float d = FACTOR(b);
        for (int n = 0; n < format.block / 8; ++n) {
            const Eight eight = EIGHT(d, b, n);
            for (int j = 0; j < 8; ++j) out[i * format.block + 8 * n + j] = value_of(eight, j);
        }
    }
}

// A row of a type of the float class.
SPARK_FN void dequantise_floats(const Format& format, const uint8_t* row, int columns, float* out) {
    switch (format.id) {
        case F32:
            for (int e = 0; e < columns; ++e) out[e] = from_bits(load_u32(row + 4 * e));
            return;
        case F16:
            for (int e = 0; e < columns; ++e) out[e] = load_f16(row + 2 * e);
            return;
        case BF16:
            for (int e = 0; e < columns; ++e) out[e] = bf16_to_f32(static_cast<uint16_t>(load_u16(row + 2 * e)));
            return;
        case IQ2_XXS: return dequantise_eights<load_f16, eight_iq2_xxs>(format, row, columns, out);
        case IQ2_XS: return dequantise_eights<load_f16, eight_iq2_xs>(format, row, columns, out);
        case IQ2_S: return dequantise_eights<load_f16, eight_iq2_s>(format, row, columns, out);
        case IQ3_XXS: return dequantise_eights<load_f16, eight_iq3_xxs>(format, row, columns, out);
        case IQ3_S: return dequantise_eights<load_f16, eight_iq3_s>(format, row, columns, out);
        case NVFP4: return dequantise_eights<no_factor, eight_nvfp4>(format, row, columns, out);
    }
}

}  // namespace spark
