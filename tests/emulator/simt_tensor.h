// simt_tensor.h - tensor cores, and copies to shared memory that are waited for.
#pragma once
#include "simt_intrinsics.h"

// cp.async: the copy happens only at the wait, so a missing wait or barrier shows up
static inline void simt_cp_async(void* dst, const void* src, unsigned n) { simt::cur->async_open.push_back({dst, src, n}); }
static inline void simt_cp_async_commit() {
  simt::cur->async_groups.push_back(std::move(simt::cur->async_open));
  simt::cur->async_open.clear();
}
static inline void simt_cp_async_wait(unsigned left) {
  auto& g = simt::cur->async_groups;
  while (g.size() > left) {
    for (auto& a : g.front()) memcpy(a.dst, a.src, a.n);
    g.erase(g.begin());
  }
}
// tensor core: mma.sync.m16n8k32 row.col s32.s8.s8.s32 (A 16x32, B 32x8, C/D 16x8), as a warp collective
static inline void simt_mma_m16n8k32_s8(int (&d)[4], const int (&a)[4], const int (&b)[2], const int (&c)[4]) {
  int A[4][32], B[2][32];
  for (int r = 0; r < 4; r++) { auto s = simt::exchange(0xffffffffu, (uint32_t)a[r], simt::OP_MMA, __LINE__); for (int l = 0; l < 32; l++) A[r][l] = (int)s[l]; }
  for (int r = 0; r < 2; r++) { auto s = simt::exchange(0xffffffffu, (uint32_t)b[r], simt::OP_MMA, __LINE__); for (int l = 0; l < 32; l++) B[r][l] = (int)s[l]; }
  int lane = simt::cur->lane, g = lane >> 2, q = lane & 3;
  auto at = [&](int row, int k) { int r = (row >= 8 ? 1 : 0) + (k >= 16 ? 2 : 0), l = (row & 7) * 4 + (k & 15) / 4; return (int)(signed char)(A[r][l] >> 8 * (k & 3)); };
  auto bt = [&](int k, int col) { int r = k >= 16 ? 1 : 0, l = col * 4 + (k & 15) / 4; return (int)(signed char)(B[r][l] >> 8 * (k & 3)); };
  for (int i = 0; i < 4; i++) {
    int row = g + (i >= 2 ? 8 : 0), col = q * 2 + (i & 1);
    unsigned s = (unsigned)c[i];
    for (int k = 0; k < 32; k++) s += (unsigned)(at(row, k) * bt(k, col));
    d[i] = (int)s;
  }
}
// tensor core: mma.sync m16n8k16 row.col s32.s8.s8.s32 (A 16x16, B 16x8, C/D 16x8), as a warp collective
static inline void simt_mma_m16n8k16_s8(int (&d)[4], const int (&a)[2], const int (&b)[1], const int (&c)[4]) {
  // The first half of the columns of m16n8k32 lies in the same registers; the other half is 0.
  const int wide_a[4] = {a[0], a[1], 0, 0}, wide_b[2] = {b[0], 0};
  simt_mma_m16n8k32_s8(d, wide_a, wide_b, c);
}
