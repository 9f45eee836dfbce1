// Threads that read pieces of files straight to their places in memory, without the interpreter.
//
// A step waits for what is read here, and whoever computes it wants the processors at the same time: so a piece costs
// no thread a turn of the interpreter's lock, neither to begin nor to end.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

// Descriptor, first byte, bytes that are needed from there on, bytes to ask for (whole blocks), address.
using Piece = std::tuple<int, int64_t, int64_t, int64_t, uint64_t>;
// Number of a job, and whether all of its pieces are in place.
using Ended = std::pair<uint64_t, bool>;

bool in_place(const Piece& piece) {
    const auto& [fd, first, needed, size, address] = piece;
    for (int64_t done = 0; done < needed;) {
        const ssize_t n = pread(fd, reinterpret_cast<void*>(address + static_cast<uint64_t>(done)),
                                static_cast<size_t>(size - done), first + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        done += n;
    }
    return true;
}

// std::condition_variable::wait is a symbol of g++ 12 and later: a wheel would not run where the runtime is older.
void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
    pthread_cond_wait(changed.native_handle(), lock.mutex()->native_handle());
}

class Readers {
  public:
    explicit Readers(int threads) {
        if (threads < 1 || threads > 1024) throw std::invalid_argument("1 to 1024 threads read");
        for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { work(); });
    }
    ~Readers() { close(); }
    Readers(const Readers&) = delete;
    Readers& operator=(const Readers&) = delete;

    void begin(uint64_t number, std::vector<Piece> pieces) {
        if (pieces.empty()) throw std::invalid_argument("a job without pieces");
        const auto job = std::make_shared<Job>(Job{number, pieces.size(), true});
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (const Piece& piece : pieces) waiting_.emplace_back(job, piece);
        }
        for (size_t n = 0; n < pieces.size(); ++n) work_there_.notify_one();
    }

    std::vector<Ended> ended() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (ended_.empty() && !closed_) wait(job_ended_, lock);
        return std::exchange(ended_, {});
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closed_ = true;
        }
        work_there_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        job_ended_.notify_all();
    }

  private:
    struct Job {
        uint64_t number;
        size_t open;  // pieces
        bool good;
    };

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            while (waiting_.empty() && !closed_) wait(work_there_, lock);
            if (closed_) return;
            const auto [job, piece] = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            const bool good = in_place(piece);
            lock.lock();
            job->good = job->good && good;
            if (--job->open == 0) {
                ended_.emplace_back(job->number, job->good);
                job_ended_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable work_there_, job_ended_;
    std::deque<std::pair<std::shared_ptr<Job>, Piece>> waiting_;
    std::vector<Ended> ended_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

NB_MODULE(_readers, m) {
    nb::class_<Readers>(m, "Readers")
        .def(nb::init<int>(), nb::arg("threads"))
        .def("begin", &Readers::begin, nb::arg("job"), nb::arg("pieces"))
        .def("ended", &Readers::ended, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Readers::close, nb::call_guard<nb::gil_scoped_release>());
}
