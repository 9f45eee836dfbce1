// A whole plan under sanitizers: every operation of a small program, cut into chunks, on several threads, with experts
// that come late, and what a device has the CPU compute; weights, state and results in memory of exactly their size. All
// ways must give the same bits.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "cpu/elementwise.h"
#include "cpu/experts.h"
#include "cpu/host_experts.h"
#include "cpu/linear.h"
#include "cpu/plan.h"
#include "cpu/recurrent.h"
#include "cpu/sampler.h"
#include "matrix_unit.h"

using namespace spark;

namespace {

constexpr int kWidth = 256, kDim = 64, kHeads = 4, kKvHeads = 2, kVHeads = 2, kTaps = 4;
constexpr int kExperts = 6, kTopK = 2, kVocabulary = 96, kMaxRows = 96;
constexpr int64_t kKvBytes = kKvHeads * kPage * kDim * 2, kConvBytes = (kTaps - 1) * kWidth * 4;
constexpr int64_t kRecordBytes = kConvBytes + kVHeads * kDim * kDim * 4;

// Memory of exactly so many bytes: one more or less that is touched is noticed.
using Memory = std::unique_ptr<uint8_t[]>;

class Weights {
  public:
    Weight make(const std::string& name, int type, int64_t rows, int columns) {
        const Format& format = *find_format(type);
        const auto blocks = static_cast<size_t>(rows * (columns / format.block));
        Memory& memory = memory_[name];
        if (memory == nullptr) {
            memory.reset(new uint8_t[blocks * static_cast<size_t>(format.bytes)]);
            for (size_t i = 0; i < blocks; ++i) fill(type, memory.get() + i * static_cast<size_t>(format.bytes));
        }
        return Weight(reinterpret_cast<uint64_t>(memory.get()), type, rows, columns);
    }
    uint64_t address(const std::string& name) const { return reinterpret_cast<uint64_t>(memory_.at(name).get()); }

  private:
    // A block whose values are about 1 / sqrt(kWidth).
    void fill(int type, uint8_t* b) {
        const Format& format = *find_format(type);
        for (int i = 0; i < format.bytes; ++i) b[i] = static_cast<uint8_t>(random_());
        const auto half = [&](int at, uint16_t bits) { std::memcpy(b + at, &bits, 2); };
        const float value = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-34f;
        switch (type) {
            case F32: std::memcpy(b, &value, 4); break;
            case F16: half(0, f32_to_f16(value)); break;
            case Q8_0: half(0, 0x1000); break;
            case Q4_K: half(0, 0x0c00), half(2, 0x1780); break;
            case Q6_K: half(208, 0x0400); break;
            case IQ2_S: half(0, 0x1800); break;
        }
    }

    std::map<std::string, Memory> memory_;
    std::mt19937 random_{1};
};

// Two layers of experts: the pieces of their records, of different types.
struct Pieces {
    int gate, up, down;
};
constexpr Pieces kPieces[2] = {{Q4_K, Q4_K, Q6_K}, {F16, Q8_0, IQ2_S}};

int64_t piece_bytes(int type) {
    const Format& format = *find_format(type);
    return static_cast<int64_t>(kWidth) * (kWidth / format.block) * format.bytes;
}

std::string record_name(int layer, int expert) { return "record " + std::to_string(layer) + " " + std::to_string(expert); }

class Machine {
  public:
    Machine(Weights& weights, int threads) : weights_(weights), plan_(kMaxRows, threads, 12288) {
        build();
        pages_.reset(new uint8_t[static_cast<size_t>(2 * 2 * kKvBytes)]);
        record_.reset(new uint8_t[static_cast<size_t>(kRecordBytes)]);
        std::memset(pages_.get(), 0xff, static_cast<size_t>(2 * 2 * kKvBytes));
        std::memset(record_.get(), 0xff, static_cast<size_t>(kRecordBytes));
        State& state = plan_.step().state;
        state.pages = {pages_.get()};
        state.page_bytes = {2 * kKvBytes};
        state.records = record_.get();
        state.record_bytes = kRecordBytes;
    }

    // Logits of every row, in steps of `chunk` rows. `late`: experts get their addresses only when they are missed.
    std::vector<float> run(const std::vector<int32_t>& tokens, int64_t chunk, bool late) {
        for (int layer = 0; layer < 2; ++layer)
            for (int e = 0; e < kExperts; ++e)
                plan_.step().records[static_cast<size_t>(layer)][static_cast<size_t>(e)] =
                    late && e % 2 == 0 ? 0 : weights_.address(record_name(layer, e));
        std::vector<float> logits(tokens.size() * kVocabulary);
        for (int64_t start = 0; start < static_cast<int64_t>(tokens.size()); start += chunk) {
            const int64_t count = std::min(chunk, static_cast<int64_t>(tokens.size()) - start);
            step(tokens.data() + start, start, count, logits.data() + start * kVocabulary);
        }
        return logits;
    }

  private:
    void step(const int32_t* tokens, int64_t start, int64_t count, float* logits) {
        std::vector<int32_t> rows(static_cast<size_t>(count));
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
        std::vector<int16_t> experts(static_cast<size_t>(2 * count * kTopK));
        std::vector<int32_t> waited(static_cast<size_t>(count));
        const Segment segment = {0, count, start, 0, count == 1, {table_.data()}};
        plan_.run({tokens, count, {segment}, rows.data(), count}, logits, experts.data(), waited.data());
        while (plan_.step().paused != nullptr) {
            const int layer = static_cast<int>(plan_.paused().layer());
            const std::vector<int32_t> absent = plan_.paused().absent();
            if (count > 1) plan_.meanwhile();
            for (auto expert = absent.rbegin(); expert != absent.rend(); ++expert)
                plan_.compute({*expert}, {weights_.address(record_name(layer, *expert))});
            plan_.resume();
        }
    }

    Value value(int width) {
        const Value made = {values_++, offset_, width};
        offset_ += width;
        return made;
    }
    Weight vector(const char* name, int columns) { return weights_.make(name, F32, 1, columns); }
    Value linear(Value x, const char* name, int type, int width) {
        const Value out = value(width);
        plan_.add<Linear>(plan_.step(), x, weights_.make(name, type, width, x.width), out);
        return out;
    }

    void build() {
        Step& step = plan_.step();
        const Value x = value(kWidth), h = value(kWidth);
        plan_.add<Embed>(weights_.make("embedding", Q6_K, kVocabulary, kWidth), x);
        plan_.add<RmsNorm>(x, vector("norm", kWidth), h, 1e-6f);
        const Value u = linear(h, "qkv", Q4_K, kWidth), qkv = value(kWidth);
        plan_.add<CausalConv>(step, u, weights_.make("conv", F32, kWidth, kTaps), qkv, kTaps, int64_t{0});
        const Value alpha = linear(h, "alpha", F32, kVHeads), beta = linear(h, "beta", F32, kVHeads);
        const Value delta = value(kVHeads * kDim), z = linear(h, "z", Q8_0, kVHeads * kDim), g = value(kVHeads * kDim);
        plan_.add<GatedDelta>(step, qkv, alpha, beta, vector("a", kVHeads), vector("dt", kVHeads), delta,
                              GatedDelta::Shape{1, kVHeads, kDim, 1e-6f, kConvBytes});
        plan_.add<GatedRmsNorm>(delta, z, vector("head norm", kDim), g, kVHeads, kDim, 1e-6f);
        const Value mixed = linear(g, "mix", F16, kWidth), y = value(kWidth), q = value(kWidth), turned = value(kWidth);
        plan_.add<Add>(x, mixed, y);
        plan_.add<QkNorm>(y, vector("head norm", kDim), q, Heads{kHeads, kDim, kDim, 0}, 1e-6f);
        plan_.add<Rope>(step, q, turned, kHeads, kDim, plan_.add_rope_table({1.0, 0.1, 0.01}, 1.25));
        const Value k = linear(y, "k", IQ2_S, kKvHeads * kDim), v = linear(y, "v", Q6_K, kKvHeads * kDim);
        const Value o = value(kWidth), gated = value(kWidth);
        plan_.add<Attention>(step, turned, k, v, o,
                             Attention::Shape{kHeads, kKvHeads, kDim, 0.125f, 70, 0, 0, kKvBytes});
        plan_.add<OutputGate>(o, y, gated, Heads{kHeads, kDim, kDim, 0}, true, false);
        const Value first = experts(gated, 0, false), second = experts(first, 1, true);
        plan_.add_overtakers(1);
        const Value shared = linear(first, "shared", Q8_0, kWidth), last = value(kWidth);
        plan_.add<SwiGlu>(shared, second, last);
        plan_.add<Logits>(step, last, weights_.make("head", Q4_K, kVocabulary, kWidth));
    }

    Value experts(Value x, int layer, bool sigmoid) {
        Step& step = plan_.step();
        const Value out = value(kWidth);
        const Pieces& types = kPieces[layer];
        const int64_t up = piece_bytes(types.gate), down = up + piece_bytes(types.up);
        const Weight router = weights_.make("router " + std::to_string(layer), F32, kExperts, kWidth);
        const float* bias = sigmoid ? float_vector(vector("bias", kExperts)) : nullptr;
        const size_t choice = plan_.add_choice(kTopK);
        plan_.add<Route>(step, x, router, bias, choice, sigmoid, 1.5f);
        for (int e = 0; e < kExperts; ++e) make_record(layer, e);
        const size_t records = plan_.add_expert_layer(kExperts);
        plan_.add<Experts>(step, x, choice, out, records, Weight(0, types.gate, kWidth, kWidth),
                           Weight(static_cast<uint64_t>(up), types.up, kWidth, kWidth),
                           Weight(static_cast<uint64_t>(down), types.down, kWidth, kWidth));
        return out;
    }

    // A record is three weights one after another, in one piece of memory.
    void make_record(int layer, int expert) {
        const std::string name = record_name(layer, expert);
        const Pieces& types = kPieces[layer];
        const std::string parts[3] = {name + " gate", name + " up", name + " down"};
        const int type[3] = {types.gate, types.up, types.down};
        int64_t bytes = 0;
        for (int i = 0; i < 3; ++i) {
            weights_.make(parts[i], type[i], kWidth, kWidth);
            bytes += piece_bytes(type[i]);
        }
        // Bytes of a record are an F32 vector as far as memory goes.
        const Weight record = weights_.make(name, F32, 1, static_cast<int>(bytes / 4));
        auto* at = reinterpret_cast<uint8_t*>(record.address);
        for (int i = 0; i < 3; ++i) {
            std::memcpy(at, reinterpret_cast<const uint8_t*>(weights_.address(parts[i])), static_cast<size_t>(piece_bytes(type[i])));
            at += piece_bytes(type[i]);
        }
    }

    Weights& weights_;
    Plan plan_;
    Memory pages_, record_;
    const std::vector<int32_t> table_ = {1, 0};
    int values_ = 0;
    int64_t offset_ = 0;
};

int check_sampler(const std::vector<float>& logits) {
    const std::vector<int32_t> bias_ids = {3, kVocabulary - 1}, history = {1, 2, 2, 500, -1};
    const std::vector<float> bias = {1.0f, -1.0f};
    int outside = 0;
    for (uint64_t index = 0; index < 50; ++index) {
        const float temperature = static_cast<float>(index % 3);
        const SamplerOptions options = {temperature, static_cast<int32_t>(index % 7), 0.9, 0.01, 1.1f, 0.5f, 0.25f,
                                        bias_ids.data(), bias.data(), bias.size(), index};
        const int32_t id = sample(logits.data(), kVocabulary, options, {history.data(), 2, history.size()}, index);
        outside += id < 0 || id >= kVocabulary;
        outside += logprobs(logits.data(), kVocabulary, id, static_cast<int32_t>(index)).size() < 1;
    }
    return outside;
}

// What a device has the CPU compute, in calls from threads of their own: one row by one thread is what all others give.
int check_host_experts(Weights& weights) {
    constexpr int64_t kRows = 3, kPairs = kRows * kTopK;
    std::mt19937 random(7);
    std::vector<float> x(static_cast<size_t>(kRows * kWidth));
    for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    const std::vector<int32_t> wanted = {2, -1, 5, 2, -1, -1};
    const auto call = [&](int layer, int threads, int64_t first, int64_t rows, std::vector<float>& results) {
        std::vector<int32_t> told = {static_cast<int32_t>(rows)};
        told.insert(told.end(), wanted.begin() + first * kTopK, wanted.begin() + (first + rows) * kTopK);
        HostExperts host(rows, threads, kTopK, told.data(), x.data() + first * kWidth,
                         results.data() + first * kTopK * kWidth);
        const Pieces& types = kPieces[layer];
        const int64_t up = piece_bytes(types.gate), down = up + piece_bytes(types.up);
        std::vector<uint64_t> records;
        for (int e = 0; e < kExperts; ++e) records.push_back(weights.address(record_name(layer, e)));
        void* data = host.add_layer(Weight(0, types.gate, kWidth, kWidth),
                                    Weight(static_cast<uint64_t>(up), types.up, kWidth, kWidth),
                                    Weight(static_cast<uint64_t>(down), types.down, kWidth, kWidth), records);
        std::thread(HostExperts::call, data).join();
        if (!host.failure().empty()) std::printf("host: %s\n", host.failure().c_str());
        told[1] = kExperts;
        std::thread(HostExperts::call, data).join();
        return host.failure().empty();
    };
    int failures = 0;
    for (int layer = 0; layer < 2; ++layer) {
        std::vector<float> expected(static_cast<size_t>(kPairs * kWidth), -1.0f), found = expected;
        for (int64_t row = 0; row < kRows; ++row) failures += call(layer, 1, row, 1, expected);
        failures += call(layer, 3, 0, kRows, found);
        failures += std::memcmp(expected.data(), found.data(), found.size() * sizeof(float)) != 0;
        for (size_t pair = 0; pair < wanted.size(); ++pair) failures += (found[pair * kWidth] == -1.0f) != (wanted[pair] < 0);
    }
    if (failures) std::printf("what the CPU computes for a device: %d differences\n", failures);
    return failures;
}

}  // namespace

int main() {
    ask_for_matrix_unit();
    Weights weights;
    std::vector<int32_t> tokens(kMaxRows);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % kVocabulary);
    const std::vector<float> expected = Machine(weights, 1).run(tokens, kMaxRows, false);
    int failures = 0;
    for (size_t i = 1; i < expected.size(); ++i) failures += !is_finite(expected[i]) || expected[i] == expected[i - 1];
    if (failures) std::printf("%d logits are not finite, or equal their neighbour\n", failures);
    struct {
        int threads;
        int64_t chunk;
        bool late;
    } const ways[] = {{1, 1, false}, {3, 17, false}, {2, 40, true}, {3, 1, true}};
    for (const auto& way : ways) {
        const std::vector<float> logits = Machine(weights, way.threads).run(tokens, way.chunk, way.late);
        const bool same = std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)) == 0;
        if (!same) std::printf("%d threads, chunks of %d: other logits\n", way.threads, static_cast<int>(way.chunk));
        failures += !same;
    }
    failures += check_host_experts(weights);
    failures += check_sampler(std::vector<float>(expected.end() - kVocabulary, expected.end()));
    std::printf("plan: %d differences\n", failures);
    return failures != 0;
}
