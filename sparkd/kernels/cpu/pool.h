// A few threads that share out the blocks of a loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace spark {

// Sets the IEEE defaults (nearest even, no flush to zero, exceptions masked) and restores what was there before.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    uint32_t before_ = 0;
};

// `threads` workers, the caller of `run` being number 0. Which thread takes which part changes from run to run; a
// result may therefore depend on the part alone. One caller at a time.
//
// Nobody waits for a worker that has taken nothing: where another process has its core, the caller does the work. A
// worker looks for work for a while, then parks.
class ThreadPool {
  public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(begin, end, thread) for parts of [0, count), whose limits are multiples of `grain`, and returns when
    // all are done. `body` must not throw.
    template <class Body>
    void run(int64_t count, int64_t grain, const Body& body) {
        if (workers_.empty() || count <= grain) {
            if (count > 0) body(int64_t{0}, count, 0);
            return;
        }
        share_out({&body, [](const void* b, int64_t begin, int64_t end, int thread) {
                       (*static_cast<const Body*>(b))(begin, end, thread);
                   }, count, grain});
    }

  private:
    struct Work {
        const void* body;
        void (*call)(const void* body, int64_t begin, int64_t end, int thread);
        int64_t count, grain;
    };

    void share_out(const Work& work);
    void take_parts(int thread);
    void work(int thread);
    void wait_for_work(uint32_t seen);
    uint32_t run_number() const { return static_cast<uint32_t>(next_.load() >> 32); }

    Work work_ = {};  // written while nobody has a part
    // Number of the run, and in the lower half the first grain that no thread has taken: a thread that comes late finds
    // another run's number when it takes a part, and takes none.
    std::atomic<uint64_t> next_{0};
    std::atomic<uint32_t> grains_{0};
    std::atomic<uint32_t> done_{0};  // grains
    std::atomic<int> parked_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace spark
