#include "cpu/products.h"

#include <stdexcept>
#include <string>

namespace spark {

namespace {

int scale_elements(Class cls) { return cls == Class::INT32 ? 32 : 256; }

bool float_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % alignof(float) == 0; }

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
    a.resize(static_cast<size_t>(elements / scale_elements(cls)));
    sums.resize(static_cast<size_t>(elements / 16));
}

void Activations::assign(ThreadPool& pool, const float* x, int64_t rows, int width) {
    floats = x;
    columns = width;
    if (cls == Class::FLOAT) return;
    const int form = scale_elements(cls);
    pool.run(rows, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            int8_t* row_q = q.data() + row * width;
            quantise_row(x + row * width, width, form, row_q, a.data() + row * (width / form));
            sum_row(row_q, width, sums.data() + row * (width / 16));
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
    if (memory_.size() < floats) memory_.resize(floats);
}

void WeightRow::load(const Weight& weight, int64_t index) {
    const uint8_t* row = weight.row(index);
    floats_ = nullptr;
    if (weight.format->cls != Class::FLOAT) {
        integers_ = int_row(memory_.data(), weight.columns);
        unpack_row(weight.format->id, row, weight.columns, integers_);
    } else if (weight.format->id == F32 && float_aligned(row)) {
        floats_ = reinterpret_cast<const float*>(row);
    } else {
        dequantise_row(weight.format->id, row, weight.columns, memory_.data());
        floats_ = memory_.data();
    }
}

float WeightRow::product(const Activations& x, int64_t row) const {
    const int64_t first = row * x.columns;
    if (floats_ != nullptr) return dot32(x.floats + first, floats_, x.columns);
    return spark::product(integers_, x.q.data() + first, x.a.data() + first / scale_elements(x.cls),
                          x.sums.data() + first / 16);
}

}  // namespace spark
