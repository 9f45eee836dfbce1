// The shadow policy of sparkd/calibration/shadow.py over the ring of sparkd/residency/ring.py, line by line, for the
// policy laboratory, which plays many of them. tests/unit/test_policies.py compares the two.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr double kForgotten = 50.0;

struct Entry {
    double bound;
    int64_t coming;
    int32_t record;
};

bool later(const Entry& a, const Entry& b) {
    return a.bound != b.bound ? a.bound > b.bound : a.coming > b.coming;
}

struct Shadow {
    std::vector<int32_t> slabs;
    std::vector<int64_t> capacity, taken, members;
    std::vector<double> logs;
    std::vector<int64_t> coming;  // of ring members, 0: none
    std::vector<char> pinned;
    std::vector<std::vector<Entry>> heaps;
    double now = 0.0, tick = 1.0;
    int64_t comings = 0;

    bool holds(int32_t record) const { return pinned[record] || coming[record]; }

    void add(int32_t record) {
        auto& heap = heaps[slabs[record]];
        coming[record] = ++comings;
        ++members[slabs[record]];
        heap.push_back({std::max(logs[record], now), comings, record});
        std::push_heap(heap.begin(), heap.end(), later);
    }

    void remove(int32_t record) {
        coming[record] = 0;
        --members[slabs[record]];
    }

    int32_t coldest(std::vector<Entry>& heap) {
        for (;;) {
            Entry entry = heap.front();
            const bool gone = coming[entry.record] != entry.coming;
            if (!gone && !(logs[entry.record] > entry.bound)) return entry.record;
            std::pop_heap(heap.begin(), heap.end(), later);
            heap.pop_back();
            if (gone) continue;
            entry.bound = logs[entry.record];
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), later);
        }
    }

    void evict() {
        for (size_t slab = 0; slab < heaps.size(); ++slab)
            while (members[slab] > std::max<int64_t>(capacity[slab] - taken[slab], 0)) remove(coldest(heaps[slab]));
    }
};

}  // namespace

extern "C" {

Shadow* shadow_new(const int32_t* slabs, int64_t records, const int64_t* capacity, int64_t slab_count) {
    auto* shadow = new Shadow;
    shadow->slabs.assign(slabs, slabs + records);
    shadow->capacity.assign(capacity, capacity + slab_count);
    shadow->taken.assign(slab_count, 0);
    shadow->members.assign(slab_count, 0);
    shadow->heaps.resize(slab_count);
    shadow->logs.assign(records, -std::numeric_limits<double>::infinity());
    shadow->coming.assign(records, 0);
    shadow->pinned.assign(records, 0);
    return shadow;
}

void shadow_free(Shadow* shadow) { delete shadow; }

void shadow_half_life(Shadow* shadow, double half_life) { shadow->tick = 1.0 / half_life; }

// `wanted` is sorted and names no record twice.
int64_t shadow_pin(Shadow* shadow, const int32_t* wanted, int64_t count) {
    std::vector<char> before = shadow->pinned;
    std::fill(shadow->pinned.begin(), shadow->pinned.end(), 0);
    std::fill(shadow->taken.begin(), shadow->taken.end(), 0);
    int64_t brought = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t record = wanted[i];
        shadow->pinned[record] = 1;
        ++shadow->taken[shadow->slabs[record]];
        if (before[record]) continue;
        if (shadow->coming[record]) shadow->remove(record);
        else ++brought;
    }
    for (size_t record = 0; record < before.size(); ++record)
        if (before[record] && !shadow->pinned[record]) shadow->add(static_cast<int32_t>(record));
    shadow->evict();
    return brought;
}

int64_t shadow_step(Shadow* shadow, const int32_t* records, int64_t count) {
    const double now = shadow->now += shadow->tick;
    std::vector<int32_t> missed;
    for (int64_t i = 0; i < count; ++i) {
        double& log = shadow->logs[records[i]];
        const double age = now - log;
        log = age < kForgotten ? now + std::log2(1.0 + std::pow(2.0, -age)) : now;
        if (!shadow->holds(records[i])) missed.push_back(records[i]);
    }
    for (const int32_t record : missed) shadow->add(record);
    if (!missed.empty()) shadow->evict();
    return count - static_cast<int64_t>(missed.size());
}

}  // extern "C"
