// Block formats of GGUF weights: one unpacker per type, products of rows. (formats.h has the table, codebooks.h the
// types of the float class.)
//
// Every format of an integer class is, per block, integers q with small integer scales and (some) minima per
// sub-block, and one or two float32 factors:
//
//     w[e] = (d * scale[e / sub]) * q[e] + offset * min[e / sub]
//
// docs/arithmetic.md, "Weight formats" gives the layouts and "Products" the order of every rounding.
#pragma once

#include "arithmetic.h"
#include "codebooks.h"
#include "formats.h"

// Keeps g++ from unrolling a short loop completely, after which it finds no vectors in it (a row: 2000 ns, not 540).
#if defined(__GNUC__) && !defined(__CUDACC__) && !defined(__clang__)
#define SPARK_ROLLED _Pragma("GCC unroll 1")
#else
#define SPARK_ROLLED
#endif

namespace spark {

// A weight row of an integer class, unpacked once and used for several activation rows. The caller owns the memory.
struct IntRow {
    const Format* format;
    int columns;
    int8_t* q;       // [columns]
    int16_t* scale;  // [columns / sub]
    int16_t* min;    // [columns / sub], formats with an offset only
    float* d;        // [columns / block]
    float* offset;   // [columns / block], formats with an offset only
};

// Bytes that an IntRow of `columns` (a multiple of 32) needs, for any type.
SPARK_FN int64_t int_row_bytes(int columns) { return columns + 4 * (columns / 16) + 8 * (columns / 32); }

// Lays an IntRow out in `memory` (int_row_bytes(columns) bytes, aligned to 4).
SPARK_FN IntRow int_row(void* memory, int columns) {
    IntRow row = {};
    row.columns = columns;
    row.d = static_cast<float*>(memory);
    row.offset = row.d + columns / 32;
    row.scale = reinterpret_cast<int16_t*>(row.offset + columns / 32);
    row.min = row.scale + columns / 16;
    row.q = reinterpret_cast<int8_t*>(row.min + columns / 16);
    return row;
}

// Unpackers, one per type. A block's q [block], scale and min [block / sub], d and offset; a format without minima
// leaves min and offset alone.
struct Block {
    int8_t* q;
    int16_t* scale;
    int16_t* min;
    float* d;
    float* offset;
};

// 32 nibbles in 16 bytes: the low ones first.
SPARK_FN void unpack_nibbles(const uint8_t* __restrict__ b, int bias, int8_t* __restrict__ q) {
    SPARK_ROLLED
    for (int i = 0; i < 16; ++i) {
        q[i] = static_cast<int8_t>((b[i] & 15) - bias);
        q[i + 16] = static_cast<int8_t>((b[i] >> 4) - bias);
    }
}

// The same with the 32 bits of `high` as fifth bits.
SPARK_FN void unpack_5_bits(const uint8_t* __restrict__ b, uint32_t high, int bias, int8_t* __restrict__ q) {
    SPARK_ROLLED
    for (int i = 0; i < 16; ++i) {
        const int h0 = static_cast<int>((high >> i) & 1u) << 4;
        const int h1 = static_cast<int>((high >> (i + 16)) & 1u) << 4;
        q[i] = static_cast<int8_t>(((b[i] & 15) | h0) - bias);
        q[i + 16] = static_cast<int8_t>(((b[i] >> 4) | h1) - bias);
    }
}

// The same through a code book of 16 values.
SPARK_FN void unpack_book(const uint8_t* __restrict__ b, const int8_t* __restrict__ book, int8_t* __restrict__ q) {
    SPARK_ROLLED
    for (int i = 0; i < 16; ++i) {
        q[i] = book[b[i] & 15];
        q[i + 16] = book[b[i] >> 4];
    }
}

// Values of IQ4_NL and IQ4_XS.
SPARK_FN const int8_t* iq4_book() {
    static constexpr int8_t book[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return book;
}

// Twice the E2M1 values of MXFP4.
SPARK_FN const int8_t* fp4_book() {
    static constexpr int8_t book[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return book;
}

SPARK_FN void unpack_q4_0(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    out.scale[0] = 1;
    unpack_nibbles(b + 2, 8, out.q);
}

SPARK_FN void unpack_q4_1(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    *out.offset = load_f16(b + 2);
    out.scale[0] = 1;
    out.min[0] = 1;
    unpack_nibbles(b + 4, 0, out.q);
}

SPARK_FN void unpack_q5_0(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    out.scale[0] = 1;
    unpack_5_bits(b + 6, load_u32(b + 2), 16, out.q);
}

SPARK_FN void unpack_q5_1(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    *out.offset = load_f16(b + 2);
    out.scale[0] = 1;
    out.min[0] = 1;
    unpack_5_bits(b + 8, load_u32(b + 4), 0, out.q);
}

SPARK_FN void unpack_q8_0(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    out.scale[0] = 1;
    for (int i = 0; i < 32; ++i) out.q[i] = static_cast<int8_t>(b[2 + i]);
}

SPARK_FN void unpack_iq4_nl(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    out.scale[0] = 1;
    unpack_book(b + 2, iq4_book(), out.q);
}

SPARK_FN void unpack_mxfp4(const uint8_t* b, Block out) {
    // 2^(E - 128); the first two are denormal.
    *out.d = from_bits(b[0] < 2 ? 0x00200000u << b[0] : static_cast<uint32_t>(b[0] - 1) << 23);
    out.scale[0] = 1;
    unpack_book(b + 1, fp4_book(), out.q);
}

SPARK_FN void unpack_q2_k(const uint8_t* __restrict__ b, Block out) {
    *out.d = load_f16(b + 80);
    *out.offset = -load_f16(b + 82);
    for (int j = 0; j < 16; ++j) {
        out.scale[j] = b[j] & 15;
        out.min[j] = b[j] >> 4;
    }
    int8_t* __restrict__ q = out.q;
    for (int half = 0; half < 2; ++half)
        for (int g = 0; g < 4; ++g)
            for (int l = 0; l < 32; ++l)
                q[128 * half + 32 * g + l] = static_cast<int8_t>((b[16 + 32 * half + l] >> (2 * g)) & 3);
}

SPARK_FN void unpack_q3_k(const uint8_t* __restrict__ b, Block out) {
    *out.d = load_f16(b + 108);
    const uint8_t* s = b + 96;
    for (int j = 0; j < 16; ++j) {
        const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
        const int high = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
        out.scale[j] = static_cast<int16_t>((low | high << 4) - 32);
    }
    int8_t* __restrict__ q = out.q;
    for (int half = 0; half < 2; ++half)
        for (int g = 0; g < 4; ++g)
            for (int l = 0; l < 32; ++l) {
                const int low = (b[32 + 32 * half + l] >> (2 * g)) & 3;
                const int high = (b[l] >> (4 * half + g)) & 1;
                q[128 * half + 32 * g + l] = static_cast<int8_t>(low + 4 * high - 4);
            }
}

// Eight 6-bit scales and minima in 12 bytes.
SPARK_FN void unpack_6_bit_scales(const uint8_t* s, int16_t* scale, int16_t* min) {
    for (int j = 0; j < 4; ++j) {
        scale[j] = s[j] & 63;
        min[j] = s[j + 4] & 63;
        scale[j + 4] = static_cast<int16_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
        min[j + 4] = static_cast<int16_t>((s[j + 8] >> 4) | (s[j + 4] >> 6) << 4);
    }
}

SPARK_FN void unpack_q4_k(const uint8_t* __restrict__ b, Block out) {
    *out.d = load_f16(b);
    *out.offset = -load_f16(b + 2);
    unpack_6_bit_scales(b + 4, out.scale, out.min);
    int8_t* __restrict__ q = out.q;
    for (int pair = 0; pair < 4; ++pair)
        for (int l = 0; l < 32; ++l) {
            q[64 * pair + l] = static_cast<int8_t>(b[16 + 32 * pair + l] & 15);
            q[64 * pair + 32 + l] = static_cast<int8_t>(b[16 + 32 * pair + l] >> 4);
        }
}

SPARK_FN void unpack_q5_k(const uint8_t* __restrict__ b, Block out) {
    *out.d = load_f16(b);
    *out.offset = -load_f16(b + 2);
    unpack_6_bit_scales(b + 4, out.scale, out.min);
    int8_t* __restrict__ q = out.q;
    for (int pair = 0; pair < 4; ++pair)
        for (int l = 0; l < 32; ++l) {
            const int low = b[48 + 32 * pair + l];
            const int high = b[16 + l] >> (2 * pair);
            q[64 * pair + l] = static_cast<int8_t>((low & 15) | (high & 1) << 4);
            q[64 * pair + 32 + l] = static_cast<int8_t>((low >> 4) | (high & 2) << 3);
        }
}

SPARK_FN void unpack_q6_k(const uint8_t* __restrict__ b, Block out) {
    *out.d = load_f16(b + 208);
    for (int j = 0; j < 16; ++j) out.scale[j] = static_cast<int8_t>(b[192 + j]);
    int8_t* __restrict__ q = out.q;
    for (int half = 0; half < 2; ++half)
        for (int g = 0; g < 4; ++g)
            for (int l = 0; l < 32; ++l) {
                const int low = (b[64 * half + 32 * (g % 2) + l] >> (4 * (g / 2))) & 15;
                const int high = (b[128 + 32 * half + l] >> (2 * g)) & 3;
                q[128 * half + 32 * g + l] = static_cast<int8_t>((low | high << 4) - 32);
            }
}

SPARK_FN void unpack_iq4_xs(const uint8_t* b, Block out) {
    *out.d = load_f16(b);
    const uint32_t high = load_u16(b + 2);
    for (int j = 0; j < 8; ++j) {
        const int low = (b[4 + j / 2] >> (4 * (j % 2))) & 15;
        out.scale[j] = static_cast<int16_t>((low | static_cast<int>((high >> (2 * j)) & 3u) << 4) - 32);
        unpack_book(b + 8 + 16 * j, iq4_book(), out.q + 32 * j);
    }
}

template <void (*UNPACK)(const uint8_t*, Block)>
SPARK_FN void unpack_blocks(const Format& format, const uint8_t* row, const IntRow& out) {
    Block block = {out.q, out.scale, out.min, out.d, out.offset};
    for (int i = 0; i < out.columns / format.block; ++i) {
        UNPACK(row, block);
        row += format.bytes;
        block.q += format.block;
        block.scale += format.block / format.sub;
        block.min += format.block / format.sub;
        block.d += 1;
        block.offset += 1;
    }
}

// Unpacks a whole row of an integer class; `columns` is a multiple of the block.
SPARK_FN void unpack_row(int type, const uint8_t* row, int columns, IntRow& out) {
    const Format& format = *find_format(type);
    out.format = &format;
    out.columns = columns;
    switch (type) {
        case Q4_0: return unpack_blocks<unpack_q4_0>(format, row, out);
        case Q4_1: return unpack_blocks<unpack_q4_1>(format, row, out);
        case Q5_0: return unpack_blocks<unpack_q5_0>(format, row, out);
        case Q5_1: return unpack_blocks<unpack_q5_1>(format, row, out);
        case Q8_0: return unpack_blocks<unpack_q8_0>(format, row, out);
        case IQ4_NL: return unpack_blocks<unpack_iq4_nl>(format, row, out);
        case MXFP4: return unpack_blocks<unpack_mxfp4>(format, row, out);
        case Q2_K: return unpack_blocks<unpack_q2_k>(format, row, out);
        case Q3_K: return unpack_blocks<unpack_q3_k>(format, row, out);
        case Q4_K: return unpack_blocks<unpack_q4_k>(format, row, out);
        case Q5_K: return unpack_blocks<unpack_q5_k>(format, row, out);
        case Q6_K: return unpack_blocks<unpack_q6_k>(format, row, out);
        case IQ4_XS: return unpack_blocks<unpack_iq4_xs>(format, row, out);
    }
}

// Dequantises a row of any supported type; the bits are those of the gguf Python package.
SPARK_FN void dequantise_row(int type, const uint8_t* row, int columns, float* out) {
    const Format* format = find_format(type);
    if (format->cls == Class::FLOAT) return dequantise_floats(*format, row, columns, out);
    int8_t q[256];
    int16_t scale[16], min[16];
    float d, offset;
    IntRow one = {format, format->block, q, scale, min, &d, &offset};
    for (int i = 0; i < columns / format->block; ++i) {
        unpack_row(type, row + i * format->bytes, format->block, one);
        float* y = out + i * format->block;
        for (int e = 0; e < format->block; ++e) {
            y[e] = (d * static_cast<float>(scale[e / format->sub])) * static_cast<float>(q[e]);
            if (format->offset) y[e] = y[e] + offset * static_cast<float>(min[e / format->sub]);
        }
    }
}

// Activations.

// Quantises a row to int8 in [-127, 127] with one scale a per `form` (32 or 256) elements: q[columns], a[columns / form].
SPARK_FN void quantise_row(const float* x, int columns, int form, int8_t* q, float* a) {
    for (int i = 0; i < columns / form; ++i) {
        const float* block = x + i * form;
        uint32_t largest = 0;
        for (int e = 0; e < form; ++e) {
            const uint32_t magnitude = bits_of(block[e]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const bool finite = largest < 0x7f800000u;
        if (!finite || largest < 0x0f800000u) {  // 2^-96
            a[i] = finite ? 0.0f : canonical_nan();
            for (int e = 0; e < form; ++e) q[i * form + e] = 0;
            continue;
        }
        a[i] = from_bits(largest) / 127.0f;
        const float inverse = 127.0f / from_bits(largest);
        for (int e = 0; e < form; ++e) {
            float v = block[e] * inverse;
            v = v > 127.0f ? 127.0f : v;
            v = v < -127.0f ? -127.0f : v;
            q[i * form + e] = static_cast<int8_t>(static_cast<int32_t>(round_even(v)));
        }
    }
}

// Sums of q over each 16 elements, which formats with minima multiply: sums[columns / 16].
SPARK_FN void sum_row(const int8_t* q, int columns, int16_t* sums) {
    for (int i = 0; i < columns / 16; ++i) {
        int sum = 0;
        for (int e = 0; e < 16; ++e) sum += q[16 * i + e];
        sums[i] = static_cast<int16_t>(sum);
    }
}

// Products.

template <int SUB>
SPARK_FN int32_t scaled_sum(const int8_t* w, const int8_t* x, const int16_t* scale, int subs) {
    int32_t total = 0;
    for (int s = 0; s < subs; ++s) {
        int32_t sum = 0;
        for (int e = 0; e < SUB; ++e) sum += w[SUB * s + e] * x[SUB * s + e];
        total += sum * scale[s];
    }
    return total;
}

// Product of a weight row of an integer class with an activation row in the form of its class (quantise_row, sum_row).
SPARK_FN float product(const IntRow& w, const int8_t* q8, const float* a, const int16_t* sums) {
    const Format& format = *w.format;
    const int subs = format.block / format.sub;
    float partial[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < w.columns / format.block; ++i) {
        const int8_t* wq = w.q + i * format.block;
        const int8_t* xq = q8 + i * format.block;
        const int16_t* scale = w.scale + i * subs;
        const int32_t isum =
            format.sub == 32 ? scaled_sum<32>(wq, xq, scale, subs) : scaled_sum<16>(wq, xq, scale, subs);
        float t;
        if (format.offset) {
            int32_t msum = 0;
            for (int s = 0; s < subs; ++s) {
                const int16_t* sum = sums + (i * format.block + s * format.sub) / 16;
                msum += w.min[i * subs + s] * (format.sub == 32 ? sum[0] + sum[1] : sum[0]);
            }
            t = fma(w.d[i] * a[i], static_cast<float>(isum), (w.offset[i] * a[i]) * static_cast<float>(msum));
        } else {
            t = (w.d[i] * a[i]) * static_cast<float>(isum);
        }
        float& class_sum = partial[(i * format.block / 256) % 8];
        class_sum = class_sum + t;
    }
    return halving_tree(partial, 8);
}

}  // namespace spark
