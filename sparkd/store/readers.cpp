// Threads that read pieces of files straight to their places in memory, without the interpreter.
//
// A step waits for what is read here, and whoever computes it wants the processors at the same time: so a piece costs
// no thread a turn of the interpreter's lock, neither to begin nor to end, nor to tell the step that it is there.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
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
// Device, inode, bytes and nanoseconds of the last change: what a file was when it was opened first.
using Identity = std::tuple<uint64_t, uint64_t, uint64_t, int64_t>;
// Addresses of two words that other processes share (0: nobody is told): one gets a value, the other is rung then.
using Told = std::tuple<uint64_t, uint64_t, uint64_t>;
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

bool unchanged(int fd, const Identity& identity) {
    struct stat now;
    return fstat(fd, &now) == 0 &&
           identity == Identity{now.st_dev, now.st_ino, now.st_size,
                                int64_t{now.st_mtim.tv_sec} * 1000000000 + now.st_mtim.tv_nsec};
}

// What sparkd/ipc/atomics.cpp does: whoever sees the word sees all bytes of the job.
void tell(const Told& told) {
    const auto& [word, value, bell] = told;
    if (word == 0) return;
    __atomic_store_n(reinterpret_cast<uint64_t*>(word), value, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(bell), 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// std::condition_variable::wait is a symbol of g++ 12 and later: a wheel would not run where the runtime is older.
void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
    pthread_cond_wait(changed.native_handle(), lock.mutex()->native_handle());
}

// Jobs that somebody waits for are read at once; those *ahead* of need only while there are no others. For each kind
// there are as many threads, so that one that is read ahead keeps nobody from beginning.
class Readers {
  public:
    Readers(int threads, std::map<int, Identity> files) : files_(std::move(files)), most_(static_cast<size_t>(threads)) {
        if (threads < 1 || threads > 1024) throw std::invalid_argument("1 to 1024 threads read");
        for (int n = 0; n < 2 * threads; ++n) threads_.emplace_back([this] { work(); });
    }
    ~Readers() { close(); }
    Readers(const Readers&) = delete;
    Readers& operator=(const Readers&) = delete;

    void begin(uint64_t number, std::vector<Piece> pieces, Told told, bool ahead) {
        if (pieces.empty()) throw std::invalid_argument("a job without pieces");
        const auto job = std::make_shared<Job>(Job{number, pieces.size(), true, told});
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (const Piece& piece : pieces) (ahead ? ahead_ : urgent_).waiting.emplace_back(job, piece);
        }
        for (size_t n = 0; n < pieces.size(); ++n) work_there_.notify_one();
    }

    void hurry(uint64_t number) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            std::deque<Task>& from = ahead_.waiting;
            const auto first = std::stable_partition(from.begin(), from.end(),
                                                     [&](const Task& task) { return task.first->number != number; });
            urgent_.waiting.insert(urgent_.waiting.end(), first, from.end());
            from.erase(first, from.end());
        }
        work_there_.notify_all();
    }

    bool withdraw(uint64_t number) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::deque<Task>& from = ahead_.waiting;
        const auto of_job = [&](const Task& task) { return task.first->number == number; };
        const auto found = std::find_if(from.begin(), from.end(), of_job);
        if (found == from.end() || !found->first->untouched) return false;
        from.erase(std::remove_if(from.begin(), from.end(), of_job), from.end());
        return true;
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
        Told told;
        bool untouched = true;  // no piece has begun
    };
    using Task = std::pair<std::shared_ptr<Job>, Piece>;
    struct Kind {
        std::deque<Task> waiting;
        size_t under_way = 0;
    };

    Kind* next() {
        if (!urgent_.waiting.empty()) return urgent_.under_way < most_ ? &urgent_ : nullptr;
        const bool idle = urgent_.under_way == 0 && ahead_.under_way < most_;
        return idle && !ahead_.waiting.empty() ? &ahead_ : nullptr;
    }

    // Whether a piece is in place, and its file still what it was when it was opened.
    bool read(const Piece& piece) const {
        const auto file = files_.find(std::get<0>(piece));
        return file != files_.end() && in_place(piece) && unchanged(file->first, file->second);
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Kind* kind;
            while ((kind = next()) == nullptr && !closed_) wait(work_there_, lock);
            if (closed_) return;
            const auto [job, piece] = std::move(kind->waiting.front());
            kind->waiting.pop_front();
            job->untouched = false;
            ++kind->under_way;
            lock.unlock();
            const bool good = read(piece);
            lock.lock();
            job->good = job->good && good;
            if (--job->open == 0) {
                if (job->good) tell(job->told);
                ended_.emplace_back(job->number, job->good);
                job_ended_.notify_one();
            }
            if (--kind->under_way == 0 && kind == &urgent_ && urgent_.waiting.empty() && !ahead_.waiting.empty())
                work_there_.notify_all();
        }
    }

    const std::map<int, Identity> files_;  // by descriptor
    const size_t most_;                    // pieces of a kind that are read at a time
    std::mutex mutex_;
    std::condition_variable work_there_, job_ended_;
    Kind urgent_, ahead_;
    std::vector<Ended> ended_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

NB_MODULE(_readers, m) {
    nb::class_<Readers>(m, "Readers")
        .def(nb::init<int, std::map<int, Identity>>(), nb::arg("threads"), nb::arg("files"))
        .def("begin", &Readers::begin, nb::arg("job"), nb::arg("pieces"), nb::arg("told") = Told{},
             nb::arg("ahead") = false)
        .def("hurry", &Readers::hurry, nb::arg("job"))
        .def("withdraw", &Readers::withdraw, nb::arg("job"))
        .def("ended", &Readers::ended, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Readers::close, nb::call_guard<nb::gil_scoped_release>());
}
