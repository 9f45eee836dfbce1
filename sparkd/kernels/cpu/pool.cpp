#include "cpu/pool.h"

#include <cfenv>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spark {

namespace {

// The gap between two loops of a step is a few microseconds, a wake-up from sleep costs tens: look for work this often
// before going to sleep. Short, because the machine's cores may be wanted by others.
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : before_(_mm_getcsr()) {
    constexpr uint32_t kDefault = 0x1f80;
    _mm_setcsr(kDefault);
}
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(before_); }
#else
FloatEnvironment::FloatEnvironment() : before_(static_cast<uint32_t>(std::fegetround())) { std::fesetenv(FE_DFL_ENV); }
FloatEnvironment::~FloatEnvironment() { std::fesetround(static_cast<int>(before_)); }
#endif

ThreadPool::ThreadPool(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, int64_t grain, const Body& body) {
    if (workers_.empty() || count <= grain) {
        for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count), 0);
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        count_ = count;
        grain_ = grain;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_blocks(0);
    while (busy_.load(std::memory_order_acquire) != 0) {
        for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) != 0; ++spin) pause();
        if (busy_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
    }
}

void ThreadPool::take_blocks(int thread) {
    for (;;) {
        const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= count_) return;
        (*body_)(begin, std::min(begin + grain_, count_), thread);
    }
}

void ThreadPool::work(int thread) {
    const FloatEnvironment environment;
    uint64_t seen = 0;
    for (;;) {
        for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) pause();
        if (generation_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stop_) return;
        take_blocks(thread);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace spark
