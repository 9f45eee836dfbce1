// Vectors of floats as attention and the delta rule use them: many dot products at a time, scaled sums, conversions.
//
// The loops at the end are the definition; where registers serve, the same partials are in their lanes and the same
// bits result (docs/arithmetic.md: the order of dot32 and of sums over positions is kept).
#pragma once

#include "common/arithmetic.h"
#include "cpu/vectors.h"

namespace spark {

// Functions of a row, which compilers vectorise; out may be x.
inline void exp_row(const float* x, float less, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = exp(x[i] - less);
}

// One row of the delta rule (docs/arithmetic.md, gated_delta) for `count` rows of the state, n columns each.
inline void delta_rows_by_definition(float* state, int count, int n, const float* q, const float* k, const float* v,
                                     float beta, float decay, float* out) {
    for (int i = 0; i < count; ++i) {
        float* s = state + static_cast<int64_t>(i) * n;
        for (int j = 0; j < n; ++j) s[j] = s[j] * decay;
        const float d = (v[i] - dot32(s, k, n)) * beta;
        for (int j = 0; j < n; ++j) s[j] = fma(d, k[j], s[j]);
        out[i] = dot32(s, q, n);
    }
}

#if SPARK_VECTORS

// out[i] = dot32(x, rows[i]) for `count` rows of n floats.
inline void dot_rows(const float* x, const float* rows, int count, int n, float* out) {
    using namespace vectors;
    if (n % 32 != 0) {
        for (int i = 0; i < count; ++i) out[i] = dot32(x, rows + static_cast<int64_t>(i) * n, n);
        return;
    }
    constexpr int steps = 32 / kLanes;
    for (int first = 0; first < count; first += kLanes) {
        Floats sums[kLanes];
        const int present = count - first < kLanes ? count - first : kLanes;
        for (int i = 0; i < kLanes; i += 4) {
            Partials p[4];
            const float* w[4];
            for (int r = 0; r < 4; ++r)  // rows beyond the last: that one again, for nothing
                w[r] = rows + static_cast<int64_t>(first + (i + r < present ? i + r : present - 1)) * n;
            for (int j = 0; j < n; j += 32) {
                Floats a[steps];
                for (int k = 0; k < steps; ++k) a[k] = load(x + j + k * kLanes);
                for (int r = 0; r < 4; ++r) {
                    Floats b[steps];
                    for (int k = 0; k < steps; ++k) b[k] = load(w[r] + j + k * kLanes);
                    p[r].add(a, b);
                }
            }
            for (int r = 0; r < 4; ++r) sums[i + r] = p[r].folded();
        }
        alignas(64) float lanes[kLanes];
        store(lanes, trees(sums));
        for (int i = 0; i < present; ++i) out[first + i] = lanes[i];
    }
}

// out[j] = fma(factors[count - 1], rows[count - 1][j], ... fma(factors[0], rows[0][j], out[j])).
inline void add_scaled_rows(const float* factors, const float* rows, int count, int n, float* out) {
    using namespace vectors;
    constexpr int wide = 8 * kLanes;
    int j = 0;
    for (; j + wide <= n; j += wide) {
        Floats sums[8];
        for (int k = 0; k < 8; ++k) sums[k] = load(out + j + k * kLanes);
        for (int i = 0; i < count; ++i) {
            const Floats factor = everywhere(factors[i]);
            const float* row = rows + static_cast<int64_t>(i) * n + j;
            for (int k = 0; k < 8; ++k) sums[k] = multiply_add(factor, load(row + k * kLanes), sums[k]);
        }
        for (int k = 0; k < 8; ++k) store(out + j + k * kLanes, sums[k]);
    }
    for (int i = 0; i < count; ++i)
        for (int k = j; k < n; ++k) out[k] = fma(factors[i], rows[static_cast<int64_t>(i) * n + k], out[k]);
}

inline void halves_to_floats(const uint16_t* x, int64_t n, float* out) {
    using namespace vectors;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, from_halves(x + i));
    for (; i < n; ++i) out[i] = f16_to_f32(x[i]);
}

inline void delta_rows(float* state, int count, int n, const float* q, const float* k, const float* v, float beta,
                       float decay, float* out) {
    using namespace vectors;
    if (n % 32 != 0) return delta_rows_by_definition(state, count, n, q, k, v, beta, decay, out);
    constexpr int steps = 32 / kLanes;
    const Floats factor = everywhere(decay);
    for (int first = 0; first < count; first += kLanes) {
        const int present = count - first < kLanes ? count - first : kLanes;
        Floats sums[kLanes];
        alignas(64) float lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) sums[i] = everywhere(0.0f);
        for (int i = 0; i < present; ++i) {
            float* s = state + static_cast<int64_t>(first + i) * n;
            Partials p;
            for (int j = 0; j < n; j += 32) {
                Floats a[steps], b[steps];
                for (int m = 0; m < steps; ++m) {
                    a[m] = multiply(load(s + j + m * kLanes), factor);
                    store(s + j + m * kLanes, a[m]);
                    b[m] = load(k + j + m * kLanes);
                }
                p.add(a, b);
            }
            sums[i] = p.folded();
        }
        store(lanes, trees(sums));
        for (int i = 0; i < present; ++i) {
            float* s = state + static_cast<int64_t>(first + i) * n;
            const Floats d = everywhere((v[first + i] - lanes[i]) * beta);
            Partials p;
            for (int j = 0; j < n; j += 32) {
                Floats a[steps], b[steps];
                for (int m = 0; m < steps; ++m) {
                    a[m] = multiply_add(d, load(k + j + m * kLanes), load(s + j + m * kLanes));
                    store(s + j + m * kLanes, a[m]);
                    b[m] = load(q + j + m * kLanes);
                }
                p.add(a, b);
            }
            sums[i] = p.folded();
        }
        store(lanes, trees(sums));
        for (int i = 0; i < present; ++i) out[first + i] = lanes[i];
    }
}

#else

inline void delta_rows(float* state, int count, int n, const float* q, const float* k, const float* v, float beta,
                       float decay, float* out) {
    delta_rows_by_definition(state, count, n, q, k, v, beta, decay, out);
}

inline void dot_rows(const float* x, const float* rows, int count, int n, float* out) {
    for (int i = 0; i < count; ++i) out[i] = dot32(x, rows + static_cast<int64_t>(i) * n, n);
}

inline void add_scaled_rows(const float* factors, const float* rows, int count, int n, float* out) {
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < n; ++j) out[j] = fma(factors[i], rows[static_cast<int64_t>(i) * n + j], out[j]);
}

inline void halves_to_floats(const uint16_t* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(x[i]);
}

#endif

}  // namespace spark
