// Weight blocks of the integer classes, 32 elements ("a unit") at a time: integers as four bytes in a word, ready for
// dp4a. docs/arithmetic.md, "Weight formats" has the layouts; kernels/common/blocks.h unpacks the same on a CPU.
#pragma once

#include "device.cuh"

namespace spark {

// 32 weights q = u - kBias: `u` in words of four, scales and minima of the two halves (equal where sub-blocks have 32).
struct Unit {
    int32_t u[8];
    int32_t scale[2];
    int32_t min[2];
};

// Bytes that lie at any address, read through aligned words.
struct Bytes {
    const uint8_t* at;

    __device__ uint32_t word(int offset) const {
        const uint64_t address = reinterpret_cast<uint64_t>(at + offset);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~static_cast<uint64_t>(3));
        const int shift = static_cast<int>(address & 3) * 8;
        const uint64_t both = shift == 0 ? words[0] : words[0] | static_cast<uint64_t>(words[1]) << 32;
        return static_cast<uint32_t>(both >> shift);
    }
    __device__ int byte(int offset) const { return at[offset]; }
    __device__ float half(int offset) const {
        return f16_to_f32(static_cast<uint16_t>(at[offset] | at[offset + 1] << 8));
    }
};

__device__ inline void plain(Unit& unit) {
    unit.scale[0] = unit.scale[1] = 1;
    unit.min[0] = unit.min[1] = 1;
}

// 32 nibbles in 16 bytes: the low ones first.
__device__ inline void nibbles(Bytes b, int offset, int32_t* u) {
    for (int k = 0; k < 4; ++k) {
        const uint32_t w = b.word(offset + 4 * k);
        u[k] = static_cast<int32_t>(w & 0x0f0f0f0fu);
        u[k + 4] = static_cast<int32_t>(w >> 4 & 0x0f0f0f0fu);
    }
}

// Four bits, one to a byte, of `bits` from `first` on.
__device__ inline uint32_t spread(uint32_t bits, int first) {
    const uint32_t four = bits >> first & 15u;
    return (four & 1u) | (four & 2u) << 7 | (four & 4u) << 14 | (four & 8u) << 21;
}

// The 32 bits of `high` become fifth bits.
__device__ inline void fifth_bits(uint32_t high, int32_t* u) {
    for (int k = 0; k < 8; ++k) u[k] |= static_cast<int32_t>(spread(high, 4 * k) << 4);
}

// Four nibbles (one to a byte) through a book of 16 bytes.
__device__ inline int32_t looked_up(uint32_t nibble, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
    const uint32_t low = nibble & 0x07070707u;
    const uint32_t selector = (low & 7u) | (low >> 4 & 0x70u) | (low >> 8 & 0x700u) | (low >> 12 & 0x7000u);
    const uint32_t upper = (nibble >> 3 & 0x01010101u) * 255u;
    return static_cast<int32_t>((__byte_perm(b0, b1, selector) & ~upper) | (__byte_perm(b2, b3, selector) & upper));
}

__device__ inline void look_up_iq4(int32_t* u) {  // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    for (int k = 0; k < 8; ++k)
        u[k] = looked_up(static_cast<uint32_t>(u[k]), 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
}

__device__ inline void look_up_fp4(int32_t* u) {  // 0 1 2 3 4 6 8 12, then the same negated
    for (int k = 0; k < 8; ++k)
        u[k] = looked_up(static_cast<uint32_t>(u[k]), 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
}

// One decoder per type: elements and bytes of a block, the bias of u, whether there are minima; d and o of a block; unit
// `p` of it.
template <int TYPE>
struct Decoder;

template <>
struct Decoder<Q4_0> {
    static constexpr int kBlock = 32, kBytes = 18, kBias = 8;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 2, unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<Q4_1> {
    static constexpr int kBlock = 32, kBytes = 20, kBias = 0;
    static constexpr bool kOffset = true;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes b) { return b.half(2); }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 4, unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<Q5_0> {
    static constexpr int kBlock = 32, kBytes = 22, kBias = 16;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 6, unit.u);
        fifth_bits(b.word(2), unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<Q5_1> {
    static constexpr int kBlock = 32, kBytes = 24, kBias = 0;
    static constexpr bool kOffset = true;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes b) { return b.half(2); }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 8, unit.u);
        fifth_bits(b.word(4), unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<Q8_0> {
    static constexpr int kBlock = 32, kBytes = 34, kBias = 0;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        for (int k = 0; k < 8; ++k) unit.u[k] = static_cast<int32_t>(b.word(2 + 4 * k));
        plain(unit);
    }
};

template <>
struct Decoder<IQ4_NL> {
    static constexpr int kBlock = 32, kBytes = 18, kBias = 0;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 2, unit.u);
        look_up_iq4(unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<MXFP4> {
    static constexpr int kBlock = 32, kBytes = 17, kBias = 0;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) {
        const uint32_t e = static_cast<uint32_t>(b.byte(0));
        return from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int, Unit& unit) {
        nibbles(b, 1, unit.u);
        look_up_fp4(unit.u);
        plain(unit);
    }
};

template <>
struct Decoder<Q2_K> {
    static constexpr int kBlock = 256, kBytes = 84, kBias = 0;
    static constexpr bool kOffset = true;
    __device__ static float d(Bytes b) { return b.half(80); }
    __device__ static float o(Bytes b) { return -b.half(82); }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        for (int k = 0; k < 8; ++k)
            unit.u[k] = static_cast<int32_t>(b.word(16 + 32 * (p / 4) + 4 * k) >> 2 * (p % 4) & 0x03030303u);
        for (int j = 0; j < 2; ++j) {
            unit.scale[j] = b.byte(2 * p + j) & 15;
            unit.min[j] = b.byte(2 * p + j) >> 4;
        }
    }
};

template <>
struct Decoder<Q3_K> {
    static constexpr int kBlock = 256, kBytes = 110, kBias = 4;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(108); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        for (int k = 0; k < 8; ++k) {
            const uint32_t low = b.word(32 + 32 * (p / 4) + 4 * k) >> 2 * (p % 4) & 0x03030303u;
            const uint32_t high = b.word(4 * k) >> p & 0x01010101u;
            unit.u[k] = static_cast<int32_t>(low | high << 2);
        }
        for (int i = 0; i < 2; ++i) {
            const int j = 2 * p + i;
            const int low = j < 8 ? b.byte(96 + j) & 15 : b.byte(96 + j - 8) >> 4;
            const int high = b.byte(104 + j % 4) >> 2 * (j / 4) & 3;
            unit.scale[i] = (low | high << 4) - 32;
            unit.min[i] = 0;
        }
    }
};

// Scale and minimum `j` of eight with 6 bits each, in 12 bytes at `offset`.
__device__ inline void six_bits(Bytes b, int offset, int j, Unit& unit) {
    int scale, min;
    if (j < 4) {
        scale = b.byte(offset + j) & 63;
        min = b.byte(offset + j + 4) & 63;
    } else {
        scale = (b.byte(offset + j + 4) & 15) | (b.byte(offset + j - 4) >> 6) << 4;
        min = b.byte(offset + j + 4) >> 4 | (b.byte(offset + j) >> 6) << 4;
    }
    unit.scale[0] = unit.scale[1] = scale;
    unit.min[0] = unit.min[1] = min;
}

template <>
struct Decoder<Q4_K> {
    static constexpr int kBlock = 256, kBytes = 144, kBias = 0;
    static constexpr bool kOffset = true;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes b) { return -b.half(2); }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        for (int k = 0; k < 8; ++k)
            unit.u[k] = static_cast<int32_t>(b.word(16 + 32 * (p / 2) + 4 * k) >> 4 * (p % 2) & 0x0f0f0f0fu);
        six_bits(b, 4, p, unit);
    }
};

template <>
struct Decoder<Q5_K> {
    static constexpr int kBlock = 256, kBytes = 176, kBias = 0;
    static constexpr bool kOffset = true;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes b) { return -b.half(2); }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        for (int k = 0; k < 8; ++k) {
            const uint32_t low = b.word(48 + 32 * (p / 2) + 4 * k) >> 4 * (p % 2) & 0x0f0f0f0fu;
            const uint32_t high = b.word(16 + 4 * k) >> p & 0x01010101u;
            unit.u[k] = static_cast<int32_t>(low | high << 4);
        }
        six_bits(b, 4, p, unit);
    }
};

template <>
struct Decoder<Q6_K> {
    static constexpr int kBlock = 256, kBytes = 210, kBias = 32;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(208); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        const int half = p / 4, g = p % 4;
        for (int k = 0; k < 8; ++k) {
            const uint32_t low = b.word(64 * half + 32 * (g % 2) + 4 * k) >> 4 * (g / 2) & 0x0f0f0f0fu;
            const uint32_t high = b.word(128 + 32 * half + 4 * k) >> 2 * g & 0x03030303u;
            unit.u[k] = static_cast<int32_t>(low | high << 4);
        }
        for (int j = 0; j < 2; ++j) {
            unit.scale[j] = static_cast<int8_t>(b.byte(192 + 2 * p + j));
            unit.min[j] = 0;
        }
    }
};

template <>
struct Decoder<IQ4_XS> {
    static constexpr int kBlock = 256, kBytes = 136, kBias = 0;
    static constexpr bool kOffset = false;
    __device__ static float d(Bytes b) { return b.half(0); }
    __device__ static float o(Bytes) { return 0.0f; }
    __device__ static void unit(Bytes b, int p, Unit& unit) {
        nibbles(b, 8 + 16 * p, unit.u);
        look_up_iq4(unit.u);
        const int low = b.byte(4 + p / 2) >> 4 * (p % 2) & 15;
        const int high = (b.byte(2) | b.byte(3) << 8) >> 2 * p & 3;
        unit.scale[0] = unit.scale[1] = (low | high << 4) - 32;
        unit.min[0] = unit.min[1] = 0;
    }
};

}  // namespace spark
