// Sixteen weight rows, unpacked once, times many activation rows: for prompts.
//
// A register holds four consecutive columns of some weight rows, a row per 32-bit lane, so that integer scales, factors
// and partial sums are lanes too and nothing is added up across lanes. A *part* is 256 columns: what goes to one of the
// eight partial sums of a product at a time (docs/arithmetic.md, "Products"). It is unpacked into the nearest cache and
// serves all activation rows before the next one.
#pragma once

#include "cpu/row_products.h"

#if SPARK_VECTORS == 512
#include "cpu/tile_registers_avx512.h"
#elif SPARK_VECTORS == 256
#include "cpu/tile_registers_avx2.h"
#endif

#if SPARK_VECTORS

namespace spark::tile_products {

using row_products::QuantisedRow;

constexpr int kRows = 16;
constexpr int kPass = 64;  // activation rows that share an unpacked part

// One part of sixteen rows. Registers of one kind that belong together follow each other.
struct Part {
    Ints q[64 * kStep<true>];
    Ints scale[16 * kRegisters];      // [sub-block]: as add_dots takes them
    Ints pairs[8 * kRegisters];       // [pair of sub-blocks], types with a bias
    Ints min_pairs[8 * kRegisters];   // [pair of sub-blocks], types with an offset
    Floats d[8 * kRegisters];         // [block]
    Floats o[8 * kRegisters];         // [block], types with an offset
};

// Where one thread works.
struct Memory {
    Part part;
    Floats sums[4][kPass * kRegisters];  // partial sums that live at the same time
};

template <class T>
inline void unpack_narrow(const uint8_t* const* rows, int blocks, Part& part) {
    for (int j = 0; j < blocks; j += 2) {
        const int second = j + 1 < blocks ? T::kBytes : 0;  // beyond the last block: that one again, for nothing
        store_columns<T::kSigned>(
            [&](int i) {
                const uint8_t* b = rows[i] + j * T::kBytes;
                return join(T::values(b), T::values(b + second));
            },
            part.q + 8 * j * kStep<T::kSigned>);
    }
    for (int j = 0; j < blocks; ++j) store_factors<T>(rows, j, part);
}

// sum += the term t of a block of each row. `d`, `o`: factors; of blocks of 256 the field is -o.
template <class T>
inline void add_term(Floats d, const Floats* o, Floats a, Ints isum, Ints msum, Floats& sum) {
    const Floats da = multiply(d, a), i = to_floats(isum);
    Floats t;
    if constexpr (!T::kOffset) {
        t = multiply(da, i);
    } else {
        const Floats other = multiply(multiply(*o, a), to_floats(msum));
        t = T::kBytes > 64 ? multiply_subtract(da, i, other) : multiply_add(da, i, other);
    }
    sum = add(sum, t);
}

// sum[m] += the terms of part `number` for M activation rows.
template <class T, int M>
void add_wide(const Part& part, const QuantisedRow* x, int number, Floats* sum) {
    constexpr int subs = 256 / T::kSub, steps = T::kSub / 4;
    constexpr int bias = T::kSigned ? kSignedBias : T::kBias;
    Ints isum[M * kRegisters];
    for (Ints& i : isum) i = no_ints();
    const int8_t* q[M];
    for (int m = 0; m < M; ++m) q[m] = x[m].q + 256 * number;
    for (int s = 0; s < subs; ++s) {
        add_dots<T, steps, M>(part.q + s * steps * kStep<T::kSigned>, q, part.scale + s * kRegisters, isum);
        for (int m = 0; m < M; ++m) q[m] += T::kSub;
    }
    for (int m = 0; m < M; ++m) {
        const int16_t* sums = T::kSub == 32 ? x[m].sums32 + 8 * number : x[m].sums16 + 16 * number;
        Ints surplus[kRegisters], msum[kRegisters];
        for (int r = 0; r < kRegisters; ++r) surplus[r] = msum[r] = no_ints();
        if constexpr (bias != 0 || T::kOffset) {
#pragma GCC unroll 8
            for (int p = 0; p < subs / 2; ++p) {
                const Ints both = everywhere_32(sums + 2 * p);
                for (int r = 0; r < kRegisters; ++r) {
                    if constexpr (bias != 0) surplus[r] = add_pairs(surplus[r], part.pairs[p * kRegisters + r], both);
                    if constexpr (T::kOffset) msum[r] = add_pairs(msum[r], part.min_pairs[p * kRegisters + r], both);
                }
            }
        }
        const Floats a = everywhere(x[m].a[number]);
        for (int r = 0; r < kRegisters; ++r) {
            Ints& i = isum[m * kRegisters + r];
            if constexpr (bias != 0) i = subtract_times(i, surplus[r], bias);
            add_term<T>(part.d[r], part.o + r, a, i, msum[r], sum[m * kRegisters + r]);
        }
    }
}

template <class T, int M>
void add_narrow(const Part& part, const QuantisedRow* x, int number, int blocks, Floats* sum) {
    constexpr int bias = T::kSigned ? kSignedBias : T::kBias;
    Ints scale[kRegisters];
    for (Ints& one : scale) one = unit_scale();
    for (int j = 0; j < blocks; ++j) {
        const int block = 8 * number + j;
        Ints isum[M * kRegisters];
        for (Ints& i : isum) i = no_ints();
        const int8_t* q[M];
        for (int m = 0; m < M; ++m) q[m] = x[m].q + 32 * block;
        add_dots<T, 8, M>(part.q + 8 * j * kStep<T::kSigned>, q, scale, isum);
        for (int m = 0; m < M; ++m) {
            const int32_t sum_of_x = x[m].sums32[block];
            const Floats a = everywhere(x[m].a[block]);
            for (int r = 0; r < kRegisters; ++r) {
                Ints& i = isum[m * kRegisters + r];
                if constexpr (bias != 0) i = subtract_times(i, everywhere_32(&sum_of_x), bias);
                add_term<T>(part.d[j * kRegisters + r], part.o + j * kRegisters + r, a, i, everywhere_32(&sum_of_x),
                            sum[m * kRegisters + r]);
            }
        }
    }
}

template <class T, int M>
inline void add_part(const Part& part, const QuantisedRow* x, int number, int blocks, Floats* sum) {
    if constexpr (T::kBytes > 64)
        add_wide<T, M>(part, x, number, sum);
    else
        add_narrow<T, M>(part, x, number, blocks, sum);
}

// sums[0] .. sums[registers - 1]: of the partials first, first + step, ... in the order of the halving tree.
// partial(first, sums) makes one. A partial without a part is +0, which changes nothing. Of `sums` there is room for four
// times `room`.
template <class Partial>
void halving_tree(int columns, int registers, int room, Floats* sums, const Partial& partial, int first = 0, int step = 1) {
    if (step == 8) return partial(first, sums);
    halving_tree(columns, registers, room, sums, partial, first, 2 * step);
    if (256 * (first + step) >= columns) return;
    halving_tree(columns, registers, room, sums + room, partial, first + step, 2 * step);
    for (int i = 0; i < registers; ++i) sums[i] = add(sums[i], sums[room + i]);
}

// Sixteen rows (fewer: the last one again, for nothing) times `count` <= kPass activation rows.
template <class T>
class Tile {
  public:
    Tile(const uint8_t* w, int64_t row_bytes, int rows, int columns, const QuantisedRow* x, int count, Memory& memory)
        : columns_(columns), x_(x), count_(count), memory_(memory) {
        for (int i = 0; i < kRows; ++i) rows_[i] = w + std::min(i, rows - 1) * row_bytes;
        ahead_ = reinterpret_cast<const char*>(w + kRows * row_bytes);
    }

    // [count][kRows], until the memory is used again.
    const Floats* products() {
        halving_tree(columns_, count_ * kRegisters, kPass * kRegisters, memory_.sums[0],
                     [&](int first, Floats* sums) { partial(first, sums); });
        return memory_.sums[0];
    }

  private:
    static constexpr int kPartBytes = T::kBytes > 64 ? T::kBytes : 8 * T::kBytes;

    void partial(int first, Floats* sums) {
        for (int i = 0; i < count_ * kRegisters; ++i) sums[i] = everywhere(0.0f);
        for (int number = first; 256 * number < columns_; number += 8) {
            const int blocks = std::min(8, (columns_ - 256 * number) / 32);
            unpack(number, blocks);
            int m = 0;
            for (; m + kGroup <= count_; m += kGroup)
                add_part<T, kGroup>(memory_.part, x_ + m, number, blocks, sums + m * kRegisters);
            if constexpr (kGroup > 4)
                for (; m + 4 <= count_; m += 4)
                    add_part<T, 4>(memory_.part, x_ + m, number, blocks, sums + m * kRegisters);
            for (; m + 2 <= count_; m += 2)
                add_part<T, 2>(memory_.part, x_ + m, number, blocks, sums + m * kRegisters);
            for (; m < count_; ++m) add_part<T, 1>(memory_.part, x_ + m, number, blocks, sums + m * kRegisters);
        }
    }

    void unpack(int number, int blocks) {
        const uint8_t* rows[kRows];
        for (int i = 0; i < kRows; ++i) rows[i] = rows_[i] + static_cast<int64_t>(number) * kPartBytes;
        if constexpr (T::kBytes > 64) {
            fetch_ahead();
            store_block<T>(rows, memory_.part.q);
            fetch_ahead();
            store_scales<T>(rows, memory_.part);
        } else {
            fetch_ahead();
            fetch_ahead();
            unpack_narrow<T>(rows, blocks, memory_.part);
        }
        fetch_ahead();
    }

    // A third of a part of the next tile, from its first byte to its last: what the parts take here and there is a
    // stream to the hardware. At once they would be more lines than a core can wait for.
    void fetch_ahead() {
        constexpr int lines = (kRows * kPartBytes / 64 + 2) / 3;
        for (int i = 0; i < lines; ++i, ahead_ += 64) _mm_prefetch(ahead_, _MM_HINT_T1);
    }

    const uint8_t* rows_[kRows];
    const char* ahead_;
    int columns_;
    const QuantisedRow* x_;
    int count_;
    Memory& memory_;
};

}  // namespace spark::tile_products

#endif
