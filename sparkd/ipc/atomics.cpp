// Atomic access to 64-bit words that several processes share: what numpy cannot promise.
//
// Whoever sees a word sees everything that was written before it, and all accesses have one order that every process
// agrees on (sequential consistency): of two processes that each store a word and then load the other's, one sees what
// the other stored. Acquire and release alone would allow that neither does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

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

NB_MODULE(_atomics, m) {
    m.def("load", &load, nb::arg("words"), nb::arg("index"), "The word.");
    m.def("store", &store, nb::arg("words"), nb::arg("index"), nb::arg("value"), "Set the word.");
    m.def("copy", &copy, nb::arg("words"), nb::arg("out"), "Load every word, one after another, into `out`.");
}
