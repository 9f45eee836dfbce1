// What both kinds of vectors need of 256-bit registers.
#pragma once

#include <immintrin.h>

namespace spark::vectors {

// Lane i: the sum of all lanes of v[i].
inline __m256i eight_sums_256(const __m256i* v) {
    // In each half one part of the sums of four.
    const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

}  // namespace spark::vectors
