// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011), a counter-based generator.
#pragma once

#include "arithmetic.h"

namespace spark {

struct Philox {
    uint32_t word[4];
};

// Ten rounds over `counter` (128 bits: low, high) under `key`; words are least significant first.
SPARK_FN Philox philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    Philox c = {{static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                 static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)}};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c.word[0];
        const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c.word[2];
        c = {{static_cast<uint32_t>(b >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(b),
              static_cast<uint32_t>(a >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(a)}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

}  // namespace spark
