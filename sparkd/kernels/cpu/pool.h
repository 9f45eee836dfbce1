// A few threads that share out the blocks of a loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
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

// `threads` workers, the caller of `run` being number 0. Which thread takes which block changes from run to run; a
// result may therefore depend on the block alone. One caller at a time.
class ThreadPool {
  public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    using Body = std::function<void(int64_t begin, int64_t end, int thread)>;

    // Calls body(begin, end, thread) for [0, count) cut into blocks of at most `grain`, and returns when all are done.
    // `body` must not throw.
    void run(int64_t count, int64_t grain, const Body& body);

  private:
    void work(int thread);
    void take_blocks(int thread);

    const Body* body_ = nullptr;
    int64_t count_ = 0;
    int64_t grain_ = 1;
    std::atomic<int64_t> next_{0};         // first index that no thread has taken
    std::atomic<uint64_t> generation_{0};  // counts runs; a change wakes the workers
    std::atomic<int> busy_{0};             // workers still inside the current run
    bool stop_ = false;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace spark
