// Atomic access to 64-bit words that several processes share: what numpy cannot promise.
//
// Whoever sees a word sees everything that was written before it, and all accesses have one order that every process
// agrees on (sequential consistency): of two processes that each store a word and then load the other's, one sees what
// the other stored. Acquire and release alone would allow that neither does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace nb = nanobind;

using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyWords = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static_assert(__atomic_always_lock_free(sizeof(std::uint64_t), nullptr), "words shared by processes must need no lock");

static std::uint64_t load(const ReadOnlyWords& words, std::size_t index) {
    if (index >= words.shape(0)) throw nb::index_error("word outside the buffer");
    return __atomic_load_n(words.data() + index, __ATOMIC_SEQ_CST);
}

static void store(const Words& words, std::size_t index, std::uint64_t value) {
    if (index >= words.shape(0)) throw nb::index_error("word outside the buffer");
    __atomic_store_n(words.data() + index, value, __ATOMIC_SEQ_CST);
}

static void copy(const ReadOnlyWords& words, const Words& out) {
    if (words.shape(0) != out.shape(0)) throw nb::value_error("the buffers differ in length");
    for (std::size_t i = 0; i < words.shape(0); ++i) out.data()[i] = __atomic_load_n(words.data() + i, __ATOMIC_SEQ_CST);
}

// The kernel waits on 32 bits: those of the word that change with each ring. Processors that sparkd runs on have them first.
static const std::uint32_t* bell(const std::uint64_t* word) { return reinterpret_cast<const std::uint32_t*>(word); }

static void ring(const Words& words, std::size_t index) {
    if (index >= words.shape(0)) throw nb::index_error("word outside the buffer");
    __atomic_fetch_add(words.data() + index, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, bell(words.data() + index), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

static void wait(const ReadOnlyWords& words, std::size_t index, std::uint64_t seen, double seconds) {
    if (index >= words.shape(0)) throw nb::index_error("word outside the buffer");
    const std::uint64_t* word = words.data() + index;
    const auto whole = static_cast<std::time_t>(seconds);
    const timespec patience = {whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
    nb::gil_scoped_release unlocked;
    syscall(SYS_futex, bell(word), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &patience, nullptr, 0);
}

NB_MODULE(_atomics, m) {
    m.def("load", &load, nb::arg("words"), nb::arg("index"), "The word.");
    m.def("store", &store, nb::arg("words"), nb::arg("index"), nb::arg("value"), "Set the word.");
    m.def("copy", &copy, nb::arg("words"), nb::arg("out"), "Load every word, one after another, into `out`.");
    m.def("ring", &ring, nb::arg("words"), nb::arg("index"), "Add one to the word, and wake all who wait for that.");
    m.def("wait", &wait, nb::arg("words"), nb::arg("index"), nb::arg("seen"), nb::arg("seconds"),
          "Wait until the word is rung, or time or a signal ends that; not at all if it is not what was seen.");
}
