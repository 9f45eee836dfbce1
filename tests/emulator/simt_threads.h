// simt_threads.h - the threads of a block as fibers, and where they wait for each other: in a warp, in a block.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include "simt_vectors.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#endif
#if !defined(__x86_64__) && !defined(__aarch64__)
#define SIMT_UCONTEXT 1
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt {

// ------------------------------------------------------------------ fibers
enum State : uint8_t { READY, WAIT_WARP, WAIT_BLOCK, DONE };

struct Group {                // one rendezvous per (warp, mask)
  unsigned mask = 0;
  unsigned arrived = 0;
  unsigned gen = 0;
  int op = 0;
  uint64_t slot[2][32];
};

struct Thread {
  uint3 tid;
  unsigned linear, lane, warp;
  State state;
  int where = 0;              // line of the last sync operation (from the macro)
  uint32_t fenced = 0;        // epoch of the last fence + 1
  bool acquired = false;      // has fenced after an atomic operation
  void* sp = nullptr;
  char* stack = nullptr;      // lowest usable address
#ifdef SIMT_UCONTEXT
  ucontext_t uc;
#endif
#ifdef SIMT_ASAN
  void* fake = nullptr;
#endif
  struct Async { void* dst; const void* src; unsigned n; };
  std::vector<std::vector<Async>> async_groups;
  std::vector<Async> async_open;
};

struct Config {
  uint32_t grid[3], block[3];
  uint32_t dyn_shared;
  uint32_t order;             // 0 forward, 1 reverse, 2 random
  uint64_t seed;
  uint32_t max_dyn_shared;    // 0: 48 KiB
};

struct Stats { uint64_t blocks, threads, switches, warp_ops, block_barriers; };

struct Engine {
  std::vector<Thread> th;
  std::vector<std::vector<Group>> groups;   // per warp
  uint3 block_idx;
  dim3 block_dim, grid_dim;
  unsigned n = 0, warps = 0, exited = 0;
  unsigned bar_waiting = 0;
  uint32_t epoch = 0;                       // barriers that the block has passed
  std::vector<uint32_t> warp_epoch;         // and __syncwarps of all lanes that each warp has
  int dropped = 0;                          // line of a barrier or fence that is left out
  std::vector<bool> passed;                 // lines of those that were come to
  int bar_or = 0, bar_and = 1, bar_count = 0, bar_res_or = 0, bar_res_and = 0, bar_res_count = 0;
  char* dyn = nullptr;
  uint32_t dyn_bytes = 0;
  void (*entry)(void*) = nullptr;
  void* entry_arg = nullptr;
  void* sched_sp = nullptr;
#ifdef SIMT_UCONTEXT
  ucontext_t sched_uc;
#endif
#ifdef SIMT_ASAN
  void* sched_fake = nullptr;
  const void* sched_bottom = nullptr;
  size_t sched_size = 0;
#endif
  bool failed = false;
  std::string error;
  Stats stats{};
  size_t stack_bytes =
#ifdef SIMT_ASAN
      256 * 1024;
#else
      64 * 1024;
#endif
};
#define SIMT_ENGINE __attribute__((section("simt_engine")))   // apart from what kernels have
static Engine eng SIMT_ENGINE;
static Thread* cur SIMT_ENGINE = nullptr;
// Whether the engine is at work, not a kernel; volatile, as compilers take the calls of simt_races.h to read nothing here.
static volatile bool quiet SIMT_ENGINE = true;

#ifndef SIMT_UCONTEXT
extern "C" void simt_switch(void** save_sp, void* load_sp);
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.local simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
#else
asm(R"(
.text
.p2align 4
.local simt_switch
.type simt_switch,%function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8,  d9,  [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8,  d9,  [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size simt_switch,.-simt_switch
)");
#endif
#endif

static inline void to_scheduler(bool dying = false) {
  Thread* me = cur;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(dying ? nullptr : &me->fake, eng.sched_bottom, eng.sched_size);
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&me->uc, &eng.sched_uc);
#else
  simt_switch(&me->sp, eng.sched_sp);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(me->fake, nullptr, nullptr);
#endif
}

static void fiber_main() {
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &eng.sched_bottom, &eng.sched_size);
#endif
  quiet = false;
  eng.entry(eng.entry_arg);
  quiet = true;
  cur->state = DONE;
  eng.exited++;
  to_scheduler(true);
  abort();
}

static void fiber_prepare(Thread& t) {
  t.state = READY;
  t.where = 0;
  t.fenced = 0;
  t.acquired = false;
  t.async_groups.clear();
  t.async_open.clear();
#ifdef SIMT_UCONTEXT
  getcontext(&t.uc);
  t.uc.uc_stack.ss_sp = t.stack;
  t.uc.uc_stack.ss_size = eng.stack_bytes;
  t.uc.uc_link = nullptr;
  makecontext(&t.uc, (void (*)())fiber_main, 0);
#elif defined(__x86_64__)
  uintptr_t top = ((uintptr_t)t.stack + eng.stack_bytes) & ~(uintptr_t)15;
  void** p = (void**)top;
  *--p = nullptr;                  // return address of fiber_main (never used); keeps rsp = 8 mod 16
  *--p = (void*)fiber_main;
  for (int i = 0; i < 6; i++) *--p = nullptr;
  t.sp = p;
#else
  uintptr_t top = ((uintptr_t)t.stack + eng.stack_bytes) & ~(uintptr_t)15;
  void** p = (void**)(top - 160);
  for (int i = 0; i < 20; i++) p[i] = nullptr;
  p[11] = (void*)fiber_main;       // x30
  t.sp = p;
#endif
}

static inline void run_thread(Thread& t) {
  cur = &t;
  eng.stats.switches++;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(&eng.sched_fake, t.stack, eng.stack_bytes);
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&eng.sched_uc, &t.uc);
#else
  simt_switch(&eng.sched_sp, t.sp);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(eng.sched_fake, nullptr, nullptr);
#endif
}

[[noreturn]] static void die(const std::string& msg) {   // device-side failure: stop this launch
  quiet = true;
  if (!eng.failed) {
    char b[160];
    snprintf(b, sizeof b, " [block (%u,%u,%u) thread (%u,%u,%u)]", eng.block_idx.x, eng.block_idx.y,
             eng.block_idx.z, cur->tid.x, cur->tid.y, cur->tid.z);
    eng.error = msg + b;
  }
  eng.failed = true;
  for (;;) to_scheduler();
}

// Whether the barrier or fence of a line is there.
static bool comes_to(int line) {
  if ((size_t)line >= eng.passed.size()) eng.passed.resize(line + 1);
  eng.passed[line] = true;
  return line != eng.dropped;
}

// ------------------------------------------------------------------ warp rendezvous
enum Op { OP_SHFL = 1, OP_VOTE, OP_SYNC, OP_MATCH, OP_REDUCE, OP_MMA };

static inline const uint64_t* exchange(unsigned mask, uint64_t value, int op, int line) {
  quiet = true;
  Thread* t = cur;
  t->where = line;
  unsigned bit = 1u << t->lane;
  if (!(mask & bit)) die("warp operation: the calling lane is not in its own mask, line " + std::to_string(line));
  auto& gs = eng.groups[t->warp];
  Group* g = nullptr;
  for (auto& x : gs)
    if (x.mask == mask) { g = &x; break; }
  if (!g) {
    gs.emplace_back();
    g = &gs.back();
    g->mask = mask;
  }
  if (!g->arrived) g->op = op;
  else if (g->op != op) die("warp operation: lanes of one mask are at different operations, line " + std::to_string(line));
  unsigned k = g->gen & 1;
  g->slot[k][t->lane] = value;
  g->arrived |= bit;
  eng.stats.warp_ops++;
  if (g->arrived == mask) {
    g->arrived = 0;
    g->gen++;
    if (op == OP_SYNC && mask == 0xffffffffu) eng.warp_epoch[t->warp]++;
    unsigned base = t->warp * 32;
    for (unsigned l = 0; l < 32; l++)
      if (mask >> l & 1) eng.th[base + l].state = READY;
  } else {
    size_t gi = g - gs.data();
    t->state = WAIT_WARP;
    to_scheduler();
    g = &eng.groups[t->warp][gi];   // the vector may have grown
  }
  quiet = false;
  return g->slot[k];
}

static inline void block_barrier(int line, int pred = 0) {
  quiet = true;
  if (!comes_to(line)) {
    quiet = false;
    return;
  }
  Thread* t = cur;
  t->where = line;
  eng.stats.block_barriers++;
  eng.bar_waiting++;
  eng.bar_or |= pred != 0;
  eng.bar_and &= pred != 0;
  eng.bar_count += pred != 0;
  t->state = WAIT_BLOCK;
  to_scheduler();
  quiet = false;
}

static inline bool release_block_barrier() {
  if (!eng.bar_waiting || eng.bar_waiting + eng.exited != eng.n) return false;
  for (auto& t : eng.th)
    if (t.linear < eng.n && t.state == WAIT_BLOCK) t.state = READY;
  eng.bar_res_or = eng.bar_or;
  eng.bar_res_and = eng.bar_and;
  eng.bar_res_count = eng.bar_count;
  eng.bar_waiting = 0;
  eng.bar_or = 0;
  eng.bar_and = 1;
  eng.bar_count = 0;
  eng.epoch++;
  return true;
}

}  // namespace simt
