// simt_races.h - finds accesses of one launch that nothing orders.
//
// Kernels are compiled with -fsanitize=thread, which has a call before each access to memory; the calls come here instead
// of to that sanitizer's library, which knows nothing of the threads of a GPU. Of each byte are kept the last write and
// who read it since. Two accesses by different threads, one of them a write, are a race unless something is between them:
//   * within a block: __syncthreads()
//   * within a warp: __syncwarp() too; shuffles and votes order no memory
//   * between blocks: the one that was before has a fence of every thread, a barrier, and an atomic operation (or a fence
//     and that operation by the same thread); the other one an atomic operation at the same place, and a fence
#pragma once
#include <cstring>
#include <unordered_map>

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));   // where the library lies
extern "C" char __start_simt_engine[] __attribute__((visibility("hidden")));
extern "C" char __stop_simt_engine[] __attribute__((visibility("hidden")));
#define SIMT_UNTRACED __attribute__((no_sanitize("thread")))

#pragma GCC push_options
#pragma GCC optimize("O2")
namespace simt {

struct Cell {
  const void *write_pc, *read_pc;
  uint32_t write_block, write_epoch, write_warp_epoch;   // blocks are counted from 1; 0: nobody
  uint32_t read_block, read_epoch, read_warps;           // warps of the block that have read since its last barrier
  uint32_t lanes, lanes_epoch;                           // of the last of them, lanes since its last __syncwarp
  uint32_t other_block, other_epoch;                     // another block that has read before
  uint16_t write_thread;
  uint8_t lanes_warp;
  bool atomic;
};

constexpr unsigned kPage = 256;
constexpr size_t kMostPages = 1 << 14;   // that are kept from launch to launch: 256 MiB
struct Page {
  uintptr_t number = 0;
  uint64_t launch = 0;
  Cell cells[kPage];
};

using Clock = std::vector<uint32_t>;   // of each block: epochs below this are over, and seen

struct Races {
  uint64_t launch = 0;
  uint32_t block = 0, blocks = 0;
  uint32_t acquired_epoch = UINT32_MAX;   // of the block: when a thread of it has fenced after the atomic operation
  uint32_t atomic_epoch = UINT32_MAX;
  unsigned atomic_thread = 0;
  Clock seen;
  std::unordered_map<const void*, Clock> released;
  std::unordered_map<uintptr_t, Page*> pages;
  Page* near[1024] = {};
  Range ranges[3];                     // shared memory
  Range threads;                       // what the engine knows of them
};
static Races races SIMT_ENGINE;

SIMT_UNTRACED static Page& page_of(uintptr_t number) {
  Page*& near = races.near[number % 1024];
  if (!near || near->number != number) {
    Page*& kept = races.pages[number];
    if (!kept) {
      kept = new Page();
      kept->number = number;
    }
    near = kept;
  }
  if (near->launch != races.launch) {
    memset(near->cells, 0, sizeof near->cells);
    near->launch = races.launch;
  }
  return *near;
}

// Whether this thread has seen what a block did in an epoch.
SIMT_UNTRACED static bool seen(uint32_t block, uint32_t epoch) {
  const bool fenced = cur->acquired || races.acquired_epoch < eng.epoch;
  return fenced && races.seen[block - 1] > epoch;
}

[[noreturn]] SIMT_UNTRACED static void report(const char* what, const void* earlier, const void* pc) {
  char text[160];
  snprintf(text, sizeof text, "race: %s, nothing orders line %#lx before line %#lx", what,
           (unsigned long)((const char*)earlier - __ehdr_start), (unsigned long)((const char*)pc - __ehdr_start));
  die(text);
}

SIMT_UNTRACED static void check(Cell& c, bool shared, bool write, bool atomic, const void* pc) {
  const uint32_t warp_epoch = eng.warp_epoch[cur->warp];
  if (c.write_block && !(atomic && c.atomic)) {
    if (c.write_block == races.block) {
      if (c.write_thread != cur->linear && c.write_epoch == eng.epoch &&
          !(c.write_thread / 32 == cur->warp && c.write_warp_epoch < warp_epoch))
        report(write ? "two writes" : "a write and a read", c.write_pc, pc);
    } else if (!shared && !seen(c.write_block, c.write_epoch)) {
      report("a write and an access of another block", c.write_pc, pc);
    }
  }
  if (!write) return;
  if (c.read_block == races.block && c.read_epoch == eng.epoch) {
    if (c.read_warps & ~(1u << cur->warp)) report("a read and a write", c.read_pc, pc);
    if (c.lanes_warp == cur->warp && c.lanes_epoch == warp_epoch && c.lanes & ~(1u << cur->lane))
      report("a read and a write of a warp", c.read_pc, pc);
  }
  if (shared) return;
  if (c.read_block && c.read_block != races.block && !seen(c.read_block, c.read_epoch))
    report("a read and a write of another block", c.read_pc, pc);
  if (c.other_block && c.other_block != races.block && !seen(c.other_block, c.other_epoch))
    report("a read and a write of another block", c.read_pc, pc);
}

SIMT_UNTRACED static void keep(Cell& c, bool write, bool atomic, const void* pc) {
  const uint32_t warp_epoch = eng.warp_epoch[cur->warp];
  if (write) {
    c = Cell{};
    c.write_pc = pc;
    c.write_block = races.block;
    c.write_epoch = eng.epoch;
    c.write_warp_epoch = warp_epoch;
    c.write_thread = (uint16_t)cur->linear;
    c.atomic = atomic;
    return;
  }
  if (c.read_block != races.block) {
    c.other_block = c.read_block;
    c.other_epoch = c.read_epoch;
    c.read_block = 0;
  }
  if (!c.read_block || c.read_epoch != eng.epoch) {
    c.read_block = races.block;
    c.read_epoch = eng.epoch;
    c.read_warps = c.lanes = 0;
  }
  if (c.lanes_warp != cur->warp || c.lanes_epoch != warp_epoch) c.lanes = 0;
  c.read_pc = pc;
  c.read_warps |= 1u << cur->warp;
  c.lanes_warp = (uint8_t)cur->warp;
  c.lanes_epoch = warp_epoch;
  c.lanes |= 1u << cur->lane;
}

SIMT_UNTRACED static bool inside(const void* p, Range range) {
  return (uintptr_t)p - (uintptr_t)range.begin < range.bytes;
}

SIMT_UNTRACED static void touched(const void* p, size_t bytes, bool write, bool atomic, const void* pc) {
  if (quiet || inside(p, races.threads) || inside(p, {cur->stack, eng.stack_bytes}) ||
      inside(p, {__start_simt_engine, (size_t)(__stop_simt_engine - __start_simt_engine)}))
    return;
  quiet = true;
  const bool shared = inside(p, races.ranges[0]) || inside(p, races.ranges[1]) || inside(p, races.ranges[2]);
  for (uintptr_t at = (uintptr_t)p; at < (uintptr_t)p + bytes; ++at) {
    Cell& cell = page_of(at / kPage).cells[at % kPage];
    // Each block finds shared memory as new.
    if (shared && cell.write_block != races.block && cell.read_block != races.block) cell = Cell{};
    check(cell, shared, write, atomic, pc);
    keep(cell, write, atomic, pc);
  }
  quiet = false;
}

SIMT_UNTRACED static void races_begin_launch(uint32_t blocks) {
  races.launch++;
  races.block = 0;
  races.blocks = blocks;
  races.released.clear();
  if (races.pages.size() > kMostPages) {
    for (auto& kept : races.pages) delete kept.second;
    races.pages.clear();
    memset(races.near, 0, sizeof races.near);
  }
  races.threads = {(char*)eng.th.data(), eng.th.size() * sizeof(Thread)};
  for (int number = 0; number < 3; number++) races.ranges[number] = shared_range(number);
}

SIMT_UNTRACED static void races_begin_block() {
  races.block++;
  races.seen.assign(races.blocks, 0);
  races.acquired_epoch = races.atomic_epoch = UINT32_MAX;
}

SIMT_UNTRACED static void races_fence() {
  cur->fenced = eng.epoch + 1;
  const bool after = races.atomic_epoch < eng.epoch || (races.atomic_epoch == eng.epoch && races.atomic_thread == cur->linear);
  if (!after) return;
  cur->acquired = true;
  if (races.acquired_epoch == UINT32_MAX) races.acquired_epoch = eng.epoch;
}

// An atomic operation gives on what the block has done before its last barrier, if that was fenced, and takes what others
// have given there.
SIMT_UNTRACED static void races_atomic(const void* p, size_t bytes, const void* pc) {
  touched(p, bytes, true, true, pc);
  quiet = true;
  bool fenced = cur->fenced == eng.epoch + 1;
  if (!fenced) {
    fenced = true;
    for (unsigned i = 0; i < eng.n; i++) fenced &= eng.th[i].state == DONE || eng.th[i].fenced >= eng.epoch;
  }
  Clock& there = races.released[p];
  there.resize(races.blocks);
  for (uint32_t b = 0; b < races.blocks; b++) races.seen[b] = std::max(races.seen[b], there[b]);
  races.seen[races.block - 1] = eng.epoch;
  if (fenced) there = races.seen;
  races.atomic_epoch = eng.epoch;
  races.atomic_thread = cur->linear;
  quiet = false;
}

}  // namespace simt

#define SIMT_PC __builtin_return_address(0)
#define SIMT_HOOK(size)                                                                                                 \
  extern "C" SIMT_UNTRACED void __tsan_read##size(void* p) { simt::touched(p, size, false, false, SIMT_PC); }           \
  extern "C" SIMT_UNTRACED void __tsan_write##size(void* p) { simt::touched(p, size, true, false, SIMT_PC); }           \
  extern "C" SIMT_UNTRACED void __tsan_unaligned_read##size(void* p) { simt::touched(p, size, false, false, SIMT_PC); } \
  extern "C" SIMT_UNTRACED void __tsan_unaligned_write##size(void* p) { simt::touched(p, size, true, false, SIMT_PC); }
SIMT_HOOK(1)
SIMT_HOOK(2)
SIMT_HOOK(4)
SIMT_HOOK(8)
SIMT_HOOK(16)
extern "C" SIMT_UNTRACED void __tsan_read_range(void* p, size_t n) { simt::touched(p, n, false, false, SIMT_PC); }
extern "C" SIMT_UNTRACED void __tsan_write_range(void* p, size_t n) { simt::touched(p, n, true, false, SIMT_PC); }
extern "C" SIMT_UNTRACED void __tsan_func_entry(void*) {}
extern "C" SIMT_UNTRACED void __tsan_func_exit() {}
extern "C" SIMT_UNTRACED void __tsan_init() {}
extern "C" SIMT_UNTRACED void __tsan_vptr_update(void*, void*) {}
#pragma GCC pop_options
