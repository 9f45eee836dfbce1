// simt_intrinsics.h - CUDA's words and functions: barriers, exchanges within a warp, loads, integers, atomics.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include "simt_launch.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("simt_shared")))
#define SIMT_DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(simt::eng.dyn)
#define threadIdx (simt::cur->tid)
#define blockIdx (simt::eng.block_idx)
#define blockDim (simt::eng.block_dim)
#define gridDim (simt::eng.grid_dim)
static constexpr int warpSize = 32;

#define __syncthreads() simt::block_barrier(__LINE__)
#define __syncthreads_or(p) (simt::block_barrier(__LINE__, (p)), simt::eng.bar_res_or)
#define __syncthreads_and(p) (simt::block_barrier(__LINE__, (p)), simt::eng.bar_res_and)
#define __syncthreads_count(p) (simt::block_barrier(__LINE__, (p)), simt::eng.bar_res_count)
static inline void simt_fence(int line) {
  simt::quiet = true;
  if (simt::comes_to(line)) simt::races_fence();
  simt::quiet = false;
}
#define __threadfence() simt_fence(__LINE__)
static inline void simt_syncwarp(unsigned mask, int line) {
  simt::quiet = true;
  if (simt::comes_to(line)) simt::exchange(mask, 0, simt::OP_SYNC, line);
  simt::quiet = false;
}
#define SIMT_SW_(m, ...) m
#define __syncwarp(...) simt_syncwarp(SIMT_SW_(__VA_ARGS__ __VA_OPT__(,) 0xffffffffu), __LINE__)
#define __trap() simt::die("__trap, line " + std::to_string(__LINE__))
#undef assert
#define assert(x) ((x) ? (void)0 : simt::die("assert(" #x ") failed, line " + std::to_string(__LINE__)))

namespace simt {
template <class T> static inline uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8, "shuffle type");
  uint64_t r = 0;
  memcpy(&r, &v, sizeof v);
  return r;
}
template <class T> static inline T unpack(uint64_t r) {
  T v;
  memcpy((void*)&v, &r, sizeof v);
  return v;
}
template <class T> static inline T shfl(unsigned mask, T v, int src, int width, int kind, int line) {
  const uint64_t* s = exchange(mask, pack(v), OP_SHFL, line);
  int lane = cur->lane, base = lane & ~(width - 1), from;
  switch (kind) {
    case 0: from = base + (src & (width - 1)); break;                             // idx
    case 1: from = lane ^ src; if (from >= base + width) from = lane; break;      // xor
    case 2: from = lane + src; if (from >= base + width) from = lane; break;      // down
    default: from = lane - src; if (from < base) from = lane; break;              // up
  }
  if (!(mask >> from & 1)) die("shuffle reads a lane outside the mask, line " + std::to_string(line));
  return unpack<T>(s[from]);
}
static inline unsigned ballot(unsigned mask, int p, int line) {
  const uint64_t* s = exchange(mask, p != 0, OP_VOTE, line);
  unsigned r = 0;
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) r |= (unsigned)(s[l] & 1) << l;
  return r;
}
template <class T, class F> static inline T reduce(unsigned mask, T v, F f, int line) {
  const uint64_t* s = exchange(mask, pack(v), OP_REDUCE, line);
  bool first = true;
  T r{};
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) { T x = unpack<T>(s[l]); r = first ? x : f(r, x); first = false; }
  return r;
}
template <class T> static inline unsigned match_any(unsigned mask, T v, int line) {
  const uint64_t* s = exchange(mask, pack(v), OP_MATCH, line);
  unsigned r = 0;
  for (int l = 0; l < 32; l++)
    if ((mask >> l & 1) && s[l] == pack(v)) r |= 1u << l;
  return r;
}
}  // namespace simt
#define __shfl_sync(m, v, ...) SIMT_SHFL3_(0, m, v, __VA_ARGS__, 32, 0)
#define __shfl_xor_sync(m, v, ...) SIMT_SHFL3_(1, m, v, __VA_ARGS__, 32, 0)
#define __shfl_down_sync(m, v, ...) SIMT_SHFL3_(2, m, v, __VA_ARGS__, 32, 0)
#define __shfl_up_sync(m, v, ...) SIMT_SHFL3_(3, m, v, __VA_ARGS__, 32, 0)
#define SIMT_SHFL3_(kind, m, v, s, w, ...) simt::shfl((m), (v), (int)(s), (int)(w), kind, __LINE__)
#define __ballot_sync(m, p) simt::ballot((m), (p), __LINE__)
#define __any_sync(m, p) (simt::ballot((m), (p), __LINE__) != 0)
#define __all_sync(m, p) (simt::ballot((m), (p), __LINE__) == (m))
#define __match_any_sync(m, v) simt::match_any((m), (v), __LINE__)
#define __reduce_add_sync(m, v) simt::reduce((m), (v), [](auto a, auto b) { return a + b; }, __LINE__)
#define __reduce_max_sync(m, v) simt::reduce((m), (v), [](auto a, auto b) { return a > b ? a : b; }, __LINE__)
#define __reduce_min_sync(m, v) simt::reduce((m), (v), [](auto a, auto b) { return a < b ? a : b; }, __LINE__)

// loads, stores, integer helpers
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldca(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
static inline int __dp4a(int a, int b, int c) {
  unsigned r = (unsigned)c;
  for (int i = 0; i < 4; i++) r += (unsigned)((int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i)));
  return (int)r;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; i++) c += ((a >> (8 * i)) & 255u) * ((b >> (8 * i)) & 255u);
  return c;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __brev(unsigned v) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i); return r; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  uint64_t v = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned sel = s >> (4 * i) & 15, x = (unsigned)(v >> (8 * (sel & 7))) & 255;
    if (sel & 8) x = (x & 128) ? 255 : 0;
    r |= x << (8 * i);
  }
  return r;
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (((a >> 8 * i) - (b >> 8 * i)) & 255u) << (8 * i);
  return r;
}
static inline unsigned __vsubss4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    int x = (int)(signed char)(a >> 8 * i) - (int)(signed char)(b >> 8 * i);
    r |= ((unsigned)std::clamp(x, -128, 127) & 255u) << (8 * i);
  }
  return r;
}
static inline float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
static inline int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; }
static inline float __uint_as_float(unsigned v) { float r; memcpy(&r, &v, 4); return r; }
static inline unsigned __float_as_uint(float v) { unsigned r; memcpy(&r, &v, 4); return r; }
static inline int __float2int_rn(float v) { return (int)std::nearbyintf(v); }
static inline int __float2int_rz(float v) { return (int)v; }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
#define __expf(a) std::exp((float)(a))   // glibc declares this name itself
#define __logf(a) std::log((float)(a))   // glibc declares this name itself
#define __sinf(a) std::sin((float)(a))   // glibc declares this name itself
#define __cosf(a) std::cos((float)(a))   // glibc declares this name itself
static inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
static inline float __saturatef(float a) { return a < 0 ? 0 : a > 1 ? 1 : a; }
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

// atomics (one OS thread: plain read-modify-write)
template <class T, class F> static inline T simt_atomic(T* p, F change) {
  simt::races_atomic(p, sizeof *p, __builtin_return_address(0));
  simt::quiet = true;
  T old = *p;
  *p = change(old);
  simt::quiet = false;
  return old;
}
#define SIMT_ATOMIC(name, changed)                                                           \
  template <class T> static inline T name(T* p, std::common_type_t<T> v) {                   \
    return simt_atomic(p, [v](T old) -> T { return changed; });                              \
  }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicAnd, old & v)
