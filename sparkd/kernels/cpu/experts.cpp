#include "cpu/experts.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

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
    chosen_.reserve(experts);
}

void Experts::group(const Choice& choice, int64_t rows) {
    const int64_t pairs = rows * choice.top_k;
    std::fill(first_.begin(), first_.end(), 0);
    for (int64_t i = 0; i < pairs; ++i) ++first_[static_cast<size_t>(choice.ids[static_cast<size_t>(i)]) + 1];
    chosen_.clear();
    for (size_t e = 0; e + 1 < first_.size(); ++e) {
        if (first_[e + 1] > 0) chosen_.push_back(static_cast<int32_t>(e));
        first_[e + 1] += first_[e];
    }
    for (int64_t i = 0; i < pairs; ++i) {
        int32_t& next = first_[static_cast<size_t>(choice.ids[static_cast<size_t>(i)])];
        pairs_[static_cast<size_t>(next++)] = static_cast<int32_t>(i);
    }
    // Each first moved up to the next expert's: move all back.
    std::copy_backward(first_.begin(), first_.end() - 1, first_.end());
    first_[0] = 0;
}

void Experts::run(Step& step) {
    const Choice& choice = step.choices[choice_];
    const std::vector<uint64_t>& records = step.records[layer_];
    const int top_k = choice.top_k;
    group(choice, step.rows);

    float* inner = step.work.inner.data();
    float* up = step.work.up.data();
    float* ranked = step.work.ranked.data();
    for (size_t i = 0; i < static_cast<size_t>(step.rows * top_k); ++i) {
        const int64_t pair = pairs_[i];
        gates_[i] = {pair / top_k, inner + pair * gate_.rows};
        ups_[i] = {pair / top_k, up + pair * gate_.rows};
        downs_[i] = {pair, ranked + pair * down_.rows};
    }
    // Calls body(record, first pair, pairs, first weight row, weight row after the last, memory) for all weight rows of
    // every chosen expert.
    const auto for_weight_rows = [&](int64_t rows, const auto& body) {
        const int64_t parts = (rows + kGrain - 1) / kGrain;
        step.pool.run(static_cast<int64_t>(chosen_.size()) * parts, 1, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t i = begin; i < end; ++i) {
                const auto expert = static_cast<size_t>(chosen_[static_cast<size_t>(i / parts)]);
                const int64_t first = i % parts * kGrain;
                const auto pair = static_cast<size_t>(first_[expert]);
                body(records[expert], pair, static_cast<size_t>(first_[expert + 1]) - pair, first,
                     std::min(first + kGrain, rows), step.scratch[static_cast<size_t>(thread)].products);
            }
        });
    };

    const Activations& gate_x = step.activations(x_, gate_.format->cls);
    const Activations& up_x = step.activations(x_, up_.format->cls);
    for_weight_rows(gate_.rows, [&](uint64_t record, size_t pair, size_t pairs, int64_t begin, int64_t end,
                                    ProductMemory& memory) {
        multiply(gate_.in(record), begin, end, gate_x, &gates_[pair], static_cast<int64_t>(pairs), memory);
        multiply(up_.in(record), begin, end, up_x, &ups_[pair], static_cast<int64_t>(pairs), memory);
        for (size_t i = pair; i < pair + pairs; ++i)
            for (int64_t o = begin; o < end; ++o) gates_[i].out[o] = silu(gates_[i].out[o]) * ups_[i].out[o];
    });

    step.work.hidden.take(inner, step.rows * top_k, down_.columns);
    const Activations& hidden = step.work.hidden.get(step.pool, down_.format->cls);
    for_weight_rows(down_.rows, [&](uint64_t record, size_t pair, size_t pairs, int64_t begin, int64_t end,
                                    ProductMemory& memory) {
        multiply(down_.in(record), begin, end, hidden, &downs_[pair], static_cast<int64_t>(pairs), memory);
    });

    step.for_rows(top_k * down_.rows, [&](int64_t row, int) {
        const float* weights = choice.weights.data() + row * top_k;
        const float* y = ranked + row * top_k * down_.rows;
        float* out = step.row_of(out_, row);
        for (int64_t i = 0; i < down_.rows; ++i) out[i] = weights[0] * y[i];
        for (int rank = 1; rank < top_k; ++rank)
            for (int64_t i = 0; i < down_.rows; ++i) out[i] = fma(weights[rank], y[rank * down_.rows + i], out[i]);
    });
}

}  // namespace spark
