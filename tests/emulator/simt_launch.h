// simt_launch.h - runs the blocks of a launch one after another, and exports kernels for `simt.py`.
#pragma once
#include <sys/mman.h>
#include <string>
#include <type_traits>
#include <utility>
#include "simt_threads.h"

// Static shared memory: a section of its own, and, since g++ does not put variables of templates there, whatever is zero at
// first and not of the engine.
#define SIMT_HIDDEN __attribute__((weak, visibility("hidden")))
extern "C" char __start_simt_shared[] SIMT_HIDDEN, __stop_simt_shared[] SIMT_HIDDEN;
extern "C" char __bss_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
namespace simt {
struct Range { char* begin; size_t bytes; };
static inline Range shared_range(int number) {
  if (number == 0) return {__start_simt_shared, (size_t)(__stop_simt_shared - __start_simt_shared)};
  return number == 1 ? Range{__bss_start, (size_t)(_end - __bss_start)} : Range{eng.dyn, eng.dyn_bytes};
}
}  // namespace simt

#ifdef __SANITIZE_THREAD__
#include "simt_races.h"
#else
namespace simt {
static inline void races_begin_launch(uint32_t) {}
static inline void races_begin_block() {}
static inline void races_fence() {}
static inline void races_atomic(const void*, size_t, const void*) {}
}  // namespace simt
#endif

namespace simt {
__attribute__((no_sanitize("address", "undefined", "thread")))
static void poison(Range range) {
  char* end = range.begin + range.bytes;
  char* p = range.begin;
  for (; p < end && (uintptr_t)p % 8; p++) *(volatile char*)p = (char)0xFF;
  for (; p + 8 <= end; p += 8) *(volatile uint64_t*)p = ~(uint64_t)0;
  for (; p < end; p++) *(volatile char*)p = (char)0xFF;
}

static void report_deadlock() {
  std::string s = "deadlock: ";
  int shown = 0;
  for (unsigned i = 0; i < eng.n && shown < 8; i++) {
    Thread& t = eng.th[i];
    if (t.state == WAIT_WARP || t.state == WAIT_BLOCK) {
      char b[128];
      snprintf(b, sizeof b, "%sthread (%u,%u,%u) waits at %s, line %d", shown ? "; " : "", t.tid.x, t.tid.y, t.tid.z,
               t.state == WAIT_WARP ? "a warp operation" : "__syncthreads", t.where);
      s += b;
      shown++;
    }
  }
  char b[96];
  snprintf(b, sizeof b, " (%u of %u threads exited)", eng.exited, eng.n);
  s += b;
  eng.failed = true;
  eng.error = s;
}

static inline uint64_t rng(uint64_t& s) {
  s ^= s << 13; s ^= s >> 7; s ^= s << 17;
  return s;
}
static inline unsigned gcd_(unsigned a, unsigned b) { while (b) { unsigned c = a % b; a = b; b = c; } return a; }

static void run_block(const Config& c, uint64_t& seed) {
  eng.exited = 0;
  eng.bar_waiting = 0;
  eng.bar_or = 0; eng.bar_and = 1; eng.bar_count = 0;
  for (auto& g : eng.groups) g.clear();
  eng.epoch = 0;
  eng.warp_epoch.assign(eng.warps, 0);
  races_begin_block();
  for (int number = 0; number < 3; number++) poison(shared_range(number));
  const unsigned n = eng.n;
  for (unsigned i = 0; i < n; i++) fiber_prepare(eng.th[i]);
  while (eng.exited < n) {
    bool ran = false;
    unsigned start = 0, step = 1;
    if (c.order == 1) { start = n - 1; step = n - 1 ? n - 1 : 1; }
    else if (c.order == 2) {
      start = rng(seed) % n;
      step = 1 + rng(seed) % n;
      while (gcd_(step, n) != 1) step = step % n + 1;
    }
    for (unsigned k = 0, i = start; k < n; k++) {
      if (eng.th[i].state == READY) {
        run_thread(eng.th[i]);
        if (eng.failed) return;
        ran = true;
      }
      i += step;
      if (i >= n) i -= n;
    }
    if (!release_block_barrier() && !ran) { report_deadlock(); return; }
  }
}

static int launch(const Config& c, void (*entry)(void*), void* arg) {
  uint64_t nt = (uint64_t)c.block[0] * c.block[1] * c.block[2];
  eng.failed = false;
  eng.error.clear();
  auto bad = [&](const char* m) { eng.failed = true; eng.error = m; return 1; };
  if (!nt || nt > 1024 || c.block[0] > 1024 || c.block[1] > 1024 || c.block[2] > 64) return bad("invalid block size");
  if (!c.grid[0] || !c.grid[1] || !c.grid[2] || c.grid[1] > 65535 || c.grid[2] > 65535) return bad("invalid grid size");
  if (c.dyn_shared > (c.max_dyn_shared ? c.max_dyn_shared : 48 * 1024)) return bad("too much dynamic shared memory");
  eng.n = (unsigned)nt;
  eng.warps = (eng.n + 31) / 32;
  eng.block_dim = dim3(c.block[0], c.block[1], c.block[2]);
  eng.grid_dim = dim3(c.grid[0], c.grid[1], c.grid[2]);
  size_t page = 4096, each = eng.stack_bytes + page;
  if (eng.th.size() < eng.n) {
    size_t old = eng.th.size(), add = eng.n - old;
    char* m = (char*)mmap(nullptr, each * add, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) return bad("no memory for fiber stacks");
    eng.th.resize(eng.n);
    for (size_t i = 0; i < add; i++) {
      mprotect(m + i * each, page, PROT_NONE);
      eng.th[old + i].stack = m + i * each + page;
    }
  }
  for (unsigned i = 0; i < eng.n; i++) {
    Thread& t = eng.th[i];
    t.linear = i; t.lane = i & 31; t.warp = i >> 5;
    t.tid = {i % c.block[0], i / c.block[0] % c.block[1], i / (c.block[0] * c.block[1])};
  }
  if (eng.groups.size() < eng.warps) eng.groups.resize(eng.warps);
  eng.entry = entry;
  eng.entry_arg = arg;
  eng.dyn_bytes = c.dyn_shared;
  eng.dyn = nullptr;
  if (c.dyn_shared && posix_memalign((void**)&eng.dyn, 128, c.dyn_shared)) return bad("no memory");
  uint64_t seed = c.seed * 2654435761u + 88172645463325252ull;
  uint64_t blocks = (uint64_t)c.grid[0] * c.grid[1] * c.grid[2];
  races_begin_launch((uint32_t)blocks);
  for (uint64_t b = 0; b < blocks && !eng.failed; b++) {
    uint64_t i = c.order == 1 ? blocks - 1 - b : b;
    eng.block_idx = {(unsigned)(i % c.grid[0]), (unsigned)(i / c.grid[0] % c.grid[1]), (unsigned)(i / c.grid[0] / c.grid[1])};
    run_block(c, seed);
    eng.stats.blocks++;
    eng.stats.threads += eng.n;
  }
  free(eng.dyn);
  eng.dyn = nullptr;
  return eng.failed;
}

template <class... A, size_t... I>
static inline void invoke_impl(void (*f)(A...), void** a, std::index_sequence<I...>) { f(*(std::remove_cv_t<A>*)a[I]...); }
template <class... A>
static inline void invoke(void (*f)(A...), void** a) { invoke_impl(f, a, std::index_sequence_for<A...>{}); }
template <class... A>
static inline int signature(void (*)(A...), int32_t* out, int cap) {
  // size of each argument; negative for pointers
  int32_t s[] = {0, (std::is_pointer<A>::value ? -(int32_t)sizeof(A) : (int32_t)sizeof(A))...};
  int n = sizeof...(A);
  for (int i = 0; i < n && i < cap; i++) out[i] = s[i + 1];
  return n;
}
}  // namespace simt

#define SIMT_EXPORT_AS(alias, ...)                                                                                   \
  extern "C" __attribute__((visibility("default"))) int simt_launch_##alias(const simt::Config* c, void** args) {    \
    return simt::launch(*c, [](void* a) { simt::invoke(&__VA_ARGS__, (void**)a); }, (void*)args);                    \
  }                                                                                                                  \
  extern "C" __attribute__((visibility("default"))) int simt_sig_##alias(int32_t* out, int cap) {                    \
    return simt::signature(&__VA_ARGS__, out, cap);                                                                  \
  }
#define SIMT_EXPORT(fn) SIMT_EXPORT_AS(fn, fn)
extern "C" __attribute__((visibility("default"), used)) inline const char* simt_error() { return simt::eng.error.c_str(); }
extern "C" __attribute__((visibility("default"), used)) inline void simt_stats(simt::Stats* s, int reset) {
  *s = simt::eng.stats;
  if (reset) simt::eng.stats = simt::Stats{};
}
// Leaves the barrier or fence of a line out from now on; 0: none.
extern "C" __attribute__((visibility("default"), used)) inline void simt_drop(int line) { simt::eng.dropped = line; }
extern "C" __attribute__((visibility("default"), used)) inline int simt_passed(int line) {
  return (size_t)line < simt::eng.passed.size() && simt::eng.passed[line];
}
