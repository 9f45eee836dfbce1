#include "cpu/linear.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/sampler.h"

namespace spark {

namespace {

// Weight rows that a thread takes at a time.
constexpr int64_t kGrain = 16;

void check(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(what);
}

}  // namespace

void multiply(Step& step, const Weight& weight, const Activations& x, int64_t rows, float* out, int64_t out_width) {
    Target* targets = step.work.targets.data();
    for (int64_t row = 0; row < rows; ++row) targets[row] = {row, out + row * out_width};
    step.pool.run(weight.rows, kGrain, [&](int64_t begin, int64_t end, int thread) {
        multiply(weight, begin, end, x, targets, rows, step.scratch[static_cast<size_t>(thread)].products);
    });
}

Embed::Embed(const Weight& weight, Value out) : weight_(weight), out_(out) {
    check(weight.columns == out.width, "embed: the rows of the weight are not as wide as the result");
}

void Embed::run(Step& step) {
    step.for_rows(out_.width, [&](int64_t row, int) {
        dequantise_row(weight_.format->id, weight_.row(step.tokens[row]), weight_.columns, step.row_of(out_, row));
    });
}

Linear::Linear(Step& step, Value x, const Weight& weight, Value out) : x_(x), weight_(weight), out_(out) {
    check(weight.columns == x.width && weight.rows == out.width, "linear: the weight is not [out width, x width]");
    step.reserve_products(weight, step.work.inputs, step.max_rows);
}

void Linear::run(Step& step) {
    const Activations& x = step.activations(x_, weight_.format->cls);
    multiply(step, weight_, x, step.rows, step.rows_of(out_), out_.width);
}

Logits::Logits(Step& step, Value x, const Weight& weight) : x_(x), weight_(weight) {
    check(weight.columns == x.width, "logits: the weight is not as wide as x");
    step.reserve_products(weight, step.work.gathered, step.max_rows);
    Workspace::reserve(step.work.inner, step.max_rows * x.width);
}

void Logits::run(Step& step) {
    float* gathered = step.work.inner.data();
    for (int64_t i = 0; i < step.logits_count; ++i) {
        const float* row = step.row_of(x_, step.logits_rows[i]);
        std::copy(row, row + x_.width, gathered + i * x_.width);
    }
    step.work.gathered.take(gathered, step.logits_count, x_.width);
    const Activations& x = step.work.gathered.get(step.pool, weight_.format->cls);
    multiply(step, weight_, x, step.logits_count, step.logits, weight_.rows);
    if (step.best_of == 0) return;
    step.pool.run(step.logits_count, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            step.best[i] = best_token(step.logits + i * weight_.rows, step.best_of);
    });
}

}  // namespace spark
