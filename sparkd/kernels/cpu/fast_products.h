// The kernels of each weight type for the instruction set of this module. They compute the bits of spark::dot32 and
// spark::product, which define them.
#pragma once

#include <cstdint>

namespace spark {

struct Activations;
struct Weight;

// An activation row, and where its products with a weight's rows go: out[o] for weight row o.
struct Target {
    int64_t row;
    float* out;
};

// What the products in use are called: of the scalar definition, or by the registers they use.
const char* products_path(int type);

// Bytes that multiply_fast needs in `memory` for weights of `columns`.
int64_t fast_product_bytes(int columns);

// Products of weight rows begin .. end-1 with all targets; false: there are no kernels for this type here.
bool multiply_fast(const Weight& weight, int64_t begin, int64_t end, const Activations& x, const Target* targets,
                   int64_t count, void* memory);

}  // namespace spark
