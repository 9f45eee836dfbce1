// Rotary embedding: tables computed on the host in float64, once per row, and the rotation itself in float32.
#pragma once

#include "arithmetic.h"

namespace spark {

// Sine and cosine of |angle| <= 2^22: Cody-Waite reduction to |r| <= pi/4, Taylor polynomials, no libm.
SPARK_FN void sin_cos(double angle, double& sine, double& cosine) {
    const double k = (angle * 0x1.45f306dc9c883p-1 + 6755399441055744.0) - 6755399441055744.0;  // 1.5 * 2^52
    // pi/2 in three parts; k has at most 22 bits and the first two parts 30, so their products are exact.
    const double r = ((angle - k * 0x1.921fb54p+0) - k * 0x1.10b46118p-30) - k * 0x1.313198a2e0370p-61;
    const double z = r * r;
    double s = 1.0 / 355687428096000.0;  // 1/17!
    s = s * z - 1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = s * z * r + r;
    double c = 1.0 / 20922789888000.0;  // 1/16!
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = c * z + 1.0;
    const int quadrant = static_cast<int>(k) & 3;
    sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
}

// cosine[pairs] and sine[pairs] of one position, times magnitude (YaRN), rounded to float32 once.
SPARK_FN void rope_row(int64_t position, const double* inv_freq, int pairs, double magnitude, float* cosine, float* sine) {
    for (int i = 0; i < pairs; ++i) {
        double s, c;
        sin_cos(static_cast<double>(position) * inv_freq[i], s, c);
        cosine[i] = static_cast<float>(c * magnitude);
        sine[i] = static_cast<float>(s * magnitude);
    }
}

// (a, b) -> (a cos - b sin, a sin + b cos)
SPARK_FN void rotate(float& a, float& b, float cosine, float sine) {
    const float turned = fma(a, cosine, -(b * sine));
    b = fma(a, sine, b * cosine);
    a = turned;
}

}  // namespace spark
