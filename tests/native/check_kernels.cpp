// The kernels under sanitizers: products of every type in memory of exactly their size, the float kernels, the pool.
// Prints what differs from the definition; `make sanitize` runs it for each instruction set, with check_plan.cpp.
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/float_kernels.h"
#include "cpu/products.h"
#include "matrix_unit.h"

using namespace spark;

namespace {

std::mt19937 random_bits(1);
int failures = 0;

void expect(bool same, const char* what, int id, int64_t at) {
    if (same) return;
    ++failures;
    std::printf("%s %d differs at %lld\n", what, id, static_cast<long long>(at));
}

bool same_bits(float a, float b) { return (a != a && b != b) || bits_of(a) == bits_of(b); }

std::vector<float> floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float& value : x) value = normal(random_bits);
    return x;
}

void check_products(const Format& format, int columns, int64_t rows, int64_t count) {
    ThreadPool pool(1);
    const auto bytes = static_cast<size_t>(rows * (columns / format.block) * format.bytes);
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[bytes]);  // a byte more or less is noticed
    for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<uint8_t>(random_bits() & 0xbf);
    const Weight weight(reinterpret_cast<uint64_t>(memory.get()), format.id, rows, columns);
    const std::vector<float> x = floats(static_cast<size_t>(count * columns));
    Activations activations;
    activations.reserve(format.cls, count * columns);
    activations.assign(pool, x.data(), count, columns);
    ProductMemory products;
    products.reserve(columns);
    std::vector<float> out(static_cast<size_t>(count * rows));
    std::vector<Target> targets;
    for (int64_t i = 0; i < count; ++i) targets.push_back({i, out.data() + i * rows});
    multiply(weight, 0, rows, activations, targets.data(), count, products);
    WeightRow row;
    row.reserve(columns);
    for (int64_t o = 0; o < rows; ++o) {
        row.load(weight, o);
        for (int64_t i = 0; i < count; ++i)
            expect(same_bits(row.product(activations, i), targets[static_cast<size_t>(i)].out[o]), "type", format.id, o);
    }
}

void check_float_kernels(int n) {
    const std::vector<float> q = floats(static_cast<size_t>(n)), k = floats(static_cast<size_t>(n));
    const std::vector<float> v = floats(static_cast<size_t>(n)), rows = floats(static_cast<size_t>(n) * n);
    std::vector<float> dots(static_cast<size_t>(n)), sums = q, expected_sums = q;
    dot_rows(q.data(), rows.data(), n, n, dots.data());
    for (int i = 0; i < n; ++i) expect(same_bits(dots[i], dot32(q.data(), rows.data() + i * n, n)), "dot_rows", n, i);
    add_scaled_rows(k.data(), rows.data(), n, n, sums.data());
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < n; ++j) expected_sums[j] = fma(k[i], rows[i * n + j], expected_sums[j]);
    for (int j = 0; j < n; ++j) expect(same_bits(sums[j], expected_sums[j]), "add_scaled_rows", n, j);
    std::vector<float> state = rows, expected_state = rows, out(v), expected_out(v);
    delta_rows(state.data(), n, n, q.data(), k.data(), v.data(), 0.7f, 0.9f, out.data());
    delta_rows_by_definition(expected_state.data(), n, n, q.data(), k.data(), v.data(), 0.7f, 0.9f, expected_out.data());
    for (int i = 0; i < n; ++i) expect(same_bits(out[i], expected_out[i]), "delta_rows", n, i);
    for (int i = 0; i < n * n; ++i) expect(same_bits(state[i], expected_state[i]), "delta state", n, i);
    std::vector<uint16_t> halves(static_cast<size_t>(n));
    for (uint16_t& h : halves) h = static_cast<uint16_t>(random_bits());
    halves_to_floats(halves.data(), n, out.data());
    for (int i = 0; i < n; ++i) expect(same_bits(out[i], f16_to_f32(halves[i])), "halves_to_floats", n, i);
}

void check_pool(int threads) {
    ThreadPool pool(threads);
    std::vector<int> times(3000);
    for (int64_t run = 0; run < 1000; ++run) {
        const int64_t count = 1 + run * 37 % static_cast<int64_t>(times.size()), grain = 1 + run % 17;
        std::fill(times.begin(), times.end(), 0);
        pool.run(count, grain, [&](int64_t begin, int64_t end, int) {
            expect(begin % grain == 0, "pool", threads, begin);
            for (int64_t i = begin; i < end; ++i) ++times[static_cast<size_t>(i)];
        });
        for (int64_t i = 0; i < count; ++i) expect(times[static_cast<size_t>(i)] == 1, "pool", threads, i);
    }
}

}  // namespace

int main() {
    ask_for_matrix_unit();
    for (int id = 0; id < 256; ++id) {
        const Format* format = find_format(id);
        if (format == nullptr) continue;
        for (int columns : {32, 96, 256, 512, 768, 1280, 2304})
            for (int64_t count : {1, 2, 7, 11, 70})
                if (columns % format->block == 0) check_products(*format, columns, 17, count);
    }
    for (int n : {16, 32, 48, 128, 160}) check_float_kernels(n);
    for (int threads : {1, 2, 3, 5}) check_pool(threads);
    std::printf("%s, %d differences\n", products_path(Q4_K), failures);
    return failures != 0;
}
