// Python bindings of the plan: one method per operation, and the step (for sparkd/executors/native.py); experts of a
// device's step (for sparkd/executors/cuda_host.py).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "cpu/attention.h"
#include "cpu/elementwise.h"
#include "cpu/experts.h"
#include "cpu/host_experts.h"
#include "cpu/linear.h"
#include "cpu/plan.h"
#include "cpu/recurrent.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace spark;

template <typename T, int DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<DIMENSIONS>, nb::c_contig, nb::device::cpu>;
using Integers = Array<const int32_t, 1>;

void set_state(Plan& plan, const std::vector<uint64_t>& pages, std::vector<int64_t> page_bytes, uint64_t records,
               int64_t record_bytes, int kv_bytes) {
    if (kv_bytes != 2 && kv_bytes != 4) throw nb::value_error("K and V take 2 or 4 bytes");
    State& state = plan.step().state;
    state.pages.clear();
    for (uint64_t address : pages) state.pages.push_back(reinterpret_cast<uint8_t*>(address));
    state.page_bytes = std::move(page_bytes);
    state.records = reinterpret_cast<uint8_t*>(records);
    state.record_bytes = record_bytes;
    state.half = kv_bytes == 2;
}

// Row l holds the addresses of the experts of layer l; what follows them is not looked at.
void publish(Plan& plan, Array<const uint64_t, 2> addresses) {
    std::vector<std::vector<uint64_t>>& layers = plan.step().records;
    if (addresses.shape(0) != layers.size()) throw nb::value_error("one row of addresses per expert layer");
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        if (layers[layer].size() > addresses.shape(1)) throw nb::value_error("one address per expert of a layer");
        std::copy_n(addresses.data() + layer * addresses.shape(1), layers[layer].size(), layers[layer].data());
    }
}

// Where a step waits: the expert layer, and the experts that are absent, those that decode rows chose and the others.
using Pause = std::tuple<size_t, std::vector<int32_t>, std::vector<int32_t>>;

std::optional<Pause> pause(Plan& plan) {
    const Step& step = plan.step();
    if (step.paused == nullptr) return std::nullopt;
    Pause result = {step.paused->layer(), {}, {}};
    for (int32_t expert : step.paused->absent())
        (step.paused->decode(step, expert) ? std::get<1>(result) : std::get<2>(result)).push_back(expert);
    return result;
}

// Segments are rows of (length, start, slot, whether decode, and per page group the index of its first entry in
// `tables`). All arrays are used until the step has ended.
std::optional<Pause> run_step(Plan& plan, Integers tokens, Array<const int64_t, 2> segments, Integers tables,
                              Integers logits_rows, Array<float, 2> logits, int32_t best_of,
                              Array<int32_t, 1> best, Array<int16_t, 3> experts, Array<int32_t, 1> waited) {
    if (best_of < 0 || static_cast<size_t>(best_of) > logits.shape(1)) throw nb::value_error("best of too many ids");
    Plan::Rows rows = {tokens.data(), static_cast<int64_t>(tokens.size()), {}, logits_rows.data(),
                       static_cast<int64_t>(logits_rows.size()), best_of, best.data()};
    const size_t fields = segments.shape(1);
    int64_t row = 0;
    for (size_t i = 0; i < segments.shape(0); ++i) {
        const int64_t* field = segments.data() + i * fields;
        Segment segment = {row, field[0], field[1], field[2], field[3] != 0, {}};
        for (size_t group = 4; group < fields; ++group) segment.pages.push_back(tables.data() + field[group]);
        row += segment.length;
        rows.segments.push_back(std::move(segment));
    }
    {
        nb::gil_scoped_release unlocked;
        plan.run(std::move(rows), logits.data(), experts.data(), waited.data());
    }
    return pause(plan);
}

void compute(Plan& plan, const std::vector<int32_t>& experts, const std::vector<uint64_t>& addresses) {
    nb::gil_scoped_release unlocked;
    plan.compute(experts, addresses);
}

void meanwhile(Plan& plan) {
    nb::gil_scoped_release unlocked;
    plan.meanwhile();
}

std::optional<Pause> resume(Plan& plan) {
    {
        nb::gil_scoped_release unlocked;
        plan.resume();
    }
    return pause(plan);
}

void trace(Plan& plan, Value value, Array<float, 2> out) {
    const float* rows = plan.step().rows_of(value);
    std::copy(rows, rows + out.size(), out.data());
}

void bind_operations(nb::class_<Plan>& plan) {
    plan.def("embed", [](Plan& p, const Weight& weight, Value out) { p.add<Embed>(weight, out); });
    plan.def("rms_norm", [](Plan& p, Value x, const Weight& weight, Value out, float eps) {
        p.add<RmsNorm>(x, weight, out, eps);
    });
    plan.def("linear", [](Plan& p, Value x, const Weight& weight, Value out) {
        p.add<Linear>(p.step(), x, weight, out);
    });
    plan.def("qk_norm", [](Plan& p, Value x, const Weight& weight, Value out, int heads, int head_dim, float eps,
                           int stride, int offset) {
        p.add<QkNorm>(x, weight, out, Heads{heads, head_dim, stride, offset}, eps);
    });
    plan.def("rope", [](Plan& p, Value x, Value out, int heads, int head_dim, size_t table) {
        p.add<Rope>(p.step(), x, out, heads, head_dim, table);
    });
    plan.def("attention", [](Plan& p, Value q, Value k, Value v, Value out, int heads, int kv_heads, int head_dim,
                             float scale, int window, size_t group, int64_t k_offset, int64_t v_offset) {
        p.add<Attention>(p.step(), q, k, v, out,
                         Attention::Shape{heads, kv_heads, head_dim, scale, window, group, k_offset, v_offset});
    });
    plan.def("output_gate", [](Plan& p, Value x, Value gate, Value out, int heads, int head_dim, bool softplus,
                               bool per_head, int stride, int offset) {
        p.add<OutputGate>(x, gate, out, Heads{heads, head_dim, stride, offset}, softplus, per_head);
    });
    plan.def("causal_conv", [](Plan& p, Value x, const Weight& weight, Value out, int taps, int64_t state_offset) {
        p.add<CausalConv>(p.step(), x, weight, out, taps, state_offset);
    });
    plan.def("gated_delta", [](Plan& p, Value qkv, Value alpha, Value beta, const Weight& a, const Weight& dt_bias,
                               Value out, int k_heads, int v_heads, int head_dim, float eps, int64_t state_offset) {
        p.add<GatedDelta>(p.step(), qkv, alpha, beta, a, dt_bias, out,
                          GatedDelta::Shape{k_heads, v_heads, head_dim, eps, state_offset});
    });
    plan.def("gated_rms_norm", [](Plan& p, Value x, Value gate, const Weight& weight, Value out, int heads,
                                  int head_dim, float eps) {
        p.add<GatedRmsNorm>(x, gate, weight, out, heads, head_dim, eps);
    });
    plan.def("route", [](Plan& p, Value x, const Weight& weight, std::optional<Weight> bias, size_t choice,
                         bool sigmoid, float scale) {
        const float* values = bias ? float_vector(*bias) : nullptr;
        p.add<Route>(p.step(), x, weight, values, choice, sigmoid, scale);
    }, "x"_a, "weight"_a, "bias"_a.none(), "choice"_a, "sigmoid"_a, "scale"_a);
    plan.def("experts", [](Plan& p, Value x, size_t choice, Value out, size_t layer, const Weight& gate,
                           const Weight& up, const Weight& down) {
        p.add<Experts>(p.step(), x, choice, out, layer, gate, up, down);
    });
    plan.def("swiglu", [](Plan& p, Value gate, Value up, Value out) { p.add<SwiGlu>(gate, up, out); });
    plan.def("add", [](Plan& p, Value x, Value y, Value out) { p.add<Add>(x, y, out); });
    plan.def("logits", [](Plan& p, Value x, const Weight& weight) { p.add<Logits>(p.step(), x, weight); });
}

// Addresses are those of memory that outlives it; `call` and what `layer` gives are for the driver of a device.
void bind_host_experts(nb::module_& module) {
    nb::class_<HostExperts> host(module, "HostExperts");
    host.def("__init__", [](HostExperts* self, int64_t max_rows, int threads, int top_k, uint64_t told, uint64_t x,
                            uint64_t results) {
        new (self) HostExperts(max_rows, threads, top_k, reinterpret_cast<const int32_t*>(told),
                               reinterpret_cast<const float*>(x), reinterpret_cast<float*>(results));
    });
    host.def("layer", [](HostExperts& h, const Weight& gate, const Weight& up, const Weight& down,
                         const std::vector<uint64_t>& records) {
        return reinterpret_cast<uint64_t>(h.add_layer(gate, up, down, records));
    });
    host.def_prop_ro_static("call", [](nb::handle) { return reinterpret_cast<uint64_t>(&HostExperts::call); });
    host.def_prop_ro("failure", &HostExperts::failure);
}

}  // namespace

void bind_plan(nb::module_& module) {
    module.def("products_path", &products_path, "Which kernels compute products with weights of a ggml type.");
    nb::class_<Weight>(module, "Weight").def(nb::init<uint64_t, int, int64_t, int>());
    nb::class_<Value>(module, "Value").def("__init__", [](Value* self, int id, int64_t offset, int width) {
        new (self) Value{id, offset, width};
    });
    bind_host_experts(module);
    nb::class_<Plan> plan(module, "Plan");
    plan.def(nb::init<int64_t, int, int64_t>());
    plan.def("rope_table", &Plan::add_rope_table);
    plan.def("choice", &Plan::add_choice);
    plan.def("expert_layer", &Plan::add_expert_layer);
    bind_operations(plan);
    plan.def("overtakers", &Plan::add_overtakers);
    plan.def("state", set_state);
    plan.def("publish", publish);
    plan.def("step", run_step);
    plan.def("meanwhile", meanwhile);
    plan.def("compute", compute);
    plan.def("resume", resume);
    plan.def("waiting_rows", [](Plan& p, int32_t expert) { return p.paused().rows_of(p.step(), expert); });
    plan.def("trace", trace);
}
