#include "cpu/attention.h"

#include <algorithm>
#include <stdexcept>

namespace spark {

namespace {

constexpr int kGroup = 16;  // pages

// A softmax over some positions that is not finished: see accumulate and merge.
struct Partial {
    float m, l;
    float* o;
};

void copy(const Partial& from, Partial& to, int n) {
    to.m = from.m;
    to.l = from.l;
    std::copy(from.o, from.o + n, to.o);
}

// Element 0 of a K or V row of the cache as floats; rows of f16 are converted into `memory`.
const float* cached(const uint8_t* row, bool half, int n, float* memory) {
    if (!half) return reinterpret_cast<const float*>(row);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(row);
    for (int i = 0; i < n; ++i) memory[i] = f16_to_f32(values[i]);
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

// Positions `first` to `last` of one page, K and V rows `stride` bytes apart.
void attend_page(const float* q, const uint8_t* k, const uint8_t* v, int64_t stride, bool half, int first, int last,
                 float scale, int n, float* memory, Partial& page) {
    float scores[kPage] = {};
    for (int j = first; j <= last; ++j) scores[j] = dot32(q, cached(k + j * stride, half, n, memory), n) * scale;
    page.m = scores[first];
    for (int j = first + 1; j <= last; ++j) page.m = larger(page.m, scores[j]);
    page.l = 0.0f;
    std::fill(page.o, page.o + n, 0.0f);
    for (int j = first; j <= last; ++j)
        accumulate(scores[j], page.m, cached(v + j * stride, half, n, memory), n, page.l, page.o);
}

}  // namespace

Attention::Attention(Step& step, Value q, Value k, Value v, Value out, const Shape& shape)
    : q_(q), k_(k), v_(v), out_(out), shape_(shape) {
    const int kv_width = shape.kv_heads * shape.head_dim;
    if (q.width != shape.heads * shape.head_dim || out.width != q.width || k.width != kv_width ||
        v.width != kv_width || shape.heads % shape.kv_heads != 0)
        throw std::invalid_argument("attention: heads do not fit");
    step.reserve_scratch(4 * shape.head_dim);
}

void Attention::run(Step& step) {
    step.for_rows(2 * k_.width, [&](int64_t row, int) { store(step, row); });
    step.pool.run(step.rows * shape_.heads, 1, [&](int64_t begin, int64_t end, int thread) {
        float* scratch = step.scratch[static_cast<size_t>(thread)].floats.data();
        for (int64_t i = begin; i < end; ++i)
            attend(step, i / shape_.heads, static_cast<int>(i % shape_.heads), scratch);
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

void Attention::attend(Step& step, int64_t row, int head, float* scratch) const {
    const int n = shape_.head_dim;
    const bool half = step.state.half;
    const Segment& segment = *step.segment_of[static_cast<size_t>(row)];
    const int64_t last = step.position[static_cast<size_t>(row)];
    const int64_t first = shape_.window > 0 ? std::max<int64_t>(0, last - shape_.window + 1) : 0;
    const int64_t stride = n * (half ? 2 : 4);
    const int64_t kv_head = head / (shape_.heads / shape_.kv_heads) * kPage * stride;
    const float* q = step.row_of(q_, row) + head * n;

    float* converted = scratch;
    Partial page = {0.0f, 0.0f, scratch + n};
    Partial group = {0.0f, 0.0f, scratch + 2 * n};
    Partial all = {0.0f, 0.0f, scratch + 3 * n};
    bool group_empty = true, all_empty = true;
    const auto close_group = [&] {
        if (all_empty)
            copy(group, all, n);
        else
            merge(all.m, all.l, all.o, group.m, group.l, group.o, n);
        all_empty = false;
        group_empty = true;
    };
    for (int64_t number = first / kPage; number <= last / kPage; ++number) {
        if (number % kGroup == 0 && !group_empty) close_group();
        const int64_t start = number * kPage;
        const uint8_t* memory = step.page(shape_.group, segment, start);
        attend_page(q, memory + shape_.k_offset + kv_head, memory + shape_.v_offset + kv_head, stride, half,
                    static_cast<int>(std::max(first, start) - start),
                    static_cast<int>(std::min(last, start + kPage - 1) - start), shape_.scale, n, converted, page);
        if (group_empty)
            copy(page, group, n);
        else
            merge(group.m, group.l, group.o, page.m, page.l, page.o, n);
        group_empty = false;
    }
    close_group();

    float* out = step.row_of(out_, row) + head * n;
    const float inverse = 1.0f / all.l;
    for (int i = 0; i < n; ++i) out[i] = all.o[i] * inverse;
}

}  // namespace spark
