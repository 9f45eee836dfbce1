#include "cpu/products.h"

#include <stdexcept>
#include <string>

namespace spark {

namespace {

bool float_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % alignof(float) == 0; }

// out = q * scale of its sub-block. Sub-blocks of 16 are too short for the vectoriser, so their scales are
// spread over a whole block first.
void multiply_scales_16(const int8_t* __restrict q, const int16_t* __restrict scale, int columns,
                        int16_t* __restrict out) {
    int16_t wide[256];
    for (int block = 0; block < columns; block += 256) {
        for (int s = 0; s < 16; ++s)
            for (int e = 0; e < 16; ++e) wide[16 * s + e] = scale[block / 16 + s];
        for (int e = 0; e < 256; ++e) out[block + e] = static_cast<int16_t>(q[block + e] * wide[e]);
    }
}

void multiply_scales_32(const int8_t* __restrict q, const int16_t* __restrict scale, int columns,
                        int16_t* __restrict out) {
    for (int s = 0; s < columns / 32; ++s)
        for (int e = 0; e < 32; ++e) out[32 * s + e] = static_cast<int16_t>(q[32 * s + e] * scale[s]);
}

}  // namespace

Weight::Weight(uint64_t address, int type, int64_t rows, int columns)
    : address(address), format(find_format(type)), rows(rows), columns(columns) {
    if (format == nullptr) throw std::invalid_argument("unknown weight type " + std::to_string(type));
    if (rows < 1 || columns < 1 || columns % format->block != 0)
        throw std::invalid_argument("a weight of type " + std::to_string(type) + " cannot have " +
                                    std::to_string(rows) + " rows of " + std::to_string(columns) + " columns");
}

const float* float_vector(const Weight& weight) {
    if (weight.format->id != F32 || !float_aligned(weight.row(0)))
        throw std::invalid_argument("a vector of weights must be F32 and aligned");
    return reinterpret_cast<const float*>(weight.row(0));
}

void Activations::reserve(Class wanted, int64_t elements) {
    cls = wanted;
    if (cls == Class::FLOAT || static_cast<int64_t>(q.size()) >= elements) return;
    q.resize(static_cast<size_t>(elements));
    a.resize(static_cast<size_t>(elements / form()));
    sums16.resize(static_cast<size_t>(elements / 16));
    sums32.resize(static_cast<size_t>(elements / 32));
}

void Activations::assign(ThreadPool& pool, const float* x, int64_t rows, int width) {
    floats = x;
    columns = width;
    if (cls == Class::FLOAT) return;
    const int scaled = form();
    pool.run(rows, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            int8_t* row_q = q.data() + row * width;
            int16_t* row_sums = sums16.data() + row * (width / 16);
            quantise_row(x + row * width, width, scaled, row_q, a.data() + row * (width / scaled));
            sum_row(row_q, width, row_sums);
            for (int i = 0; i < width / 32; ++i)
                sums32[static_cast<size_t>(row * (width / 32) + i)] =
                    static_cast<int16_t>(row_sums[2 * i] + row_sums[2 * i + 1]);
        }
    });
}

void Forms::reserve(Class cls, int64_t elements) { forms_[static_cast<size_t>(cls)].reserve(cls, elements); }

void Forms::take(const float* x, int64_t rows, int columns) {
    x_ = x;
    rows_ = rows;
    columns_ = columns;
    ready_ = {};
}

const Activations& Forms::get(ThreadPool& pool, Class cls) {
    Activations& form = forms_[static_cast<size_t>(cls)];
    bool& ready = ready_[static_cast<size_t>(cls)];
    if (!ready) form.assign(pool, x_, rows_, columns_);
    ready = true;
    return form;
}

void WeightRow::reserve(int columns) {
    const size_t floats = static_cast<size_t>(std::max<int64_t>(columns, int_row_bytes(columns) / 4 + 1));
    if (unpacked_.size() < floats) unpacked_.resize(floats);
    if (scaled_.size() < static_cast<size_t>(columns)) {
        scaled_.resize(static_cast<size_t>(columns));
        minima_.resize(static_cast<size_t>(columns / 16));
    }
}

void WeightRow::load(const Weight& weight, int64_t index) {
    const uint8_t* row = weight.row(index);
    floats_ = nullptr;
    if (weight.format->cls != Class::FLOAT) {
        integers_ = int_row(unpacked_.data(), weight.columns);
        unpack_row(weight.format->id, row, weight.columns, integers_);
        fold(integers_);
    } else if (weight.format->id == F32 && float_aligned(row)) {
        floats_ = reinterpret_cast<const float*>(row);
    } else {
        dequantise_row(weight.format->id, row, weight.columns, unpacked_.data());
        floats_ = unpacked_.data();
    }
}

void WeightRow::fold(const IntRow& row) {
    if (row.format->sub == 16)
        multiply_scales_16(row.q, row.scale, row.columns, scaled_.data());
    else
        multiply_scales_32(row.q, row.scale, row.columns, scaled_.data());
    if (row.format->offset)
        for (int i = 0; i < row.columns / 16; ++i) minima_[static_cast<size_t>(i)] = row.min[16 * i / row.format->sub];
}

template <int BLOCK, bool OFFSET>
float WeightRow::integer_product(const int8_t* q, const float* a, const int16_t* sums) const {
    float partial[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < integers_.columns / BLOCK; ++i) {
        const int16_t* w = scaled_.data() + i * BLOCK;
        const int8_t* x = q + i * BLOCK;
        int32_t isum = 0;
        for (int e = 0; e < BLOCK; ++e) isum += w[e] * x[e];
        float t;
        if constexpr (OFFSET) {
            const int16_t* min = minima_.data() + i * (BLOCK / 16);
            const int16_t* sum = sums + i * (BLOCK / 16);
            int32_t msum = 0;
            for (int s = 0; s < BLOCK / 16; ++s) msum += min[s] * sum[s];
            t = fma(integers_.d[i] * a[i], static_cast<float>(isum),
                    (integers_.offset[i] * a[i]) * static_cast<float>(msum));
        } else {
            t = (integers_.d[i] * a[i]) * static_cast<float>(isum);
        }
        float& class_sum = partial[(i * BLOCK / 256) % 8];
        class_sum = class_sum + t;
    }
    return halving_tree(partial, 8);
}

float WeightRow::product(const Activations& x, int64_t row) const {
    const int64_t first = row * x.columns;
    if (floats_ != nullptr) return dot32(x.floats + first, floats_, x.columns);
    const int8_t* q = x.q.data() + first;
    const float* a = x.a.data() + first / x.form();
    const int16_t* sums = x.sums16.data() + first / 16;
    const bool offset = integers_.format->offset;
    if (x.cls == Class::INT32)
        return offset ? integer_product<32, true>(q, a, sums) : integer_product<32, false>(q, a, sums);
    return offset ? integer_product<256, true>(q, a, sums) : integer_product<256, false>(q, a, sums);
}

void ProductMemory::reserve(int columns) {
    row.reserve(columns);
    const auto bytes = static_cast<size_t>(fast_product_bytes(columns));
    if (fast.size() < bytes) fast.resize(bytes);
}

void multiply(const Weight& weight, int64_t begin, int64_t end, const Activations& x, const Target* targets,
              int64_t count, ProductMemory& memory) {
    if (multiply_fast(weight, begin, end, x, targets, count, memory.fast.data())) return;
    for (int64_t o = begin; o < end; ++o) {
        memory.row.load(weight, o);
        for (int64_t i = 0; i < count; ++i) targets[i].out[o] = memory.row.product(x, targets[i].row);
    }
}

}  // namespace spark
