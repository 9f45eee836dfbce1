// Python bindings of the arithmetic, function by function, for tests; and of the sampler, for the worker.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "common/arithmetic.h"
#include "common/blocks.h"
#include "common/philox.h"
#include "common/rope.h"
#include "cpu/experts.h"
#include "cpu/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Output<T> output(size_t n) {
    T* data = new T[n]();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Output<T>(data, {n}, owner);
}

template <typename T>
Output<T> copy(const T* data, size_t n) {
    Output<T> out = output<T>(n);
    for (size_t i = 0; i < n; ++i) out.data()[i] = data[i];
    return out;
}

void require(bool condition, const char* message) {
    if (!condition) throw nb::value_error(message);
}

template <typename From, typename To, To (*FUNCTION)(From)>
Output<To> map(Input<From> x) {
    Output<To> out = output<To>(x.size());
    for (size_t i = 0; i < x.size(); ++i) out.data()[i] = FUNCTION(x.data()[i]);
    return out;
}

int length(const Input<float>& x) { return static_cast<int>(x.size()); }

const spark::Format& format_of(int type) {
    const spark::Format* format = spark::find_format(type);
    require(format != nullptr, "unknown weight type");
    return *format;
}

// Number of columns of a row of a known type.
int columns_of(int type, const Input<uint8_t>& row) {
    const spark::Format& format = format_of(type);
    const int bytes = static_cast<int>(row.size());
    require(bytes % format.bytes == 0, "a row must be a whole number of blocks");
    return bytes / format.bytes * format.block;
}

int form_of(int type) {
    const spark::Class cls = format_of(type).cls;
    require(cls != spark::Class::FLOAT, "the type is of the float class");
    return cls == spark::Class::INT32 ? 32 : 256;
}

std::vector<std::tuple<int, int, int, const char*>> formats() {
    std::vector<std::tuple<int, int, int, const char*>> table;
    for (int id = 0; id < 256; ++id) {
        const spark::Format* format = spark::find_format(id);
        if (format == nullptr) continue;
        const char* names[] = {"FLOAT", "INT32", "INT256"};
        table.emplace_back(id, format->block, format->bytes, names[static_cast<int>(format->cls)]);
    }
    return table;
}

float dot32(Input<float> x, Input<float> w) {
    require(x.size() == w.size(), "vectors of different lengths");
    return spark::dot32(x.data(), w.data(), length(x));
}

Output<float> map_fma(Input<float> a, Input<float> b, Input<float> c) {
    require(a.size() == b.size() && b.size() == c.size(), "vectors of different lengths");
    Output<float> out = output<float>(a.size());
    for (size_t i = 0; i < a.size(); ++i) out.data()[i] = spark::fma(a.data()[i], b.data()[i], c.data()[i]);
    return out;
}

std::tuple<float, float, Output<float>> accumulate(float score, float m, Input<float> v, float l, Input<float> o) {
    require(v.size() == o.size(), "vectors of different lengths");
    Output<float> out = copy(o.data(), o.size());
    spark::accumulate(score, m, v.data(), length(v), l, out.data());
    return {m, l, out};
}

std::tuple<float, float, Output<float>> merge(float m1, float l1, Input<float> o1, float m2, float l2, Input<float> o2) {
    require(o1.size() == o2.size(), "vectors of different lengths");
    Output<float> out = copy(o1.data(), o1.size());
    spark::merge(m1, l1, out.data(), m2, l2, o2.data(), length(o2));
    return {m1, l1, out};
}

std::tuple<Output<float>, Output<float>> rope_row(int64_t position, Input<double> inv_freq, double magnitude) {
    Output<float> cosine = output<float>(inv_freq.size());
    Output<float> sine = output<float>(inv_freq.size());
    spark::rope_row(position, inv_freq.data(), static_cast<int>(inv_freq.size()), magnitude, cosine.data(), sine.data());
    return {cosine, sine};
}

std::tuple<float, float> rotate(float a, float b, float cosine, float sine) {
    spark::rotate(a, b, cosine, sine);
    return {a, b};
}

std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> philox(uint64_t key, uint64_t low, uint64_t high) {
    const spark::Philox random = spark::philox(key, low, high);
    return {random.word[0], random.word[1], random.word[2], random.word[3]};
}

Output<float> dequantise_row(int type, Input<uint8_t> row) {
    const int columns = columns_of(type, row);
    Output<float> out = output<float>(static_cast<size_t>(columns));
    spark::dequantise_row(type, row.data(), columns, out.data());
    return out;
}

std::tuple<Output<int8_t>, Output<float>> quantise_row(Input<float> x, int form) {
    require(form == 32 || form == 256, "form must be 32 or 256");
    require(length(x) % form == 0, "a row must be a whole number of blocks");
    Output<int8_t> q = output<int8_t>(x.size());
    Output<float> a = output<float>(x.size() / static_cast<size_t>(form));
    spark::quantise_row(x.data(), length(x), form, q.data(), a.data());
    return {q, a};
}

float product(int type, Input<uint8_t> row, Input<int8_t> q, Input<float> a) {
    const int columns = columns_of(type, row);
    require(static_cast<int>(q.size()) == columns && length(a) * form_of(type) == columns, "rows of different lengths");
    std::vector<float> memory(static_cast<size_t>(spark::int_row_bytes(columns)) / 4 + 1);
    spark::IntRow unpacked = spark::int_row(memory.data(), columns);
    spark::unpack_row(type, row.data(), columns, unpacked);
    std::vector<int16_t> sums(static_cast<size_t>(columns) / 16);
    spark::sum_row(q.data(), columns, sums.data());
    return spark::product(unpacked, q.data(), a.data(), sums.data());
}

int32_t sample(Input<float> logits, float temperature, int32_t top_k, double top_p, double min_p, float repetition_penalty,
               float presence_penalty, float frequency_penalty, Input<int32_t> bias_ids, Input<float> bias_values,
               Input<int32_t> history, size_t prompt, uint64_t seed, uint64_t index) {
    require(logits.size() > 0, "no logits");
    require(bias_ids.size() == bias_values.size(), "not one bias for each id");
    for (size_t i = 0; i < bias_ids.size(); ++i)
        require(bias_ids.data()[i] >= 0 && static_cast<size_t>(bias_ids.data()[i]) < logits.size(), "bias of no token");
    require(prompt <= history.size(), "a prompt longer than the history");
    const spark::SamplerOptions options = {temperature,         top_k,           top_p,
                                           min_p,               repetition_penalty, presence_penalty,
                                           frequency_penalty,   bias_ids.data(), bias_values.data(),
                                           bias_ids.size(),     seed};
    const auto vocabulary = static_cast<int32_t>(logits.size());
    return spark::sample(logits.data(), vocabulary, options, {history.data(), prompt, history.size()}, index);
}

std::tuple<Output<int32_t>, Output<float>> logprobs(Input<float> logits, int32_t id, int32_t best) {
    require(id >= 0 && static_cast<size_t>(id) < logits.size() && best >= 0, "no such token");
    const std::vector<spark::Logprob> found =
        spark::logprobs(logits.data(), static_cast<int32_t>(logits.size()), id, best);
    Output<int32_t> ids = output<int32_t>(found.size());
    Output<float> values = output<float>(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
        ids.data()[i] = found[i].id;
        values.data()[i] = found[i].value;
    }
    return {ids, values};
}

}  // namespace

void bind_arithmetic(nb::module_& module) {
    module.def("sample", &sample, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
               "presence_penalty"_a, "frequency_penalty"_a, "bias_ids"_a, "bias_values"_a, "history"_a, "prompt"_a,
               "seed"_a, "index"_a, "The token chosen from float32 logits; ValueError when one is not finite.");
    module.def("logprobs", &logprobs, "logits"_a, "id"_a, "best"_a,
               "ids, logarithms of probabilities: those of `id`, then of the `best` most likely tokens");

    nb::module_ m = module.def_submodule("arithmetic", "docs/arithmetic.md, function by function.");
    m.def("exp", &map<float, float, spark::exp>);
    m.def("sigmoid", &map<float, float, spark::sigmoid>);
    m.def("silu", &map<float, float, spark::silu>);
    m.def("softplus", &map<float, float, spark::softplus>);
    m.def("log1p_unit", &map<float, float, spark::log1p_unit>);
    m.def("round_even", &map<float, float, spark::round_even>);
    m.def("f16_to_f32", &map<uint16_t, float, spark::f16_to_f32>);
    m.def("f32_to_f16", &map<float, uint16_t, spark::f32_to_f16>);
    m.def("bf16_to_f32", &map<uint16_t, float, spark::bf16_to_f32>);
    m.def("fma", &map_fma);
    m.def("dot32", &dot32);
    m.def("rms_factor", [](Input<float> x, float eps) { return spark::rms_factor(x.data(), length(x), eps); });
    m.def("l2_factor", [](Input<float> x, float eps) { return spark::l2_factor(x.data(), length(x), eps); });
    m.def("accumulate", &accumulate, "score, m, v, l, o -> m, l, o");
    m.def("merge", &merge, "m1, l1, o1, m2, l2, o2 -> m, l, o");
    m.def("rope_row", &rope_row, "position, inv_freq, magnitude -> cosines, sines");
    m.def("rotate", &rotate);
    m.def("philox", &philox);
    m.def("check_choice", [](Input<int32_t> ids, int top_k, int64_t experts, size_t layer) {
        spark::check_choice(ids.data(), static_cast<int64_t>(ids.size()) / top_k, top_k, experts, layer);
    });
    m.def("formats", &formats, "(ggml id, elements, bytes, class) of every type");
    m.def("dequantise_row", &dequantise_row);
    m.def("quantise_row", &quantise_row, "x, form -> q, a");
    m.def("product", &product, "type, weight row, q, a -> float");
}
