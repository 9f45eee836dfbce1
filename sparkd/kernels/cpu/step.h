// What the operations of a step share: its rows, the sequences they belong to, where values lie, scratch memory.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/pool.h"
#include "cpu/products.h"

namespace spark {

// Positions of a KV page.
constexpr int kPage = 64;

// A value: rows of `width` floats, `offset` floats per row into the arena. Places are used again, `id`s are not.
struct Value {
    int id;
    int64_t offset;
    int width;
};

// Per-sequence state, owned by the caller: pages[g] + page * page_bytes[g], records + slot * record_bytes.
struct State {
    std::vector<uint8_t*> pages;
    std::vector<int64_t> page_bytes;
    uint8_t* records = nullptr;
    int64_t record_bytes = 0;
    bool half = true;  // K and V are f16, else f32
};

// Consecutive rows of one sequence: rows row .. row+length-1 of the step at positions start .. start+length-1.
struct Segment {
    int64_t row;
    int64_t length;
    int64_t start;
    int64_t slot;
    bool decode;  // what its rows count as
    std::vector<const int32_t*> pages;  // per page group: logical page to physical page
};

// cos and sin of every pair of one rope table for every row of the step: [rows][pairs].
struct Angles {
    std::vector<double> inv_freq;
    double magnitude;
    std::vector<float> cosine, sine;

    int pairs() const { return static_cast<int>(inv_freq.size()); }
};

// The choice of one `route` operation: [rows][top_k], best first.
struct Choice {
    int top_k;
    std::vector<int32_t> ids;
    std::vector<float> weights;
};

// Memory of one thread.
struct Scratch {
    ProductMemory products;
    std::vector<float> floats;
};

// Memory that operations share one after another, as large as the largest asked for.
struct Workspace {
    Forms inputs;              // of the value that `Step::activations` was last asked for
    Forms hidden;              // of the experts' inner rows
    Forms gathered;            // of the rows whose logits are wanted
    std::vector<float> inner;   // gathered rows; router logits; gate and then inner rows of experts
    std::vector<float> up;      // inner rows of experts
    std::vector<Target> targets;
    std::vector<float> ranked;  // results of experts: [row][rank][hidden]

    static void reserve(std::vector<float>& memory, int64_t floats) {
        if (static_cast<int64_t>(memory.size()) < floats) memory.resize(static_cast<size_t>(floats));
    }
};

class Experts;

// One step in progress. Memory is reserved while the plan is built; running operations allocate nothing.
class Step {
  public:
    Step(int64_t max_rows, int threads)
        : pool(threads), max_rows(max_rows), scratch(static_cast<size_t>(threads)) {}

    // --- while the plan is built

    void reserve_products(const Weight& weight, Forms& forms, int64_t rows) {
        forms.reserve(weight.format->cls, rows * weight.columns);
        for (Scratch& s : scratch) s.products.reserve(weight.columns);
        if (static_cast<int64_t>(work.targets.size()) < rows) work.targets.resize(static_cast<size_t>(rows));
    }
    void reserve_scratch(int64_t floats) {
        for (Scratch& s : scratch) Workspace::reserve(s.floats, floats);
    }

    // --- while it runs

    float* rows_of(Value value) { return arena.data() + value.offset * max_rows; }
    float* row_of(Value value, int64_t row) { return rows_of(value) + row * value.width; }

    // All rows of `value` in the form of `cls`, converted once as long as no other value is asked for between.
    const Activations& activations(Value value, Class cls) {
        if (taken != value.id) work.inputs.take(rows_of(value), rows, value.width);
        taken = value.id;
        return work.inputs.get(pool, cls);
    }

    // Calls body(row, thread) for every row; `cost` is about the number of elements a row takes.
    template <class Body>
    void for_rows(int64_t cost, const Body& body) {
        constexpr int64_t kWorthWaking = 8192;
        pool.run(rows, std::max<int64_t>(1, kWorthWaking / std::max<int64_t>(1, cost)),
                 [&](int64_t begin, int64_t end, int thread) {
                     for (int64_t row = begin; row < end; ++row) body(row, thread);
                 });
    }

    // The page that holds `position` of a segment's sequence.
    uint8_t* page(size_t group, const Segment& segment, int64_t position) const {
        return state.pages[group] + segment.pages[group][position / kPage] * state.page_bytes[group];
    }
    // Recurrent state of a segment's sequence, `offset` bytes into its record.
    float* record(const Segment& segment, int64_t offset) const {
        return reinterpret_cast<float*>(state.records + segment.slot * state.record_bytes + offset);
    }

    ThreadPool pool;
    const int64_t max_rows;
    State state;
    std::vector<float> arena;
    std::vector<Scratch> scratch;
    Workspace work;
    std::vector<Angles> angles;
    std::vector<Choice> choices;
    std::vector<std::vector<uint64_t>> records;  // [expert layer][expert]: addresses

    // The batch.
    int64_t rows = 0;
    const int32_t* tokens = nullptr;
    std::vector<Segment> segments;
    std::vector<const Segment*> segment_of;  // per row
    std::vector<int64_t> position;           // per row
    const int32_t* logits_rows = nullptr;
    int64_t logits_count = 0;
    float* logits = nullptr;  // [logits_count][vocab]
    int32_t best_of = 0;      // of so many ids the best is wanted, if any
    int32_t* best = nullptr;  // [logits_count]: see best_token
    int taken = -1;           // id of the value in work.inputs
    std::vector<int32_t> waited;  // per row: of the experts it chose, those that had no address
    Experts* paused = nullptr;    // what the step waits in
};

// One operation of a plan with its operands bound. Constructors reserve what `run` needs.
class Operation {
  public:
    virtual ~Operation() = default;
    virtual void run(Step& step) = 0;
};

}  // namespace spark
