// Products of sixteen weight rows with many activation rows by the processor's matrix unit (AMX).
//
// The unit adds up products of bytes and knows no scales of sub-blocks. They are multiplied into the weights first, and
// weight * scale is taken apart into digits of a byte. Each digit is summed over a whole block of 256 columns. int32 sums
// are exact, so together they are the isum of docs/arithmetic.md, "Products", and all that follows is the same.
#pragma once

#include "cpu/tile_products.h"

#if defined(__AMX_INT8__)

namespace spark::tile_matrix {

using namespace tile_products;

constexpr int kUnit = 16;         // rows of either kind that the unit takes at a time
constexpr int kMatrixPass = 128;  // activation rows that share an unpacked block

// How weight * scale = low + high * 2^kDigitBits: unsigned 4- and 5-bit weights times three bits of the scale are bytes;
// those of Q2_K times the whole scale, so there is no `high`; of other types `high` is signed.
template <class T>
constexpr int kDigitBits = std::is_base_of_v<Offsets, T> ? 3 : T::kMost == 3 ? 0 : 8;

// Activation rows from which on the unit is faster than the tiles of tile_products.h (measured: bench/README.md); 0 for
// types that it does nothing for: those of blocks of 32, each of which has its float factor.
template <class T>
constexpr int kWorthTheUnit = T::kBytes <= 64 ? 0 : 12;

template <class T>
constexpr int kPairs = T::kOffset ? 128 / T::kSub : 0;  // of sums that minima are multiplied with

// A block of sixteen activation rows.
template <class T>
struct Sixteen {
    Ints q[4][16];               // [64 columns][4 columns], which each 32-bit lane has of its row
    Floats a;                  // a row per lane, as in
    Ints sums[kPairs<T> + 1];  // int16 pairs (the last of them is unused)
};

// What the unit loads is no read to the compiler: everything is to be in memory before.
inline void seen_by_the_unit(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

// Activation rows as the unit takes them. Owns the unit's registers while it lives.
template <class T>
class Columns {
  public:
    // Copies `count` >= 1 rows of `columns` to `memory`.
    Columns(const QuantisedRow* x, int count, int columns, void* memory)
        : groups((count + kUnit - 1) / kUnit), blocks_(static_cast<Sixteen<T>*>(memory)) {
        for (int number = 0; number < columns / 256; ++number)
            for (int g = 0; g < groups; ++g) pack(x + g * kUnit, std::min(kUnit, count - g * kUnit), number, block(number, g));
        alignas(64) uint8_t config[64] = {1};  // palette 1; from byte 16 bytes per row, from byte 48 rows
        for (int tile = 0; tile < 8; ++tile) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = kUnit;
        }
        seen_by_the_unit(config);
        _tile_loadconfig(config);
    }
    ~Columns() { _tile_release(); }
    Columns(const Columns&) = delete;
    Columns& operator=(const Columns&) = delete;

    Sixteen<T>& block(int number, int group) const { return blocks_[number * groups + group]; }

    const int groups;

  private:
    static void pack(const QuantisedRow* x, int count, int number, Sixteen<T>& out) {
        const auto row = [&](int m) -> const QuantisedRow& { return x[std::min(m, count - 1)]; };
        for (int c = 0; c < 4; ++c) {
            for (int m = 0; m < kUnit; ++m) out.q[c][m] = _mm512_loadu_si512(row(m).q + 256 * number + 64 * c);
            transpose(out.q[c]);
        }
        float a[kUnit];
        int32_t pairs[kPairs<T> + 1][kUnit] = {};
        for (int m = 0; m < kUnit; ++m) {
            a[m] = row(m).a[number];
            const int16_t* sums = T::kSub == 32 ? row(m).sums32 + 8 * number : row(m).sums16 + 16 * number;
            for (int p = 0; p < kPairs<T>; ++p) pairs[p][m] = load_as<int32_t>(sums + 2 * p);
        }
        out.a = load_as<Floats>(a);
        for (int p = 0; p < kPairs<T>; ++p) out.sums[p] = load_as<Ints>(pairs[p]);
    }

    Sixteen<T>* blocks_;
};

// A block of sixteen weight rows.
struct Rows {
    Ints low[4][kUnit], high[4][kUnit];  // digits: [64 columns][row]
    float d[kUnit], o[kUnit];
    int32_t minima[kUnit][8];  // int16 pairs
};

// 64 columns of row `i`, times their scales, as digits.
template <class T, int C, class Scales>
[[gnu::always_inline]] inline void unpack_columns(const uint8_t* b, int i, const Scales& low, const Scales& high, Rows& out) {
    const Ints v = T::template chunk<C>(Packed{b}).v, scale = low.template chunk<C>().v;
    if constexpr (kDigitBits<T> < 8) {
        // No product of the lower byte reaches into the upper one.
        out.low[C][i] = _mm512_mullo_epi16(v, scale);
        if constexpr (kDigitBits<T> != 0) out.high[C][i] = _mm512_mullo_epi16(v, high.template chunk<C>().v);
    } else {
        const Ints w = T::kBias == 0 ? v : _mm512_sub_epi8(v, _mm512_set1_epi8(T::kBias));
        const __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
        const Ints evens = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), scale);
        const Ints odds = _mm512_mullo_epi16(_mm512_srai_epi16(w, 8), scale);
        out.low[C][i] = _mm512_mask_blend_epi8(odd, evens, _mm512_slli_epi16(odds, 8));
        out.high[C][i] = _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(evens, 8), odds);
    }
}

inline float half_at(const uint8_t* b) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_as<uint16_t>(b)))); }

template <class T>
[[gnu::always_inline]] inline void unpack_row(const uint8_t* b, int i, Rows& out) {
    const auto columns = [&](const auto& low, const auto& high) {
        unpack_columns<T, 0>(b, i, low, high, out);
        unpack_columns<T, 1>(b, i, low, high, out);
        unpack_columns<T, 2>(b, i, low, high, out);
        unpack_columns<T, 3>(b, i, low, high, out);
    };
    out.d[i] = half_at(b + T::kD);
    if constexpr (T::kOffset) out.o[i] = half_at(b + T::kO);
    if constexpr (std::is_base_of_v<Offsets, T>) {
        constexpr uint64_t three = 0x0707070707070707;
        const SixBits six(b + 4);
        columns(Scales32Bytes(six.scales & three), Scales32Bytes(six.scales >> 3 & three));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out.minima[i]), eight_words(six.minima));
    } else {
        const auto scales = T::spread_scales(b);
        columns(scales, scales);
        if constexpr (T::kOffset) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.minima[i]), T::minima(b));
    }
}

// Where one thread works; activation rows lie behind it.
struct Memory {
    Rows rows;
    Ints low[2 * kUnit], high[2 * kUnit];
    Floats sums[4][kMatrixPass];  // partial sums that live at the same time: [group][weight row]
};

inline int64_t memory_bytes(int columns) {
    const int64_t blocks = int64_t{kMatrixPass / kUnit} * (columns / 256);
    return static_cast<int64_t>(sizeof(Memory)) + blocks * static_cast<int64_t>(sizeof(Sixteen<Q2K>));
}

// Sixteen weight rows (fewer: the last one again, for nothing) times activation rows.
template <class T>
class Tile {
  public:
    Tile(const uint8_t* w, int64_t row_bytes, int rows, int columns, const Columns<T>& x, Memory& memory)
        : columns_(columns), x_(x), memory_(memory) {
        for (int i = 0; i < kUnit; ++i) rows_[i] = w + std::min(i, rows - 1) * row_bytes;
        ahead_ = reinterpret_cast<const char*>(w + kUnit * row_bytes);
    }

    // [activation row][kUnit], until the memory is used again.
    const Floats* products() {
        Floats* sums = memory_.sums[0];
        halving_tree(columns_, x_.groups * kUnit, kMatrixPass, sums, [&](int first, Floats* out) { partial(first, out); });
        for (int g = 0; g < x_.groups; ++g) transpose(reinterpret_cast<Ints*>(sums) + g * kUnit);
        return sums;
    }

  private:
    void partial(int first, Floats* sums) {
        for (int i = 0; i < x_.groups * kUnit; ++i) sums[i] = everywhere(0.0f);
        for (int number = first; 256 * number < columns_; number += 8) {
            for (int i = 0; i < kUnit; ++i) {
                unpack_row<T>(rows_[i] + int64_t{T::kBytes} * number, i, memory_.rows);
                for (int line = 0; line < T::kBytes; line += 64) _mm_prefetch(ahead_ + line, _MM_HINT_T1);
                ahead_ += T::kBytes;
            }
            int g = 0;
            for (; g + 2 <= x_.groups; g += 2) {
                multiply<true>(&x_.block(number, g));
                finish(x_.block(number, g), memory_.low, memory_.high, sums + g * kUnit);
                finish(x_.block(number, g + 1), memory_.low + kUnit, memory_.high + kUnit, sums + (g + 1) * kUnit);
            }
            if (g < x_.groups) {
                multiply<false>(&x_.block(number, g));
                finish(x_.block(number, g), memory_.low, memory_.high, sums + g * kUnit);
            }
        }
    }

    // Sums of the digits' products with a block and, with BOTH, the one after it.
    template <bool BOTH>
    void multiply(const Sixteen<T>* x) {
        const Rows& rows = memory_.rows;
        seen_by_the_unit(&rows);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(5);
            _tile_zero(6);
        }
        for (int c = 0; c < 4; ++c) {
            _tile_loadd(2, x[0].q[c], 64);
            if constexpr (BOTH) _tile_loadd(7, x[1].q[c], 64);
            _tile_loadd(3, rows.low[c], 64);
            _tile_dpbusd(0, 3, 2);
            if constexpr (BOTH) _tile_dpbusd(5, 3, 7);
            if constexpr (kDigitBits<T> != 0) {
                _tile_loadd(4, rows.high[c], 64);
                if constexpr (kDigitBits<T> == 3) {
                    _tile_dpbusd(1, 4, 2);
                    if constexpr (BOTH) _tile_dpbusd(6, 4, 7);
                } else {
                    _tile_dpbssd(1, 4, 2);
                    if constexpr (BOTH) _tile_dpbssd(6, 4, 7);
                }
            }
        }
        _tile_stored(0, memory_.low, 64);
        if constexpr (kDigitBits<T> != 0) _tile_stored(1, memory_.high, 64);
        if constexpr (BOTH) {
            _tile_stored(5, memory_.low + kUnit, 64);
            if constexpr (kDigitBits<T> != 0) _tile_stored(6, memory_.high + kUnit, 64);
        }
    }

    // sums[row] += the terms of a block.
    void finish(const Sixteen<T>& x, const Ints* low, const Ints* high, Floats* sums) const {
        const Rows& rows = memory_.rows;
        for (int r = 0; r < kUnit; ++r) {
            const Ints isum = kDigitBits<T> == 0 ? low[r] : _mm512_add_epi32(low[r], _mm512_slli_epi32(high[r], kDigitBits<T>));
            Ints msum = no_ints();
            for (int p = 0; p < kPairs<T>; ++p) msum = add_pairs(msum, everywhere_32(&rows.minima[r][p]), x.sums[p]);
            const Floats o = everywhere(T::kOffset ? rows.o[r] : 0.0f);
            add_term<T>(everywhere(rows.d[r]), &o, x.a, isum, msum, sums[r]);
        }
    }

    const uint8_t* rows_[kUnit];
    const char* ahead_;
    int columns_;
    const Columns<T>& x_;
    Memory& memory_;
};

}  // namespace spark::tile_matrix

#endif
