#include "cpu/attention.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/attention_tiles.h"
#include "cpu/float_kernels.h"

namespace spark {

namespace {

constexpr int kGroup = 16;      // pages
constexpr int64_t kBlock = 16;  // rows that share the conversion of a page

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

// Queries that share a KV head: those of `heads` heads from the first on, of consecutive rows of one sequence.
struct Attention::Queries {
    Step& step;
    const Attention& of;
    Block rows;
    int first_head, heads;

    int64_t count() const { return rows.count * heads; }
    const float* q(int64_t i) const { return row_of(of.q_, i); }
    float* out(int64_t i) const { return row_of(of.out_, i); }
    // Positions that the query sees.
    int64_t begin(int64_t i) const {
        return of.shape_.window > 0 ? std::max<int64_t>(0, end(i) - of.shape_.window) : 0;
    }
    int64_t end(int64_t i) const { return step.position[static_cast<size_t>(rows.first + i / heads)] + 1; }

  private:
    float* row_of(Value value, int64_t i) const {
        return step.row_of(value, rows.first + i / heads) + (first_head + i % heads) * of.shape_.head_dim;
    }
};

// K and V of one KV head as floats at the positions begin .. end - 1 of one page.
struct Attention::Page {
    const float* k;
    const float* v;
    int64_t begin, end;
};

// One query after the other: the definition.
class Attention::OneByOne {
  public:
    static int64_t floats(int64_t queries, int n) { return kPage + queries * kKinds * (n + 2); }

    OneByOne(const Queries& queries, float* memory)
        : queries_(queries), n_(queries.of.shape_.head_dim), scores_(memory), partials_(memory + kPage) {
        for (int64_t i = 0; i < queries_.count(); ++i) partial(GROUP, i).l() = partial(ALL, i).l() = kEmpty;
    }

    void add(const Page& page) {
        for (int64_t i = 0; i < queries_.count(); ++i) {
            const int64_t begin = std::max(queries_.begin(i), page.begin), end = std::min(queries_.end(i), page.end);
            if (begin >= end) continue;
            const int visible = static_cast<int>(end - begin);
            const Partial p = partial(PAGE, i);
            dot_rows(queries_.q(i), page.k + (begin - page.begin) * n_, visible, n_, scores_);
            for (int j = 0; j < visible; ++j) scores_[j] = scores_[j] * queries_.of.shape_.scale;
            p.m() = scores_[0];
            for (int j = 1; j < visible; ++j) p.m() = larger(p.m(), scores_[j]);
            exp_row(scores_, p.m(), visible, scores_);
            float l = 0.0f;
            for (int j = 0; j < visible; ++j) l = l + scores_[j];
            p.l() = l;
            std::fill(p.o(), p.o() + n_, 0.0f);
            add_scaled_rows(scores_, page.v + (begin - page.begin) * n_, visible, n_, p.o());
            take(partial(GROUP, i), p);
        }
    }

    void close_group() {
        for (int64_t i = 0; i < queries_.count(); ++i) {
            const Partial group = partial(GROUP, i);
            if (group.l() == kEmpty) continue;
            take(partial(ALL, i), group);
            group.l() = kEmpty;
        }
    }

    void finish() {
        for (int64_t i = 0; i < queries_.count(); ++i) {
            const Partial all = partial(ALL, i);
            const float inverse = 1.0f / all.l();
            for (int j = 0; j < n_; ++j) queries_.out(i)[j] = all.o()[j] * inverse;
        }
    }

  private:
    enum Kind { PAGE, GROUP, ALL, kKinds };
    static constexpr float kEmpty = -1.0f;  // as l, which is a sum of powers

    // A softmax over some positions that is not finished, in memory: see accumulate and merge.
    struct Partial {
        float* memory;

        float& m() const { return memory[0]; }
        float& l() const { return memory[1]; }
        float* o() const { return memory + 2; }
    };

    Partial partial(Kind kind, int64_t i) const { return {partials_ + (i * kKinds + kind) * (n_ + 2)}; }

    // `into` becomes `from`, or its merge with the later `from`.
    void take(const Partial& into, const Partial& from) const {
        if (into.l() == kEmpty)
            std::copy(from.memory, from.memory + n_ + 2, into.memory);
        else
            merge(into.m(), into.l(), into.o(), from.m(), from.l(), from.o(), n_);
    }

    const Queries& queries_;
    int n_;
    float* scores_;
    float* partials_;
};

#if SPARK_VECTORS

// A query per lane.
class Attention::Together {
  public:
    // Whether it pays for so many queries.
    static bool serves(int64_t queries, int n) {
        return queries >= vectors::kLanes && attention_tiles::serves(n);
    }
    static int64_t floats(int64_t queries, int n) {
        return kScores + Partials::floats(n) + tiles(queries) * tile_floats(n) + 64 / sizeof(float);
    }

    Together(const Queries& queries, float* memory) : queries_(queries), n_(queries.of.shape_.head_dim) {
        memory = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        scores_ = memory;
        page_ = {scores_ + kScores};
        tiles_ = page_.memory + Partials::floats(n_);
        for (int64_t t = 0; t < tiles(queries_.count()); ++t) {
            float* q = queries_of(t);
            std::fill(q, q + n_ * kQueries, 0.0f);
            for (int lane = 0; lane < present(t); ++lane)
                for (int j = 0; j < n_; ++j) q[j * kQueries + lane] = queries_.q(t * kQueries + lane)[j];
            group(t).clear();
            all(t).clear();
        }
    }

    void add(const Page& page) {
        for (int64_t t = 0; t < tiles(queries_.count()); ++t) {
            attention_tiles::Visible visible;
            for (int lane = 0; lane < present(t); ++lane) {
                const int64_t i = t * kQueries + lane;
                visible.set(lane, std::max(queries_.begin(i), page.begin) - page.begin,
                            std::min(queries_.end(i), page.end) - page.begin);
            }
            if (visible.last <= visible.first) continue;
            attention_tiles::attend_page(queries_of(t), page.k, page.v, n_, visible, queries_.of.shape_.scale, scores_,
                                         page_);
            take(group(t), page_, n_);
        }
    }

    void close_group() {
        for (int64_t t = 0; t < tiles(queries_.count()); ++t) {
            take(all(t), group(t), n_);
            group(t).clear();
        }
    }

    void finish() {
        for (int64_t t = 0; t < tiles(queries_.count()); ++t)
            for (int lane = 0; lane < present(t); ++lane) {
                float* out = queries_.out(t * kQueries + lane);
                const float inverse = 1.0f / all(t).l()[lane];
                for (int j = 0; j < n_; ++j) out[j] = all(t).o()[j * kQueries + lane] * inverse;
            }
    }

  private:
    using Partials = attention_tiles::Partials;
    static constexpr int kQueries = attention_tiles::kQueries;
    static constexpr int64_t kScores = (kPage + 1) * kQueries;

    static int64_t tiles(int64_t queries) { return (queries + kQueries - 1) / kQueries; }
    static int64_t tile_floats(int n) { return n * kQueries + 2 * Partials::floats(n); }
    int present(int64_t t) const {
        return static_cast<int>(std::min<int64_t>(kQueries, queries_.count() - t * kQueries));
    }
    float* queries_of(int64_t t) const { return tiles_ + t * tile_floats(n_); }
    Partials group(int64_t t) const { return {queries_of(t) + n_ * kQueries}; }
    Partials all(int64_t t) const { return {group(t).memory + Partials::floats(n_)}; }

    const Queries& queries_;
    int n_;
    float* scores_;
    Partials page_;
    float* tiles_;  // of each tile: its queries, [n][kQueries], and its partials of a group of pages and of all
};

#endif

Attention::Attention(Step& step, Value q, Value k, Value v, Value out, const Shape& shape)
    : q_(q), k_(k), v_(v), out_(out), shape_(shape) {
    const int n = shape.head_dim;
    if (q.width != shape.heads * n || out.width != q.width || k.width != shape.kv_heads * n || v.width != k.width ||
        shape.heads % shape.kv_heads != 0)
        throw std::invalid_argument("attention: heads do not fit");
    const int64_t queries = kBlock * (shape.heads / shape.kv_heads);
    int64_t floats = OneByOne::floats(queries, n);
#if SPARK_VECTORS
    floats = std::max(floats, Together::floats(queries, n));
#endif
    step.reserve_scratch(2 * kPage * n + floats);
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
            attend({step, *this, blocks_[static_cast<size_t>(i / parts)], static_cast<int>(i % parts) * count, count},
                   scratch);
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

void Attention::attend(const Queries& queries, float* scratch) const {
#if SPARK_VECTORS
    if (Together::serves(queries.count(), shape_.head_dim)) return attend<Together>(queries, scratch);
#endif
    attend<OneByOne>(queries, scratch);
}

template <class Way>
void Attention::attend(const Queries& queries, float* scratch) const {
    const int n = shape_.head_dim;
    const Step& step = queries.step;
    const bool half = step.state.half;
    const Segment& segment = *step.segment_of[static_cast<size_t>(queries.rows.first)];
    const int64_t row_bytes = n * (half ? 2 : 4);
    const int64_t kv_head = queries.first_head / (shape_.heads / shape_.kv_heads) * kPage * row_bytes;
    float* k_memory = scratch;
    float* v_memory = k_memory + kPage * n;
    Way way(queries, v_memory + kPage * n);
    // Positions that any query sees; pages of which none does take no part.
    const int64_t first = queries.begin(0), end = queries.end(queries.count() - 1);
    for (int64_t number = first / kPage; number * kPage < end; ++number) {
        if (number % kGroup == 0) way.close_group();
        const int64_t start = number * kPage;
        const int64_t from = std::max(first, start), seen = std::min(end, start + kPage) - from;
        const uint8_t* page = step.page(shape_.group, segment, start) + kv_head + (from - start) * row_bytes;
        way.add({cached(page + shape_.k_offset, half, seen * n, k_memory),
                 cached(page + shape_.v_offset, half, seen * n, v_memory), from, from + seen});
    }
    way.close_group();
    way.finish();
}

}  // namespace spark
