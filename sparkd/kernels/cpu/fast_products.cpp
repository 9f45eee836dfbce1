#include "cpu/fast_products.h"

#include <algorithm>
#include <type_traits>

#include "cpu/float_products.h"
#include "cpu/products.h"
#include "cpu/row_products.h"
#include "cpu/tile_products.h"

namespace spark {

#if SPARK_VECTORS

namespace {

using row_products::QuantisedRow;

// Activation rows from which on unpacking a tile of weight rows pays.
constexpr int64_t kTileRows = 4;
constexpr int64_t kTile = 16;

QuantisedRow quantised(const Activations& x, int64_t row) {
    const int64_t first = row * x.columns;
    return {x.q.data() + first, x.a.data() + first / x.form(), x.sums16.data() + first / 16,
            x.sums32.data() + first / 32};
}

#if SPARK_VECTORS == 512
template <class T>
void tiles(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
           void* memory) {
    for (int64_t first = begin; first < end; first += kTile) {
        const int rows = static_cast<int>(std::min(kTile, end - first));
        tile_products::unpack<T>(w.row(first), w.row_bytes(), rows, w.columns, memory);
        for (int64_t i = 0; i < count; i += 8) {
            const int n = static_cast<int>(std::min<int64_t>(8, count - i));
            QuantisedRow part[8];
            float* out[8];
            for (int m = 0; m < n; ++m) {
                part[m] = quantised(x, targets[i + m].row);
                out[m] = targets[i + m].out + first;
            }
            tile_products::products<T>(memory, rows, w.columns, part, n, out);
        }
    }
}
#endif

template <class T>
void integers(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
              [[maybe_unused]] void* memory) {
#if SPARK_VECTORS == 512
    if (count >= kTileRows) return tiles<T>(w, begin, end, x, targets, count, memory);
#endif
    for (int64_t i = 0; i < count; ++i)
        row_products::products<T>(w.row(begin), w.row_bytes(), end - begin, w.columns, quantised(x, targets[i].row),
                                  targets[i].out + begin);
}

template <class T>
void floats(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
            void*) {
    for (int64_t i = 0; i < count; ++i)
        float_products::products<T>(w.row(begin), w.row_bytes(), end - begin, w.columns,
                                    x.floats + targets[i].row * x.columns, targets[i].out + begin);
}

// Types with blocks: rows are unpacked once where that serves several activation rows.
template <class T>
void coded(const Weight& w, int64_t begin, int64_t end, const Activations& x, const Target* targets, int64_t count,
           void* memory) {
    if (count == 1)
        return float_products::coded_products<T>(w.row(begin), w.row_bytes(), end - begin, w.columns,
                                                 x.floats + targets->row * x.columns, targets->out + begin);
    const int64_t row_bytes = w.columns * static_cast<int64_t>(sizeof(float));
    auto* unpacked = static_cast<uint8_t*>(memory);
    for (int64_t first = begin; first < end; first += 2) {
        const int64_t rows = std::min<int64_t>(2, end - first);
        for (int64_t r = 0; r < rows; ++r)
            float_products::dequantise<T>(w.row(first + r), w.columns,
                                          reinterpret_cast<float*>(unpacked + r * row_bytes));
        for (int64_t i = 0; i < count; ++i)
            float_products::products<float_products::Single>(unpacked, row_bytes, rows, w.columns,
                                                             x.floats + targets[i].row * x.columns,
                                                             targets[i].out + first);
    }
}

using Kernel = void (*)(const Weight&, int64_t, int64_t, const Activations&, const Target*, int64_t, void*);

Kernel find_kernel(int type) {
    switch (type) {
        case F32: return floats<float_products::Single>;
        case F16: return floats<float_products::Half>;
        case BF16: return floats<float_products::Brain>;
        case IQ2_XXS: return coded<float_products::IQ2XXS>;
        case IQ2_XS: return coded<float_products::IQ2XS>;
        case IQ2_S: return coded<float_products::IQ2S>;
        case IQ3_XXS: return coded<float_products::IQ3XXS>;
        case IQ3_S: return coded<float_products::IQ3S>;
        case NVFP4: return coded<float_products::NVF4>;
        case Q4_0: return integers<layouts::Q40>;
        case Q4_1: return integers<layouts::Q41>;
        case Q5_0: return integers<layouts::Q50>;
        case Q5_1: return integers<layouts::Q51>;
        case Q8_0: return integers<layouts::Q80>;
        case IQ4_NL: return integers<layouts::IQ4NL>;
        case MXFP4: return integers<layouts::MXF4>;
        case Q2_K: return integers<layouts::Q2K>;
        case Q3_K: return integers<layouts::Q3K>;
        case Q4_K: return integers<layouts::Q4K>;
        case Q5_K: return integers<layouts::Q5K>;
        case Q6_K: return integers<layouts::Q6K>;
        case IQ4_XS: return integers<layouts::IQ4XS>;
    }
    return nullptr;
}

}  // namespace

const char* products_path(int type) { return find_kernel(type) != nullptr ? vectors::kPath : "scalar"; }

int64_t fast_product_bytes(int columns) {
    const int64_t two_rows = 2 * static_cast<int64_t>(sizeof(float)) * columns;
#if SPARK_VECTORS == 512
    return std::max<int64_t>(two_rows, tile_products::Tile::bytes(columns) + 64);
#else
    return two_rows;
#endif
}

bool multiply_fast(const Weight& weight, int64_t begin, int64_t end, const Activations& x, const Target* targets,
                   int64_t count, void* memory) {
    const Kernel kernel = find_kernel(weight.format->id);
    if (kernel == nullptr) return false;
    kernel(weight, begin, end, x, targets, count, memory);
    return true;
}

#else

const char* products_path(int) { return "scalar"; }

int64_t fast_product_bytes(int) { return 0; }

bool multiply_fast(const Weight&, int64_t, int64_t, const Activations&, const Target*, int64_t, void*) { return false; }

#endif

}  // namespace spark
