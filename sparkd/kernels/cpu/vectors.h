// The vector registers this module is compiled for; SPARK_VECTORS is 0 where only the scalar definition is.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SPARK_VECTORS 512
#include "cpu/vectors_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPARK_VECTORS 256
#include "cpu/vectors_avx2.h"
#else
#define SPARK_VECTORS 0
#endif
