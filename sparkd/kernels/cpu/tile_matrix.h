// Parts of a tile by the processor's matrix unit (AMX): sixteen weight rows times up to sixteen activation rows at once.
//
// The unit adds up products of bytes and knows no scales of sub-blocks. They are multiplied into the weights first, and
// weight * scale is taken apart into two digits of a byte: low + 2^kDigitBits * high. Each digit is summed over a whole
// part of 256 columns. int32 sums are exact, so both together are what add_dots gives, and so are all bits after them.
#pragma once

#include "cpu/tile_registers_avx512.h"

#define SPARK_MATRIX 1

namespace spark::tile_products {

constexpr int kUnit = 16;  // rows of either kind that the unit takes at a time


// Weights below 32 times scales below 64 come as two products with three bits of the scale, bytes both. Products of the
// other types are 16 bits, the upper byte of which is signed.
template <class T>
constexpr int kDigitBits = std::is_base_of_v<Offsets, T> ? 3 : 8;

// Activation rows from which on the unit is faster than add_dots (measured: bench/README.md); 0 for types of blocks of
// 32, each of which has its float scale.
template <class T>
constexpr int kWorthTheUnit = T::kBytes <= 64 ? 0 : kDigitBits<T> == 3 ? 6 : 32;

// A part of sixteen weight rows: a register has four columns of every row, as in Part; first the low digits of a step,
// then the high ones.
struct Digits {
    Ints q[2 * 64];
};

// Takes four columns of sixteen rows, times their scales, apart.
template <class T>
class ToDigits {
  public:
    // `scale`: int16 in the lower half of each lane, per sub-block.
    ToDigits(const Ints* scale, Digits& digits) : digits_(digits) {
        for (int s = 0; s < 256 / T::kSub; ++s) {
            const Ints lower = _mm512_and_si512(scale[s], _mm512_set1_epi32(0xffff));
            const Ints twice = _mm512_or_si512(lower, _mm512_slli_epi32(scale[s], 16));
            if constexpr (kDigitBits<T> == 3) {
                static_assert(T::kMost * 7 < 256);
                const Ints three = _mm512_set1_epi16(7);
                low_[s] = _mm512_and_si512(twice, three);
                high_[s] = _mm512_and_si512(_mm512_srli_epi16(twice, 3), three);
            } else {
                low_[s] = twice;
            }
        }
    }

    [[gnu::always_inline]] void operator()(int step, Ints v) const {
        const int s = 4 * step / T::kSub;
        if constexpr (kDigitBits<T> == 3) {
            // No product of the lower byte reaches into the upper one.
            digits_.q[2 * step] = _mm512_mullo_epi16(v, low_[s]);
            digits_.q[2 * step + 1] = _mm512_mullo_epi16(v, high_[s]);
        } else {
            const __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
            const Ints evens = _mm512_mullo_epi16(_mm512_maskz_mov_epi8(~odd, v), low_[s]);
            const Ints odds = _mm512_mullo_epi16(_mm512_srli_epi16(v, 8), low_[s]);
            digits_.q[2 * step] = _mm512_mask_blend_epi8(odd, evens, _mm512_slli_epi16(odds, 8));
            digits_.q[2 * step + 1] = _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(evens, 8), odds);
        }
    }

  private:
    Digits& digits_;
    Ints low_[256 / T::kSub];
    Ints high_[kDigitBits<T> == 3 ? 256 / T::kSub : 1];
};

// What the unit loads is no read to the compiler: everything is to be in memory before.
inline void seen_by_the_unit(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

// Activation rows of a pass, in groups of equal size for the unit. Owns the unit's registers while it lives.
class Groups {
  public:
    // Copies `count` >= 1 rows of `columns` bytes to `memory`, which has room for count, rounded up to kUnit, of them.
    template <class Row>
    Groups(const Row* x, int count, int columns, int8_t* memory)
        : count((count + kUnit - 1) / kUnit), rows((count + this->count - 1) / this->count), memory_(memory) {
        const int padded = this->count * rows;
        for (int column = 0; column < columns; column += 64)
            for (int m = 0; m < padded; ++m, memory += 64)
                _mm512_storeu_si512(memory, _mm512_loadu_si512(x[std::min(m, count - 1)].q + column));
        alignas(64) uint8_t config[64] = {1};  // palette 1; from byte 16 bytes per row, from byte 48 rows
        for (int tile = 0; tile < 8; ++tile) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = static_cast<uint8_t>(tile == 3 || tile == 4 ? kUnit : rows);
        }
        seen_by_the_unit(config);
        _tile_loadconfig(config);
    }
    ~Groups() { _tile_release(); }
    Groups(const Groups&) = delete;
    Groups& operator=(const Groups&) = delete;

    // isum of part `number` for the rows of group `group` and, with BOTH, the next one: to isum[row].
    template <class T, bool BOTH>
    void sums(const Digits& digits, int number, int group, Ints* isum) const {
        const int64_t chunk = int64_t{64} * count * rows;
        const int8_t* x = memory_ + 4 * number * chunk + 64 * group * rows;
        seen_by_the_unit(this);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(5);
            _tile_zero(6);
        }
        for (int c = 0; c < 4; ++c, x += chunk) {
            _tile_loadd(2, x, 64);
            _tile_loadd(3, digits.q + 32 * c, 128);
            _tile_dpbsud(0, 2, 3);
            _tile_loadd(4, digits.q + 32 * c + 1, 128);
            if constexpr (kDigitBits<T> == 3)
                _tile_dpbsud(1, 2, 4);
            else
                _tile_dpbssd(1, 2, 4);
            if constexpr (BOTH) {
                _tile_loadd(7, x + 64 * rows, 64);
                _tile_dpbsud(5, 7, 3);
                if constexpr (kDigitBits<T> == 3)
                    _tile_dpbsud(6, 7, 4);
                else
                    _tile_dpbssd(6, 7, 4);
            }
        }
        Ints high[2 * kUnit];
        _tile_stored(0, isum, 64);
        _tile_stored(1, high, 64);
        if constexpr (BOTH) {
            _tile_stored(5, isum + rows, 64);
            _tile_stored(6, high + rows, 64);
        }
        for (int m = 0; m < (BOTH ? 2 : 1) * rows; ++m)
            isum[m] = _mm512_add_epi32(isum[m], _mm512_slli_epi32(high[m], kDigitBits<T>));
    }

    const int count, rows;  // groups, rows of each

  private:
    int8_t* memory_;
};

}  // namespace spark::tile_products
