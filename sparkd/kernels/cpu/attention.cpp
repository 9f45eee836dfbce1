#include "cpu/attention.h"

#include <algorithm>
#include <stdexcept>

namespace spark {

namespace {

constexpr int kGroup = 16;  // pages

// A softmax over some positions that is not finished, in memory: see accumulate and merge.
struct Partial {
    float* memory;

    float& m() const { return memory[0]; }
    float& l() const { return memory[1]; }
    float* o() const { return memory + 2; }
    static int floats(int n) { return n + 2; }
};

// `into` becomes `from`, or its merge with the later `from`.
void take(const Partial& into, const Partial& from, bool empty, int n) {
    if (empty)
        std::copy(from.memory, from.memory + Partial::floats(n), into.memory);
    else
        merge(into.m(), into.l(), into.o(), from.m(), from.l(), from.o(), n);
}

// Rows of K or V of one page as floats; f16 is converted into `memory`.
const float* cached(const uint8_t* rows, bool half, int64_t count, float* memory) {
    if (!half) return reinterpret_cast<const float*>(rows);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(rows);
    for (int64_t i = 0; i < count; ++i) memory[i] = f16_to_f32(values[i]);
    return memory;
}

void write(const float* x, bool half, int n, uint8_t* row) {
    if (!half) {
        std::copy(x, x + n, reinterpret_cast<float*>(row));
        return;
    }
    uint16_t* values = reinterpret_cast<uint16_t*>(row);
    for (int i = 0; i < n; ++i) values[i] = f32_to_f16(x[i]);
}

}  // namespace

Attention::Attention(Step& step, Value q, Value k, Value v, Value out, const Shape& shape)
    : q_(q), k_(k), v_(v), out_(out), shape_(shape) {
    const int kv_width = shape.kv_heads * shape.head_dim;
    if (q.width != shape.heads * shape.head_dim || out.width != q.width || k.width != kv_width ||
        v.width != kv_width || shape.heads % shape.kv_heads != 0)
        throw std::invalid_argument("attention: heads do not fit");
    const int group = shape.heads / shape.kv_heads;
    step.reserve_scratch(kPage * shape.head_dim + group * (kPage + 3 * Partial::floats(shape.head_dim)));
}

void Attention::run(Step& step) {
    step.for_rows(2 * k_.width, [&](int64_t row, int) { store(step, row); });
    // Heads that share a KV head share the conversion of its cache, as long as that leaves work for every thread.
    const int group = shape_.heads / shape_.kv_heads;
    const int count = step.rows * shape_.kv_heads >= step.pool.threads() ? group : 1;
    const int64_t parts = shape_.heads / count;
    step.pool.run(step.rows * parts, 1, [&](int64_t begin, int64_t end, int thread) {
        float* scratch = step.scratch[static_cast<size_t>(thread)].floats.data();
        for (int64_t i = begin; i < end; ++i)
            attend(step, i / parts, static_cast<int>(i % parts) * count, count, scratch);
    });
}

void Attention::store(Step& step, int64_t row) const {
    const int n = shape_.head_dim;
    const int64_t position = step.position[static_cast<size_t>(row)];
    uint8_t* page = step.page(shape_.group, *step.segment_of[static_cast<size_t>(row)], position);
    const int64_t row_bytes = n * (step.state.half ? 2 : 4);
    for (int h = 0; h < shape_.kv_heads; ++h) {
        const int64_t place = (h * kPage + position % kPage) * row_bytes;
        write(step.row_of(k_, row) + h * n, step.state.half, n, page + shape_.k_offset + place);
        write(step.row_of(v_, row) + h * n, step.state.half, n, page + shape_.v_offset + place);
    }
}

void Attention::attend(Step& step, int64_t row, int first_head, int count, float* scratch) const {
    const int n = shape_.head_dim;
    const bool half = step.state.half;
    const Segment& segment = *step.segment_of[static_cast<size_t>(row)];
    const int64_t last = step.position[static_cast<size_t>(row)];
    const int64_t first = shape_.window > 0 ? std::max<int64_t>(0, last - shape_.window + 1) : 0;
    const int64_t row_bytes = n * (half ? 2 : 4);
    const int64_t kv_head = first_head / (shape_.heads / shape_.kv_heads) * kPage * row_bytes;
    const float* q = step.row_of(q_, row) + first_head * n;

    float* converted = scratch;
    float* scores = converted + kPage * n;
    float* partials = scores + count * kPage;
    const auto partial = [&](int kind, int h) {
        return Partial{partials + (kind * count + h) * Partial::floats(n)};
    };
    enum { PAGE, GROUP, ALL };
    bool group_empty = true, all_empty = true;
    const auto close_group = [&] {
        for (int h = 0; h < count; ++h) take(partial(ALL, h), partial(GROUP, h), all_empty, n);
        all_empty = false;
        group_empty = true;
    };

    for (int64_t number = first / kPage; number <= last / kPage; ++number) {
        if (number % kGroup == 0 && !group_empty) close_group();
        const int64_t start = number * kPage;
        const int64_t begin = std::max(first, start) - start;
        const int64_t visible = std::min(last, start + kPage - 1) - start + 1 - begin;
        const uint8_t* page = step.page(shape_.group, segment, start) + kv_head + begin * row_bytes;

        const float* k = cached(page + shape_.k_offset, half, visible * n, converted);
        for (int h = 0; h < count; ++h) {
            float* score = scores + h * kPage;
            for (int64_t j = 0; j < visible; ++j) score[j] = dot32(q + h * n, k + j * n, n) * shape_.scale;
            float& m = partial(PAGE, h).m();
            m = score[0];
            for (int64_t j = 1; j < visible; ++j) m = larger(m, score[j]);
        }
        const float* v = cached(page + shape_.v_offset, half, visible * n, converted);
        for (int h = 0; h < count; ++h) {
            const Partial p = partial(PAGE, h);
            p.l() = 0.0f;
            std::fill(p.o(), p.o() + n, 0.0f);
            for (int64_t j = 0; j < visible; ++j)
                accumulate(scores[h * kPage + j], p.m(), v + j * n, n, p.l(), p.o());
            take(partial(GROUP, h), p, group_empty, n);
        }
        group_empty = false;
    }
    close_group();

    for (int h = 0; h < count; ++h) {
        const Partial all = partial(ALL, h);
        float* out = step.row_of(out_, row) + (first_head + h) * n;
        const float inverse = 1.0f / all.l();
        for (int i = 0; i < n; ++i) out[i] = all.o()[i] * inverse;
    }
}

}  // namespace spark
