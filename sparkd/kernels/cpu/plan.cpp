#include "cpu/plan.h"

#include <algorithm>
#include <stdexcept>

#include "common/rope.h"

namespace spark {

Plan::Plan(int64_t max_rows, int threads, int64_t width) : step_(max_rows, threads) {
    // The largest count of (row, rank) pairs and page positions must fit the kernels' 32-bit indices.
    if (max_rows < 1 || max_rows > 1 << 20 || threads < 1 || threads > 1024)
        throw std::invalid_argument("a plan takes 1 to 2^20 rows and 1 to 1024 threads");
    step_.arena.resize(static_cast<size_t>(max_rows * width));
    step_.segment_of.resize(static_cast<size_t>(max_rows));
    step_.position.resize(static_cast<size_t>(max_rows));
    step_.waited.resize(static_cast<size_t>(max_rows));
}

size_t Plan::add_rope_table(std::vector<double> inv_freq, double magnitude) {
    const size_t floats = static_cast<size_t>(step_.max_rows) * inv_freq.size();
    step_.angles.push_back({std::move(inv_freq), magnitude, std::vector<float>(floats), std::vector<float>(floats)});
    return step_.angles.size() - 1;
}

size_t Plan::add_choice(int top_k) {
    const size_t pairs = static_cast<size_t>(step_.max_rows * top_k);
    step_.choices.push_back({top_k, std::vector<int32_t>(pairs), std::vector<float>(pairs)});
    return step_.choices.size() - 1;
}

size_t Plan::add_expert_layer(size_t experts) {
    step_.records.emplace_back(experts);
    return step_.records.size() - 1;
}

void Plan::take(Rows rows, float* logits) {
    step_.rows = rows.count;
    step_.tokens = rows.tokens;
    step_.segments = std::move(rows.segments);
    step_.logits_rows = rows.logits_rows;
    step_.logits_count = rows.logits_count;
    step_.logits = logits;
    step_.best_of = rows.best_of;
    step_.best = rows.best;
    step_.taken = -1;
    step_.paused = nullptr;
    std::fill(step_.waited.begin(), step_.waited.end(), 0);
    for (const Segment& segment : step_.segments) {
        for (int64_t i = 0; i < segment.length; ++i) {
            step_.segment_of[static_cast<size_t>(segment.row + i)] = &segment;
            step_.position[static_cast<size_t>(segment.row + i)] = segment.start + i;
        }
        if (segment.start == 0) {
            uint8_t* record = step_.state.records + segment.slot * step_.state.record_bytes;
            std::fill(record, record + step_.state.record_bytes, uint8_t{0});
        }
    }
    for (Angles& angles : step_.angles)
        step_.for_rows(32 * angles.pairs(), [&](int64_t row, int) {
            rope_row(step_.position[static_cast<size_t>(row)], angles.inv_freq.data(), angles.pairs(), angles.magnitude,
                     angles.cosine.data() + row * angles.pairs(), angles.sine.data() + row * angles.pairs());
        });
}

void Plan::run(Rows rows, float* logits, int16_t* experts, int32_t* waited) {
    const FloatEnvironment environment;
    take(std::move(rows), logits);
    experts_ = experts;
    waited_ = waited;
    next_ = 0;
    go_on();
}

void Plan::compute(const std::vector<int32_t>& experts, const std::vector<uint64_t>& addresses) {
    const FloatEnvironment environment;
    paused().compute(step_, experts, addresses);
}

void Plan::meanwhile() {
    const FloatEnvironment environment;
    Experts& waiting = paused();
    waiting.compute(step_, {}, {});
    for (size_t left = std::exchange(overtaking_, 0); left != 0; --left) operations_[next_++]->run(step_);
}

void Plan::resume() {
    const FloatEnvironment environment;
    paused().resume(step_);
    go_on();
}

Experts& Plan::paused() {
    if (step_.paused == nullptr) throw std::logic_error("no step is paused");
    return *step_.paused;
}

void Plan::go_on() {
    while (next_ < operations_.size()) {
        operations_[next_++]->run(step_);
        if (step_.paused != nullptr) {
            overtaking_ = overtakers_[next_ - 1];
            return;
        }
    }
    int16_t* experts = experts_;
    for (const Choice& choice : step_.choices) {
        const int32_t* ids = choice.ids.data();
        experts = std::transform(ids, ids + step_.rows * choice.top_k, experts,
                                 [](int32_t id) { return static_cast<int16_t>(id); });
    }
    std::copy_n(step_.waited.data(), step_.rows, waited_);
}

}  // namespace spark
