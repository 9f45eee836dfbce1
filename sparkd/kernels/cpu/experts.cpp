#include "cpu/experts.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/linear.h"

namespace spark {

namespace {

constexpr int64_t kGrain = 16;               // weight rows that a thread takes at a time
constexpr float kSmallestSum = 0x1p-14f;     // 6.103515625e-5
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The `k` largest keys, best first, ties to the lowest id; a NaN counts as -infinity. Always k different ids.
void largest(const float* keys, int n, int k, int32_t* ids) {
    float last_key = 0.0f;
    for (int rank = 0; rank < k; ++rank) {
        int best = -1;
        float best_key = kLowest;
        for (int id = 0; id < n; ++id) {
            const float key = keys[id] == keys[id] ? keys[id] : kLowest;
            const bool left = rank == 0 || key < last_key || (key == last_key && id > ids[rank - 1]);
            if (left && (best < 0 || key > best_key)) {
                best = id;
                best_key = key;
            }
        }
        ids[rank] = best;
        last_key = best_key;
    }
}

}  // namespace

void check_choice(const int32_t* ids, int64_t rows, int top_k, int64_t experts, size_t layer) {
    const auto refuse = [&](const std::string& what) {
        throw std::logic_error("expert layer " + std::to_string(layer) + " chose " + what);
    };
    for (const int32_t* row = ids; row != ids + rows * top_k; row += top_k)
        for (int rank = 0; rank < top_k; ++rank) {
            if (row[rank] < 0 || row[rank] >= experts)
                refuse("an expert outside 0 to " + std::to_string(experts - 1));
            if (std::find(row, row + rank, row[rank]) != row + rank) refuse("one expert twice for a row");
        }
}

Route::Route(Step& step, Value x, const Weight& weight, const float* bias, size_t choice, bool sigmoid, float scale)
    : x_(x), weight_(weight), bias_(bias), choice_(choice), sigmoid_(sigmoid), scale_(scale) {
    const int top_k = step.choices.at(choice).top_k;
    if (weight.columns != x.width || top_k < 1 || top_k > weight.rows || weight.rows > 32768)
        throw std::invalid_argument("route: the weight is not [experts, x width], or top_k is not within its rows");
    step.reserve_products(weight, step.work.inputs, step.max_rows);
    step.reserve_scratch(2 * weight.rows);
    Workspace::reserve(step.work.inner, step.max_rows * weight.rows);
}

void Route::run(Step& step) {
    float* logits = step.work.inner.data();
    multiply(step, weight_, step.activations(x_, weight_.format->cls), step.rows, logits, weight_.rows);
    Choice& choice = step.choices[choice_];
    step.for_rows(weight_.rows * choice.top_k, [&](int64_t row, int thread) {
        choose(logits + row * weight_.rows, step.scratch[static_cast<size_t>(thread)].floats.data(),
               choice.ids.data() + row * choice.top_k, choice.weights.data() + row * choice.top_k, choice.top_k);
    });
}

void Route::choose(const float* logits, float* scratch, int32_t* ids, float* weights, int top_k) const {
    const int n = static_cast<int>(weight_.rows);
    float sum = 0.0f;
    if (sigmoid_) {
        float* p = scratch;
        float* keys = scratch + n;
        for (int i = 0; i < n; ++i) p[i] = sigmoid(logits[i]);
        for (int i = 0; i < n; ++i) keys[i] = bias_ == nullptr ? p[i] : p[i] + bias_[i];
        largest(keys, n, top_k, ids);
        for (int rank = 0; rank < top_k; ++rank) weights[rank] = p[ids[rank]];
        for (int rank = 0; rank < top_k; ++rank) sum = sum + weights[rank];
        sum = larger(sum, kSmallestSum);
    } else {
        largest(logits, n, top_k, ids);
        for (int rank = 0; rank < top_k; ++rank) weights[rank] = exp(logits[ids[rank]] - logits[ids[0]]);
        for (int rank = 0; rank < top_k; ++rank) sum = sum + weights[rank];
    }
    for (int rank = 0; rank < top_k; ++rank) weights[rank] = weights[rank] / sum;
    if (scale_ != 1.0f)
        for (int rank = 0; rank < top_k; ++rank) weights[rank] = weights[rank] * scale_;
}

Experts::Experts(Step& step, Value x, size_t choice, Value out, size_t layer, const Weight& gate, const Weight& up,
                 const Weight& down)
    : x_(x), choice_(choice), out_(out), layer_(layer), gate_(gate), up_(up), down_(down) {
    if (gate.columns != x.width || up.columns != x.width || up.rows != gate.rows || down.columns != gate.rows ||
        down.rows != out.width)
        throw std::invalid_argument("experts: gate and up are not [inner, x width], or down is not [out width, inner]");
    const int64_t pairs = step.max_rows * step.choices.at(choice).top_k;
    const size_t experts = step.records.at(layer).size();
    step.reserve_products(gate, step.work.inputs, step.max_rows);
    step.reserve_products(up, step.work.inputs, step.max_rows);
    step.reserve_products(down, step.work.hidden, pairs);
    Workspace::reserve(step.work.inner, pairs * gate.rows);
    Workspace::reserve(step.work.up, pairs * gate.rows);
    Workspace::reserve(step.work.ranked, pairs * down.rows);
    for (auto* targets : {&gates_, &ups_, &downs_}) targets->resize(static_cast<size_t>(pairs));
    pairs_.resize(static_cast<size_t>(pairs));
    first_.resize(experts + 1);
    awaited_.resize(experts);
    absent_.reserve(experts);
    parts_.reserve(experts);
}

void Experts::group(const Choice& choice, int64_t rows) {
    const int64_t pairs = rows * choice.top_k;
    std::fill(first_.begin(), first_.end(), 0);
    for (int64_t i = 0; i < pairs; ++i) {
        const int32_t id = choice.ids[static_cast<size_t>(i)];
        if (id >= 0) ++first_[static_cast<size_t>(id) + 1];
    }
    for (size_t e = 0; e + 1 < first_.size(); ++e) first_[e + 1] += first_[e];
    for (int64_t i = 0; i < pairs; ++i) {
        const int32_t id = choice.ids[static_cast<size_t>(i)];
        if (id >= 0) pairs_[static_cast<size_t>(first_[static_cast<size_t>(id)]++)] = static_cast<int32_t>(i);
    }
    // Each first moved up to the next expert's: move all back.
    std::copy_backward(first_.begin(), first_.end() - 1, first_.end());
    first_[0] = 0;
}

void Experts::run(Step& step) {
    const std::vector<uint64_t>& records = step.records[layer_];
    const Choice& choice = step.choices[choice_];
    check_choice(choice.ids.data(), step.rows, choice.top_k, static_cast<int64_t>(records.size()), layer_);
    group(choice, step.rows);
    absent_.clear();
    parts_.clear();
    for (size_t e = 0; e < records.size(); ++e) {
        if (first_[e] == first_[e + 1]) continue;
        if (records[e] != 0)
            parts_.push_back({records[e], first_[e], first_[e + 1]});
        else
            absent_.push_back(static_cast<int32_t>(e));
    }
    if (absent_.empty()) {
        compute_parts(step);
        sum(step);
        return;
    }
    step.paused = this;
    std::fill(awaited_.begin(), awaited_.end(), uint8_t{0});
    for (const int32_t expert : absent_) {
        awaited_[static_cast<size_t>(expert)] = 1;
        for_rows_of(step, expert, [&](int64_t row) { ++step.waited[static_cast<size_t>(row)]; });
    }
}

bool Experts::decode(const Step& step, int32_t expert) const {
    bool any = false;
    for_rows_of(step, expert, [&](int64_t row) { any = any || step.segment_of[static_cast<size_t>(row)]->decode; });
    return any;
}

std::vector<int32_t> Experts::rows_of(const Step& step, int32_t expert) const {
    if (static_cast<size_t>(expert) >= awaited_.size()) throw std::invalid_argument("experts: no such expert");
    std::vector<int32_t> rows;
    for_rows_of(step, expert, [&](int64_t row) { rows.push_back(static_cast<int32_t>(row)); });
    return rows;
}

void Experts::compute(Step& step, const std::vector<int32_t>& experts, const std::vector<uint64_t>& addresses) {
    if (experts.size() != addresses.size()) throw std::invalid_argument("one address per expert");
    compute_parts(step);
    for (size_t i = 0; i < experts.size(); ++i) {
        const auto e = static_cast<size_t>(experts[i]);
        if (e >= awaited_.size() || !awaited_[e] || addresses[i] == 0)
            throw std::invalid_argument("experts: a record that is not awaited, or has no address");
        awaited_[e] = 0;
        parts_.push_back({addresses[i], first_[e], first_[e + 1]});
    }
    compute_parts(step);
}

void Experts::resume(Step& step) {
    compute_parts(step);
    if (std::count(awaited_.begin(), awaited_.end(), 1) != 0)
        throw std::invalid_argument("experts: records are still awaited");
    step.paused = nullptr;
    sum(step);
}

void Experts::compute_some(Step& step, float* results) {
    const std::vector<uint64_t>& records = step.records[layer_];
    group(step.choices[choice_], step.rows);
    parts_.clear();
    for (size_t e = 0; e < records.size(); ++e)
        if (first_[e] != first_[e + 1]) parts_.push_back({records[e], first_[e], first_[e + 1]});
    compute_parts(step, results);
}

void Experts::compute_parts(Step& step, float* ranked) {
    if (parts_.empty()) return;
    const Choice& choice = step.choices[choice_];
    const int top_k = choice.top_k;
    float* inner = step.work.inner.data();
    float* up = step.work.up.data();
    // Inner rows lie in the order of the parts; results where the sum looks for them.
    size_t count = 0;
    for (Part& part : parts_) {
        const auto first = static_cast<size_t>(part.first), end = static_cast<size_t>(part.end);
        part.first = static_cast<int32_t>(count);
        for (size_t i = first; i < end; ++i, ++count) {
            const int64_t pair = pairs_[i], place = static_cast<int64_t>(count);
            gates_[count] = {pair / top_k, inner + place * gate_.rows};
            ups_[count] = {pair / top_k, up + place * gate_.rows};
            downs_[count] = {place, ranked + pair * down_.rows};
        }
        part.end = static_cast<int32_t>(count);
    }
    // Calls body(record, first target, targets, first weight row, weight row after the last, memory) for all weight
    // rows of every part; those of a part that a thread takes at a time in one call.
    const auto for_weight_rows = [&](int64_t rows, const auto& body) {
        const int64_t grains = (rows + kGrain - 1) / kGrain;
        step.pool.run(static_cast<int64_t>(parts_.size()) * grains, 1, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t i = begin, next; i < end; i = next) {
                const int64_t e = i / grains;
                next = std::min((e + 1) * grains, end);
                const Part& part = parts_[static_cast<size_t>(e)];
                body(part.record, static_cast<size_t>(part.first), static_cast<size_t>(part.end - part.first),
                     (i - e * grains) * kGrain, std::min((next - e * grains) * kGrain, rows),
                     step.scratch[static_cast<size_t>(thread)].products);
            }
        });
    };

    const Activations& gate_x = step.activations(x_, gate_.format->cls);
    const Activations& up_x = step.activations(x_, up_.format->cls);
    for_weight_rows(gate_.rows, [&](uint64_t record, size_t target, size_t targets, int64_t begin, int64_t end,
                                    ProductMemory& memory) {
        multiply(gate_.in(record), begin, end, gate_x, &gates_[target], static_cast<int64_t>(targets), memory);
        multiply(up_.in(record), begin, end, up_x, &ups_[target], static_cast<int64_t>(targets), memory);
        for (size_t i = target; i < target + targets; ++i)
            for (int64_t o = begin; o < end; ++o) gates_[i].out[o] = silu(gates_[i].out[o]) * ups_[i].out[o];
    });

    step.work.hidden.take(inner, static_cast<int64_t>(count), down_.columns);
    const Activations& hidden = step.work.hidden.get(step.pool, down_.format->cls);
    for_weight_rows(down_.rows, [&](uint64_t record, size_t target, size_t targets, int64_t begin, int64_t end,
                                    ProductMemory& memory) {
        multiply(down_.in(record), begin, end, hidden, &downs_[target], static_cast<int64_t>(targets), memory);
    });
    parts_.clear();
}

void Experts::sum(Step& step) {
    const Choice& choice = step.choices[choice_];
    const int top_k = choice.top_k;
    step.for_rows(top_k * down_.rows, [&](int64_t row, int) {
        const float* weights = choice.weights.data() + row * top_k;
        const float* y = step.work.ranked.data() + row * top_k * down_.rows;
        float* out = step.row_of(out_, row);
        for (int64_t i = 0; i < down_.rows; ++i) out[i] = weights[0] * y[i];
        for (int rank = 1; rank < top_k; ++rank)
            for (int64_t i = 0; i < down_.rows; ++i) out[i] = fma(weights[rank], y[rank * down_.rows + i], out[i]);
    });
}

}  // namespace spark
