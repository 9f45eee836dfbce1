#include "cpu/fast_products.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/float_products.h"
#include "cpu/products.h"
#include "cpu/row_products.h"
#include "cpu/tile_matrix.h"

namespace spark {

#if SPARK_VECTORS

namespace {

using row_products::QuantisedRow;

// Of weights that several activation rows are multiplied with one after the other: less than the nearest cache.
constexpr int64_t kStretchBytes = 16384;
// Rows of types with code books that are unpacked at a time.
constexpr int kCodedRows = 4;

QuantisedRow quantised(const Activations& x, int64_t row) {
    const int64_t first = row * x.columns;
    return {x.q.data() + first, x.a.data() + first / x.form(), x.sums16.data() + first / 16,
            x.sums32.data() + first / 32};
}

// The memory of a kernel, aligned, in what multiply_fast was given.
template <class M>
M& in_place(void* memory) {
    return *reinterpret_cast<M*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

// Copies sums[activation row][weight row], sixteen of the latter, to where weight rows `first` to `end` - 1 belong.
void hand_out(const tile_products::Floats* sums, const Target* targets, int count, int64_t first, int64_t end) {
    const auto* from = reinterpret_cast<const float*>(sums);
    for (int m = 0; m < count; ++m, from += tile_products::kRows) {
        float* out = targets[m].out + first;
        if (end - first >= tile_products::kRows)
            std::memcpy(out, from, tile_products::kRows * sizeof(float));  // a known size takes two instructions
        else
            std::copy_n(from, end - first, out);
    }
}

template <class T>
void tiles(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
           void* memory) {
    using namespace tile_products;
    Memory& own = in_place<Memory>(memory);
    for (int64_t first = begin; first < end; first += kRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kRows, end - first));
        for (int64_t i = 0; i < count; i += kPass) {
            const int n = static_cast<int>(std::min<int64_t>(kPass, count - i));
            QuantisedRow part[kPass];
            for (int m = 0; m < n; ++m) part[m] = quantised(x, targets[i + m].row);
            Tile<T> tile(w.row(first), w.row_bytes(), rows, w.columns, part, n, own);
            hand_out(tile.products(), targets + i, n, first, end);
        }
    }
}

#if defined(__AMX_INT8__)

template <class T>
void matrices(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
              void* memory) {
    using namespace tile_matrix;
    tile_matrix::Memory& own = in_place<tile_matrix::Memory>(memory);
    for (int64_t i = 0; i < count; i += kMatrixPass) {
        const int n = static_cast<int>(std::min<int64_t>(kMatrixPass, count - i));
        QuantisedRow part[kMatrixPass];
        for (int m = 0; m < n; ++m) part[m] = quantised(x, targets[i + m].row);
        const Columns<T> columns(part, n, w.columns, &own + 1);
        for (int64_t first = begin; first < end; first += kUnit) {
            const int rows = static_cast<int>(std::min<int64_t>(kUnit, end - first));
            tile_matrix::Tile<T> tile(w.row(first), w.row_bytes(), rows, w.columns, columns, own);
            hand_out(tile.products(), targets + i, n, first, end);
        }
    }
}

#endif

template <class T>
void integers(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
              void* memory) {
#if defined(__AMX_INT8__)
    if constexpr (tile_matrix::kWorthTheUnit<T> != 0)
        if (count >= tile_matrix::kWorthTheUnit<T>) return matrices<T>(w, begin, end, x, targets, count, memory);
#endif
    if (count >= tile_products::kWorthUnpacking<T>) return tiles<T>(w, begin, end, x, targets, count, memory);
    // Weight rows come from memory once: those of a stretch serve all activation rows from the cache.
    const int64_t stretch = std::max<int64_t>(8, kStretchBytes / w.row_bytes() / 8 * 8);
    for (int64_t first = begin; first < end; first += stretch)
        for (int64_t i = 0; i < count; ++i)
            row_products::products<T>(w.row(first), w.row_bytes(), std::min(stretch, end - first), w.columns,
                                      quantised(x, targets[i].row), targets[i].out + first);
}

// `rows` <= kRows weight rows from `w`, which are those from `first` on of the weight.
template <class T>
void float_tiles(const uint8_t* w, int64_t row_bytes, int rows, int64_t first, const Activations& x,
                 const Target* targets, int64_t count, float_products::TileMemory& memory) {
    using namespace float_products;
    for (int64_t i = 0; i < count; i += kGroup) {
        const int n = static_cast<int>(std::min<int64_t>(kGroup, count - i));
        const float* row[kGroup];
        float* out[kGroup];
        for (int m = 0; m < n; ++m) {
            row[m] = x.floats + targets[i + m].row * x.columns;
            out[m] = targets[i + m].out + first;
        }
        constexpr decltype(&tile<T, 1>) tiles[kGroup] = {tile<T, 1>, tile<T, 2>, tile<T, 3>, tile<T, 4>};
        tiles[n - 1](w, row_bytes, rows, x.columns, row, out, memory);
    }
}

template <class T>
void floats(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
            void* memory) {
    using namespace float_products;
    if (count == 1)
        return products<T>(w.row(begin), w.row_bytes(), end - begin, w.columns, x.floats + targets->row * x.columns,
                           targets->out + begin);
    for (int64_t first = begin; first < end; first += kRows)
        float_tiles<T>(w.row(first), w.row_bytes(), static_cast<int>(std::min<int64_t>(kRows, end - first)), first, x,
                       targets, count, in_place<TileMemory>(memory));
}

// Types with blocks: rows are unpacked once where that serves several activation rows.
template <class T>
void coded(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
           void* memory) {
    using namespace float_products;
    if (count == 1)
        return coded_products<T>(w.row(begin), w.row_bytes(), end - begin, w.columns,
                                 x.floats + targets->row * x.columns, targets->out + begin);
    TileMemory& own = in_place<TileMemory>(memory);
    auto* unpacked = reinterpret_cast<float*>(&own + 1);
    for (int64_t first = begin; first < end; first += kCodedRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kCodedRows, end - first));
        for (int r = 0; r < rows; ++r) dequantise<T>(w.row(first + r), w.columns, unpacked + r * w.columns);
        float_tiles<Single>(reinterpret_cast<const uint8_t*>(unpacked), w.columns * int64_t{sizeof(float)}, rows, first,
                            x, targets, count, own);
    }
}

struct Kernel {
    void (*multiply)(const Weight&, int64_t, int64_t, const Activations&, const Target*, int64_t, void*);
    const char* path;

    template <class T>
    static Kernel of_floats() { return {floats<T>, vectors::kPath}; }
    template <class T>
    static Kernel of_codes() { return {coded<T>, vectors::kPath}; }
    template <class T>
    static Kernel of_integers() {
#if defined(__AMX_INT8__)
        if (tile_matrix::kWorthTheUnit<T> != 0) return {integers<T>, "avx512-vnni and amx-int8"};
#endif
        return {integers<T>, vectors::kPath};
    }
};

// multiply is null for a type that has none.
Kernel find_kernel(int type) {
    switch (type) {
        case F32: return Kernel::of_floats<float_products::Single>();
        case F16: return Kernel::of_floats<float_products::Half>();
        case BF16: return Kernel::of_floats<float_products::Brain>();
        case IQ2_XXS: return Kernel::of_codes<float_products::IQ2XXS>();
        case IQ2_XS: return Kernel::of_codes<float_products::IQ2XS>();
        case IQ2_S: return Kernel::of_codes<float_products::IQ2S>();
        case IQ3_XXS: return Kernel::of_codes<float_products::IQ3XXS>();
        case IQ3_S: return Kernel::of_codes<float_products::IQ3S>();
        case NVFP4: return Kernel::of_codes<float_products::NVF4>();
        case Q4_0: return Kernel::of_integers<layouts::Q40>();
        case Q4_1: return Kernel::of_integers<layouts::Q41>();
        case Q5_0: return Kernel::of_integers<layouts::Q50>();
        case Q5_1: return Kernel::of_integers<layouts::Q51>();
        case Q8_0: return Kernel::of_integers<layouts::Q80>();
        case IQ4_NL: return Kernel::of_integers<layouts::IQ4NL>();
        case MXFP4: return Kernel::of_integers<layouts::MXF4>();
        case Q2_K: return Kernel::of_integers<layouts::Q2K>();
        case Q3_K: return Kernel::of_integers<layouts::Q3K>();
        case Q4_K: return Kernel::of_integers<layouts::Q4K>();
        case Q5_K: return Kernel::of_integers<layouts::Q5K>();
        case Q6_K: return Kernel::of_integers<layouts::Q6K>();
        case IQ4_XS: return Kernel::of_integers<layouts::IQ4XS>();
    }
    return {nullptr, "scalar"};
}

}  // namespace

const char* products_path(int type) { return find_kernel(type).path; }

int64_t fast_product_bytes(int columns) {
    const int64_t unpacked = kCodedRows * static_cast<int64_t>(sizeof(float)) * columns;
    const auto floats = static_cast<int64_t>(sizeof(float_products::TileMemory)) + unpacked;
#if defined(__AMX_INT8__)
    const int64_t integers = std::max<int64_t>(sizeof(tile_products::Memory), tile_matrix::memory_bytes(columns));
#else
    const int64_t integers = sizeof(tile_products::Memory);
#endif
    return std::max(integers, floats) + 64;
}

bool multiply_fast(const Weight& weight, int64_t begin, int64_t end, const Activations& x, const Target* targets,
                   int64_t count, void* memory) {
    const Kernel kernel = find_kernel(weight.format->id);
    if (kernel.multiply == nullptr) return false;
    kernel.multiply(weight, begin, end, x, targets, count, memory);
    return true;
}

#else

const char* products_path(int) { return "scalar"; }

int64_t fast_product_bytes(int) { return 0; }

bool multiply_fast(const Weight&, int64_t, int64_t, const Activations&, const Target*, int64_t, void*) { return false; }

#endif

}  // namespace spark
