// Products of weight rows with activation rows.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/blocks.h"
#include "cpu/fast_products.h"
#include "cpu/pool.h"

namespace spark {

// Rows of a tensor where they lie, as in the file; `address` need not be aligned. (Of an expert's piece: its offset in
// the record.)
struct Weight {
    uint64_t address;
    const Format* format;
    int64_t rows;
    int columns;

    // Throws std::invalid_argument for an unknown ggml type or columns that are no whole number of blocks.
    Weight(uint64_t address, int type, int64_t rows, int columns);

    int64_t row_bytes() const { return static_cast<int64_t>(columns / format->block) * format->bytes; }
    const uint8_t* row(int64_t index) const {
        return reinterpret_cast<const uint8_t*>(address) + index * row_bytes();
    }
    // The piece of the record at `record`.
    Weight in(uint64_t record) const {
        Weight piece = *this;
        piece.address += record;
        return piece;
    }
};

// The first row of a weight as floats. Throws std::invalid_argument unless it is F32 and aligned.
const float* float_vector(const Weight& weight);

// Rows of activations in the form that products with weights of one class take.
struct Activations {
    Class cls = Class::FLOAT;
    int columns = 0;
    const float* floats = nullptr;  // [rows][columns], every class
    std::vector<int8_t> q;          // [rows][columns], integer classes
    std::vector<float> a;           // [rows][columns / 32 or 256]
    std::vector<int16_t> sums16;    // [rows][columns / 16]: of q
    std::vector<int16_t> sums32;    // [rows][columns / 32]

    // Elements per scale.
    int form() const { return cls == Class::INT32 ? 32 : 256; }

    void reserve(Class cls, int64_t elements);
    // Takes `rows` rows of `x`, which stays where it is.
    void assign(ThreadPool& pool, const float* x, int64_t rows, int columns);
};

// Activations of one matrix in every form that was asked for since `take`.
class Forms {
  public:
    // Room for `elements` in the form of `cls`.
    void reserve(Class cls, int64_t elements);
    // From now on `get` answers for this matrix, which stays where it is.
    void take(const float* x, int64_t rows, int columns);
    // Converts at the first call per class.
    const Activations& get(ThreadPool& pool, Class cls);

  private:
    const float* x_ = nullptr;
    int64_t rows_ = 0;
    int columns_ = 0;
    std::array<Activations, 3> forms_;
    std::array<bool, 3> ready_ = {};
};

// The scalar products: one weight row, unpacked once for all activation rows. Of the integer classes the scales of sub-blocks are multiplied into
// the weights (|q * scale| < 2^15 for every format), which leaves one long integer sum per block: exact, so the bits
// are those of spark::product, which defines them.
class WeightRow {
  public:
    void reserve(int columns);
    void load(const Weight& weight, int64_t row);
    float product(const Activations& x, int64_t row) const;

  private:
    void fold(const IntRow& row);
    template <int BLOCK, bool OFFSET>
    float integer_product(const int8_t* q, const float* a, const int16_t* sums) const;

    std::vector<float> unpacked_;   // floats, or an IntRow
    std::vector<int16_t> scaled_;   // [columns]: q * scale
    std::vector<int16_t> minima_;   // [columns / 16], formats with an offset
    IntRow integers_ = {};
    const float* floats_ = nullptr;  // null: integers
};

// Memory of one thread for products with weights of as many columns as were reserved.
struct ProductMemory {
    WeightRow row;
    std::vector<uint8_t> fast;

    void reserve(int columns);
};

// target.out[o] = weight row o · target.row of x, for all targets and o in begin .. end - 1.
void multiply(const Weight& weight, int64_t begin, int64_t end, const Activations& x, const Target* targets,
              int64_t count, ProductMemory& memory);

}  // namespace spark
