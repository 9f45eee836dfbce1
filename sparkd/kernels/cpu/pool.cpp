#include "cpu/pool.h"

#include <pthread.h>

#include <cfenv>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spark {

namespace {

// The gap between two loops of a step is a few microseconds, a wake-up from sleep costs tens: look for work this often
// before going to sleep. Short, because the machine's cores may be wanted by others.
constexpr int kSpins = 4000;
constexpr uint32_t kNothingLeft = 0xffffffff;

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
    stop_.store(true);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        next_.fetch_add(uint64_t{1} << 32);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::share_out(const Work& work) {
    // 32 bits count the grains; more of them than 2^20 serve nobody.
    const int64_t grain = std::max(work.grain, (work.count >> 20) / work.grain * work.grain + work.grain);
    const auto grains = static_cast<uint32_t>((work.count + grain - 1) / grain);
    const uint32_t number = run_number();
    next_.store(static_cast<uint64_t>(number) << 32 | kNothingLeft);  // for whoever still looks at the last run
    work_ = work;
    work_.grain = grain;
    grains_.store(grains);
    done_.store(0);
    next_.store(static_cast<uint64_t>(number + 1) << 32);
    if (parked_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    take_parts(0);
    for (int spin = 0; done_.load(std::memory_order_acquire) != grains; ++spin)
        if (spin < kSpins)
            pause();
        else
            std::this_thread::yield();
}

void ThreadPool::take_parts(int thread) {
    const auto threads = static_cast<uint32_t>(workers_.size() + 1);
    uint64_t next = next_.load();
    for (;;) {
        const uint32_t first = static_cast<uint32_t>(next), grains = grains_.load();
        if (first >= grains) return;
        // Large parts first, for few meetings; small ones last, so that all end together.
        const uint32_t size = std::max(1u, (grains - first) / (4 * threads));
        if (!next_.compare_exchange_weak(next, next + size)) continue;
        const Work& work = work_;
        work.call(work.body, first * work.grain, std::min((first + size) * work.grain, work.count), thread);
        done_.fetch_add(size, std::memory_order_release);
        next = next_.load();
    }
}

void ThreadPool::wait_for_work(uint32_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (run_number() != seen) return;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.fetch_add(1);
    // wake_.wait() is a symbol of g++ 12 and later, the only one here: a wheel would not run where the runtime is older.
    while (run_number() == seen) pthread_cond_wait(wake_.native_handle(), mutex_.native_handle());
    parked_.fetch_sub(1);
}

void ThreadPool::work(int thread) {
    const FloatEnvironment environment;
    uint32_t seen = 0;
    for (;;) {
        wait_for_work(seen);
        if (stop_.load()) return;
        seen = run_number();
        take_parts(thread);
    }
}

}  // namespace spark
