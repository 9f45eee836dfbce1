#include "cpu/host_experts.h"

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace spark {

HostExperts::HostExperts(int64_t max_rows, int threads, int top_k, const int32_t* told, const float* x, float* results)
    : step_(max_rows, threads), told_(told), x_(x), results_(results) {
    if (max_rows < 1 || threads < 1 || threads > 1024 || top_k < 1)
        throw std::invalid_argument("experts of a device's step: rows, threads and top_k are 1 at least");
    const auto pairs = static_cast<size_t>(max_rows * top_k);
    step_.choices.push_back({top_k, std::vector<int32_t>(pairs), {}});
}

void* HostExperts::add_layer(const Weight& gate, const Weight& up, const Weight& down,
                             const std::vector<uint64_t>& records) {
    if (std::count(records.begin(), records.end(), uint64_t{0}) != 0)
        throw std::invalid_argument("every record has an address");
    const size_t number = layers_.size();
    step_.records.push_back(records);
    // The rows lie where the device puts them, not in an arena: see `compute`.
    const Value x = {0, 0, gate.columns}, out = {1, 0, static_cast<int>(down.rows)};
    auto experts = std::make_unique<Experts>(step_, x, size_t{0}, out, number, gate, up, down);
    layers_.push_back(std::make_unique<Layer>(Layer{this, number, gate.columns, std::move(experts)}));
    return layers_.back().get();
}

void HostExperts::call(void* layer) noexcept {
    Layer& called = *static_cast<Layer*>(layer);
    HostExperts& self = *called.owner;
    if (!self.failure_.empty()) return;
    try {
        const FloatEnvironment environment;
        self.compute(called);
    } catch (const std::exception& error) {
        self.failure_ = "expert layer " + std::to_string(called.number) + ": " + error.what();
    }
}

void HostExperts::compute(Layer& layer) {
    Choice& choice = step_.choices[0];
    step_.rows = told_[0];
    if (step_.rows < 0 || step_.rows > step_.max_rows)
        throw std::logic_error(std::to_string(step_.rows) + " rows are told of, " + std::to_string(step_.max_rows) +
                               " may be");
    const auto experts = static_cast<int32_t>(step_.records[layer.number].size());
    bool any = false;
    for (int64_t i = 0; i < step_.rows * choice.top_k; ++i) {
        const int32_t id = told_[1 + i];
        if (id < -1 || id >= experts)
            throw std::logic_error("expert " + std::to_string(id) + " is wanted, there are " + std::to_string(experts));
        choice.ids[static_cast<size_t>(i)] = id;
        any = any || id >= 0;
    }
    if (!any) return;
    step_.work.inputs.take(x_, step_.rows, layer.width);
    step_.taken = 0;
    layer.experts->compute_some(step_, results_);
}

}  // namespace spark
