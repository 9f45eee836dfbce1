#include "cpu/attention.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/float_kernels.h"

namespace spark {

namespace {

constexpr int kGroup = 16;     // pages
constexpr int64_t kBlock = 8;  // rows that share the conversion of a page

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
    halves_to_floats(reinterpret_cast<const uint16_t*>(rows), count, memory);
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
    step.reserve_scratch(2 * kPage * shape.head_dim + kPage + kBlock * group * 3 * Partial::floats(shape.head_dim));
    blocks_.reserve(static_cast<size_t>(step.max_rows));
}

void Attention::run(Step& step) {
    step.for_rows(2 * k_.width, [&](int64_t row, int) { store(step, row); });
    // Heads that share a KV head and rows that follow each other share the conversion of its cache, as long as that
    // leaves work for every thread.
    const int group = shape_.heads / shape_.kv_heads;
    const int count = step.rows * shape_.kv_heads >= step.pool.threads() ? group : 1;
    const int64_t parts = shape_.heads / count;
    blocks_.clear();
    for (const Segment& segment : step.segments)
        for (int64_t first = 0; first < segment.length; first += kBlock)
            blocks_.push_back({segment.row + first, std::min(kBlock, segment.length - first)});
    step.pool.run(static_cast<int64_t>(blocks_.size()) * parts, 1, [&](int64_t begin, int64_t end, int thread) {
        float* scratch = step.scratch[static_cast<size_t>(thread)].floats.data();
        for (int64_t i = begin; i < end; ++i)
            attend(step, blocks_[static_cast<size_t>(i / parts)], static_cast<int>(i % parts) * count, count, scratch);
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

void Attention::attend(Step& step, const Block& rows, int first_head, int count, float* scratch) const {
    const int n = shape_.head_dim;
    const bool half = step.state.half;
    const Segment& segment = *step.segment_of[static_cast<size_t>(rows.first)];
    const int64_t row_bytes = n * (half ? 2 : 4);
    const int64_t kv_head = first_head / (shape_.heads / shape_.kv_heads) * kPage * row_bytes;
    const auto last_of = [&](int64_t r) { return step.position[static_cast<size_t>(rows.first + r)]; };
    const auto first_of = [&](int64_t r) {
        return shape_.window > 0 ? std::max<int64_t>(0, last_of(r) - shape_.window + 1) : 0;
    };

    float* k_memory = scratch;
    float* v_memory = k_memory + kPage * n;
    float* scores = v_memory + kPage * n;
    float* partials = scores + kPage;
    enum Kind { PAGE, GROUP, ALL };
    const auto partial = [&](Kind kind, int64_t r, int h) {
        return Partial{partials + ((r * count + h) * 3 + kind) * Partial::floats(n)};
    };
    bool group_empty[kBlock], all_empty[kBlock];
    std::fill(group_empty, group_empty + kBlock, true);
    std::fill(all_empty, all_empty + kBlock, true);
    const auto close_group = [&](int64_t r) {
        if (group_empty[r]) return;
        for (int h = 0; h < count; ++h) take(partial(ALL, r, h), partial(GROUP, r, h), all_empty[r], n);
        all_empty[r] = false;
        group_empty[r] = true;
    };

    const int64_t last = last_of(rows.count - 1);
    for (int64_t number = first_of(0) / kPage; number <= last / kPage; ++number) {
        const int64_t start = number * kPage;
        // Positions of the page that the first row sees or a later one: places from `from` on.
        const int64_t from = std::max(first_of(0), start) - start;
        const int64_t seen = std::min(last, start + kPage - 1) - start + 1 - from;
        const uint8_t* page = step.page(shape_.group, segment, start) + kv_head + from * row_bytes;
        const float* k = cached(page + shape_.k_offset, half, seen * n, k_memory);
        const float* v = cached(page + shape_.v_offset, half, seen * n, v_memory);
        for (int64_t r = 0; r < rows.count; ++r) {
            if (number % kGroup == 0) close_group(r);
            const int64_t begin = std::max(first_of(r), start) - start;
            const int64_t end = std::min(last_of(r), start + kPage - 1) - start + 1;
            if (begin >= end) continue;
            const int visible = static_cast<int>(end - begin);
            const float* q = step.row_of(q_, rows.first + r) + first_head * n;
            for (int h = 0; h < count; ++h) {
                const Partial p = partial(PAGE, r, h);
                dot_rows(q + h * n, k + (begin - from) * n, visible, n, scores);
                for (int j = 0; j < visible; ++j) scores[j] = scores[j] * shape_.scale;
                float m = scores[0];
                for (int j = 1; j < visible; ++j) m = larger(m, scores[j]);
                exp_row(scores, m, visible, scores);
                float l = 0.0f;
                for (int j = 0; j < visible; ++j) l = l + scores[j];
                p.m() = m;
                p.l() = l;
                std::fill(p.o(), p.o() + n, 0.0f);
                add_scaled_rows(scores, v + (begin - from) * n, visible, n, p.o());
                take(partial(GROUP, r, h), p, group_empty[r], n);
            }
            group_empty[r] = false;
        }
    }

    for (int64_t r = 0; r < rows.count; ++r) {
        close_group(r);
        for (int h = 0; h < count; ++h) {
            const Partial all = partial(ALL, r, h);
            float* out = step.row_of(out_, rows.first + r) + (first_head + h) * n;
            const float inverse = 1.0f / all.l();
            for (int i = 0; i < n; ++i) out[i] = all.o()[i] * inverse;
        }
    }
}

}  // namespace spark
