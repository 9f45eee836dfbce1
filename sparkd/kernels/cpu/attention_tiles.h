// Attention of many queries at once: a query per lane.
//
// Queries that share a KV head, those of its heads and of consecutive rows, go through a page together. A score, the
// largest of them, their sum and each element of the result are lanes too, so that every query has its own order of
// operations, that of the definition (arithmetic.h: dot32, accumulate, merge), and nothing is added up across lanes.
#pragma once

#include "cpu/float_kernels.h"
#include "cpu/step.h"

#if SPARK_VECTORS

#include <algorithm>
#include <limits>

namespace spark::attention_tiles {

using namespace vectors;

constexpr int kWidth = 2;                  // registers of a tile
constexpr int kQueries = kWidth * kLanes;  // of a tile
constexpr int kPositions = kLanes == 16 ? 2 : 1;  // whose scores are found together: what registers there are for
constexpr int kElements = kLanes == 16 ? 8 : 4;   // of the result, likewise

// Widths of a head for which there are functions.
constexpr bool serves(int n) { return n == 32 || n == 64 || n == 128 || n == 256; }

// Softmaxes over some positions that are not finished, in memory: a row of kQueries floats each for whether there are
// any positions (1 or 0), for m, for l and for each of n elements of o.
struct Partials {
    float* memory;

    float* any() const { return memory; }
    float* m() const { return memory + kQueries; }
    float* l() const { return memory + 2 * kQueries; }
    float* o() const { return memory + 3 * kQueries; }
    static int64_t floats(int n) { return (n + 3) * kQueries; }
    void clear() const { std::fill(any(), o(), 0.0f); }
};

// `into` becomes `from` where it has no positions, else its merge with the later `from`; nothing happens where `from`
// has none.
inline void take(const Partials& into, const Partials& from, int n) {
    const Floats zero = everywhere(0.0f);
    alignas(64) float c1[kQueries], c2[kQueries];
    for (int i = 0; i < kQueries; ++i) {
        const float m = spark::larger(into.m()[i], from.m()[i]);
        c1[i] = exp(into.m()[i] - m);
        c2[i] = exp(from.m()[i] - m);
    }
    for (int r = 0; r < kQueries; r += kLanes) {
        const Lanes old = below(zero, load(into.any() + r)), fresh = below(zero, load(from.any() + r));
        const Floats scale1 = load(c1 + r), scale2 = load(c2 + r);
        const auto merged = [&](Floats a, Floats b) {
            return select(fresh, select(old, multiply_add(b, scale2, multiply(a, scale1)), b), a);
        };
        const Floats m1 = load(into.m() + r), m2 = load(from.m() + r);
        store(into.l() + r, merged(load(into.l() + r), load(from.l() + r)));
        for (int i = 0; i < n; ++i) {
            float* o = into.o() + i * kQueries + r;
            store(o, merged(load(o), load(from.o() + i * kQueries + r)));
        }
        store(into.m() + r, select(fresh, select(old, vectors::larger(m1, m2), m2), m1));
        store(into.any() + r, select(fresh, everywhere(1.0f), load(into.any() + r)));
    }
}

// scores[j][query] = dot32(query, k[j]) for j of `count` positions, and of one more at most, for nothing.
template <int STEPS>
void dots(const float* queries, const float* k, int count, float* scores) {
    constexpr int n = 32 * STEPS;
    for (int j = 0; j < count; j += kPositions) {
        const float* row[kPositions];
        for (int p = 0; p < kPositions; ++p) row[p] = k + static_cast<int64_t>(std::min(j + p, count - 1)) * n;
        Floats sums[8][kPositions * kWidth];  // what the first two steps of the halving tree leave
        for (int i = 0; i < 8; ++i) {
            const auto partial = [&](int first, Floats* sum) {
                for (int s = 0; s < kPositions * kWidth; ++s) sum[s] = everywhere(0.0f);
#pragma GCC unroll 8
                for (int step = 0; step < STEPS; ++step) {
                    const int column = first + 32 * step;
                    Floats q[kWidth];
                    for (int w = 0; w < kWidth; ++w) q[w] = load(queries + column * kQueries + w * kLanes);
                    for (int p = 0; p < kPositions; ++p) {
                        const Floats element = everywhere(row[p][column]);
                        for (int w = 0; w < kWidth; ++w)
                            sum[p * kWidth + w] = multiply_add(q[w], element, sum[p * kWidth + w]);
                    }
                }
            };
            Floats a[kPositions * kWidth], b[kPositions * kWidth], c[kPositions * kWidth];
            partial(i, a);
            partial(i + 16, b);
            for (int s = 0; s < kPositions * kWidth; ++s) a[s] = add(a[s], b[s]);
            partial(i + 8, b);
            partial(i + 24, c);
            for (int s = 0; s < kPositions * kWidth; ++s) sums[i][s] = add(a[s], add(b[s], c[s]));
        }
        for (int s = 0; s < kPositions * kWidth; ++s) {
            Floats four[4];
            for (int i = 0; i < 4; ++i) four[i] = add(sums[i][s], sums[i + 4][s]);
            store(scores + j * kQueries + s * kLanes, add(add(four[0], four[2]), add(four[1], four[3])));
        }
    }
}

// Which places of a page each query sees; at first none.
struct Visible {
    alignas(64) float begin[kQueries] = {}, end[kQueries] = {};
    int first = kPage, last = 0;                // that any of them sees: first .. last - 1
    int common_first = 0, common_last = kPage;  // that all of them see

    void set(int query, int64_t from, int64_t to) {
        if (from >= to) from = to = 0;
        begin[query] = static_cast<float>(from);
        end[query] = static_cast<float>(to);
        if (from < to) {
            first = std::min(first, static_cast<int>(from));
            last = std::max(last, static_cast<int>(to));
        }
        common_first = std::max(common_first, static_cast<int>(from));
        common_last = std::min(common_last, static_cast<int>(to));
    }
    // Calls body(place, whether only some queries may see it) in order.
    template <class Body>
    void for_each(const Body& body) const {
        int j = first;
        if (common_first < common_last) {
            for (; j < common_first; ++j) body(j, true);
            for (; j < common_last; ++j) body(j, false);
        }
        for (; j < last; ++j) body(j, true);
    }
    Lanes lanes(int j, int r) const {
        return within(load(begin + r), load(end + r), everywhere(static_cast<float>(j)));
    }
};

// What a page gives: k and v are its rows, [places][n], queries [n][kQueries]; `scores` is memory of
// [kPage + 1][kQueries].
template <int STEPS>
void attend_page(const float* queries, const float* k, const float* v, const Visible& visible, float scale,
                 float* scores, const Partials& out) {
    constexpr int n = 32 * STEPS;
    const int first = visible.first, count = visible.last - first;
    dots<STEPS>(queries, k + static_cast<int64_t>(first) * n, count, scores);
    const auto row_of = [&](int j) { return scores + (j - first) * kQueries; };
    for (int r = 0; r < kQueries; r += kLanes) {
        Floats m = everywhere(-std::numeric_limits<float>::infinity());
        visible.for_each([&](int j, bool some) {
            const Floats score = multiply(load(row_of(j) + r), everywhere(scale));
            store(row_of(j) + r, score);
            const Floats larger = vectors::larger(m, score);
            m = some ? select(visible.lanes(j, r), larger, m) : larger;
        });
        store(out.m() + r, m);
    }
    for (int j = 0; j < count; ++j)
        for (int i = 0; i < kQueries; ++i) scores[j * kQueries + i] = exp(scores[j * kQueries + i] - out.m()[i]);
    for (int r = 0; r < kQueries; r += kLanes) {
        Floats l = everywhere(0.0f);
        visible.for_each([&](int j, bool some) {
            const Floats more = add(l, load(row_of(j) + r));
            l = some ? select(visible.lanes(j, r), more, l) : more;
        });
        store(out.l() + r, l);
        store(out.any() + r, select(below(load(visible.begin + r), load(visible.end + r)), everywhere(1.0f), everywhere(0.0f)));
    }
    for (int i = 0; i < n; i += kElements) {
        Floats o[kElements * kWidth];
        for (Floats& one : o) one = everywhere(0.0f);
        visible.for_each([&](int j, bool some) {
            Floats e[kWidth];
            for (int w = 0; w < kWidth; ++w) e[w] = load(row_of(j) + w * kLanes);
            const float* row = v + static_cast<int64_t>(j) * n + i;
            for (int x = 0; x < kElements; ++x) {
                const Floats element = everywhere(row[x]);
                for (int w = 0; w < kWidth; ++w) {
                    Floats& sum = o[x * kWidth + w];
                    const Floats more = multiply_add(e[w], element, sum);
                    sum = some ? select(visible.lanes(j, w * kLanes), more, sum) : more;
                }
            }
        });
        for (int x = 0; x < kElements; ++x)
            for (int w = 0; w < kWidth; ++w) store(out.o() + (i + x) * kQueries + w * kLanes, o[x * kWidth + w]);
    }
}

inline void attend_page(const float* queries, const float* k, const float* v, int n, const Visible& visible,
                        float scale, float* scores, const Partials& out) {
    switch (n) {
        case 32: return attend_page<1>(queries, k, v, visible, scale, scores, out);
        case 64: return attend_page<2>(queries, k, v, visible, scale, scores, out);
        case 128: return attend_page<4>(queries, k, v, visible, scale, scores, out);
        case 256: return attend_page<8>(queries, k, v, visible, scale, scores, out);
    }
}

}  // namespace spark::attention_tiles

#endif
