// simt_half.h - half and bfloat16.
#pragma once
#include "simt_intrinsics.h"

struct __half {
  uint16_t x;
  __half() = default;
  __half(float f) { _Float16 h = (_Float16)f; memcpy(&x, &h, 2); }
  operator float() const { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
};
struct alignas(4) __half2 { __half x, y; };
typedef __half half;
typedef __half2 half2;
static inline float __half2float(__half h) { return (float)h; }
static inline __half __float2half(float f) { return __half(f); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline float __low2float(__half2 h) { return (float)h.x; }
static inline float __high2float(__half2 h) { return (float)h.y; }
static inline __half __hadd(__half a, __half b) { return __half((float)a + (float)b); }
static inline __half __hmul(__half a, __half b) { return __half((float)a * (float)b); }
static inline __half __hfma(__half a, __half b, __half c) { return __half((float)((double)(float)a * (float)b + (double)(float)c)); }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
static inline __half __ushort_as_half(unsigned short v) { __half h; h.x = v; return h; }
struct __nv_bfloat16 { uint16_t x; };
static inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float((unsigned)b.x << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  unsigned u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {(uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
