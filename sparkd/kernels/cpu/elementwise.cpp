#include "cpu/elementwise.h"

#include <algorithm>
#include <stdexcept>

#include "common/rope.h"

namespace spark {

namespace {

void check(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(what);
}

bool inside(const Heads& heads, int dim, Value value) {
    return heads.offset >= 0 && heads.offset + (heads.count - 1) * heads.stride + dim <= value.width;
}

// out = (x * factor) * weight, factor from x itself.
void norm(const float* x, const float* weight, int n, float eps, float* out) {
    const float factor = rms_factor(x, n, eps);
    for (int i = 0; i < n; ++i) out[i] = (x[i] * factor) * weight[i];
}

}  // namespace

RmsNorm::RmsNorm(Value x, const Weight& weight, Value out, float eps)
    : x_(x), weight_(float_vector(weight)), out_(out), eps_(eps) {
    check(weight.columns == x.width && out.width == x.width, "rms_norm: widths differ");
}

void RmsNorm::run(Step& step) {
    step.for_rows(x_.width, [&](int64_t row, int) {
        norm(step.row_of(x_, row), weight_, x_.width, eps_, step.row_of(out_, row));
    });
}

QkNorm::QkNorm(Value x, const Weight& weight, Value out, Heads heads, float eps)
    : x_(x), weight_(float_vector(weight)), out_(out), heads_(heads), eps_(eps) {
    check(weight.columns == heads.dim && out.width == heads.count * heads.dim && inside(heads, heads.dim, x),
          "qk_norm: heads do not fit");
}

void QkNorm::run(Step& step) {
    step.for_rows(out_.width, [&](int64_t row, int) {
        const float* x = step.row_of(x_, row) + heads_.offset;
        float* out = step.row_of(out_, row);
        for (int h = 0; h < heads_.count; ++h)
            norm(x + h * heads_.stride, weight_, heads_.dim, eps_, out + h * heads_.dim);
    });
}

Rope::Rope(Step& step, Value x, Value out, int heads, int head_dim, size_t table)
    : x_(x), out_(out), heads_(heads), head_dim_(head_dim), table_(table) {
    check(x.width == heads * head_dim && out.width == x.width && 2 * step.angles.at(table).pairs() <= head_dim,
          "rope: heads do not fit");
}

void Rope::run(Step& step) {
    const Angles& angles = step.angles[table_];
    const int pairs = angles.pairs();
    step.for_rows(x_.width, [&](int64_t row, int) {
        const float* cosine = angles.cosine.data() + row * pairs;
        const float* sine = angles.sine.data() + row * pairs;
        const float* x = step.row_of(x_, row);
        float* out = step.row_of(out_, row);
        std::copy(x, x + x_.width, out);
        for (int h = 0; h < heads_; ++h)
            for (int i = 0; i < pairs; ++i)
                rotate(out[h * head_dim_ + i], out[h * head_dim_ + pairs + i], cosine[i], sine[i]);
    });
}

OutputGate::OutputGate(Value x, Value gate, Value out, Heads heads, bool softplus, bool per_head)
    : x_(x), gate_(gate), out_(out), heads_(heads), softplus_(softplus), per_head_(per_head) {
    check(x.width == heads.count * heads.dim && out.width == x.width && inside(heads, per_head ? 1 : heads.dim, gate),
          "output_gate: heads do not fit");
}

void OutputGate::run(Step& step) {
    const int dim = heads_.dim;
    step.for_rows(x_.width, [&](int64_t row, int) {
        const float* x = step.row_of(x_, row);
        const float* gate = step.row_of(gate_, row) + heads_.offset;
        float* out = step.row_of(out_, row);
        for (int h = 0; h < heads_.count; ++h) {
            const float* g = gate + h * heads_.stride;
            if (per_head_) {
                const float factor = softplus_ ? softplus(g[0]) : sigmoid(g[0]);
                for (int i = 0; i < dim; ++i) out[h * dim + i] = x[h * dim + i] * factor;
            } else if (softplus_) {
                for (int i = 0; i < dim; ++i) out[h * dim + i] = x[h * dim + i] * softplus(g[i]);
            } else {
                for (int i = 0; i < dim; ++i) out[h * dim + i] = x[h * dim + i] * sigmoid(g[i]);
            }
        }
    });
}

GatedRmsNorm::GatedRmsNorm(Value x, Value gate, const Weight& weight, Value out, int heads, int head_dim, float eps)
    : x_(x), gate_(gate), weight_(float_vector(weight)), out_(out), heads_(heads), head_dim_(head_dim), eps_(eps) {
    check(weight.columns == head_dim && x.width == heads * head_dim && gate.width == x.width && out.width == x.width,
          "gated_rms_norm: heads do not fit");
}

void GatedRmsNorm::run(Step& step) {
    step.for_rows(x_.width, [&](int64_t row, int) {
        const float* x = step.row_of(x_, row);
        const float* gate = step.row_of(gate_, row);
        float* out = step.row_of(out_, row);
        for (int h = 0; h < heads_; ++h) norm(x + h * head_dim_, weight_, head_dim_, eps_, out + h * head_dim_);
        for (int i = 0; i < x_.width; ++i) out[i] = out[i] * silu(gate[i]);
    });
}

void SwiGlu::run(Step& step) {
    step.for_rows(out_.width, [&](int64_t row, int) {
        const float* gate = step.row_of(gate_, row);
        const float* up = step.row_of(up_, row);
        float* out = step.row_of(out_, row);
        for (int i = 0; i < out_.width; ++i) out[i] = silu(gate[i]) * up[i];
    });
}

void Add::run(Step& step) {
    step.for_rows(out_.width, [&](int64_t row, int) {
        const float* x = step.row_of(x_, row);
        const float* y = step.row_of(y_, row);
        float* out = step.row_of(out_, row);
        for (int i = 0; i < out_.width; ++i) out[i] = x[i] + y[i];
    });
}

}  // namespace spark
