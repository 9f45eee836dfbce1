// The table of GGUF weight formats, and how their fields are read. docs/arithmetic.md, "Weight formats".
#pragma once

#include "arithmetic.h"

namespace spark {

enum class Class {
    FLOAT,   // dequantise, then dot32
    INT32,   // integer product, one activation scale per 32 elements
    INT256,  // integer product, one activation scale per 256 elements
};

struct Format {
    int id;       // ggml type id
    int block;    // elements per block
    int bytes;    // bytes per block
    Class cls;
    int sub;      // elements per sub-block
    bool offset;  // has minima
};

enum Type {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, BF16 = 30,
    MXFP4 = 39, NVFP4 = 40,
};

// The table's row for a ggml type id; null: sparkd cannot compute this type.
SPARK_FN const Format* find_format(int ggml_id) {
    static constexpr Format formats[] = {
        {F32, 1, 4, Class::FLOAT, 1, false},       {F16, 1, 2, Class::FLOAT, 1, false},
        {BF16, 1, 2, Class::FLOAT, 1, false},      {Q4_0, 32, 18, Class::INT32, 32, false},
        {Q4_1, 32, 20, Class::INT32, 32, true},    {Q5_0, 32, 22, Class::INT32, 32, false},
        {Q5_1, 32, 24, Class::INT32, 32, true},    {Q8_0, 32, 34, Class::INT32, 32, false},
        {IQ4_NL, 32, 18, Class::INT32, 32, false}, {MXFP4, 32, 17, Class::INT32, 32, false},
        {Q2_K, 256, 84, Class::INT256, 16, true},  {Q3_K, 256, 110, Class::INT256, 16, false},
        {Q4_K, 256, 144, Class::INT256, 32, true}, {Q5_K, 256, 176, Class::INT256, 32, true},
        {Q6_K, 256, 210, Class::INT256, 16, false}, {IQ4_XS, 256, 136, Class::INT256, 32, false},
        {IQ2_XXS, 256, 66, Class::FLOAT, 32, false}, {IQ2_XS, 256, 74, Class::FLOAT, 16, false},
        {IQ2_S, 256, 82, Class::FLOAT, 16, false}, {IQ3_XXS, 256, 98, Class::FLOAT, 32, false},
        {IQ3_S, 256, 110, Class::FLOAT, 32, false}, {NVFP4, 64, 36, Class::FLOAT, 16, false},
    };
    for (const Format& format : formats)
        if (format.id == ggml_id) return &format;
    return nullptr;
}

// Fields of a block, little endian and not aligned.

SPARK_FN uint32_t load_u16(const uint8_t* b) { return b[0] | static_cast<uint32_t>(b[1]) << 8; }
SPARK_FN uint32_t load_u32(const uint8_t* b) { return load_u16(b) | load_u16(b + 2) << 16; }
SPARK_FN float load_f16(const uint8_t* b) { return f16_to_f32(static_cast<uint16_t>(load_u16(b))); }

}  // namespace spark
