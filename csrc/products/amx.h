// Matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, and the product of two of them in bfloat16, added
// up in float. By the assembler: the compilers' own functions say nothing of the memory that they read and write.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

// The shapes of the registers, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  u16 row_bytes[16] = {};
  unsigned char rows[16] = {};

  void set(int tile, int row_count, int bytes) {
    rows[tile] = static_cast<unsigned char>(row_count), row_bytes[tile] = static_cast<u16>(bytes);
  }
  // Clears the registers.
  void use() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

// As the process found the registers: a thread that keeps them in use is switched more slowly.
TW_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }

template <int kTile>
TW_INLINE void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// Rows `stride` bytes apart.
template <int kTile>
TW_INLINE void load_tile(const void* from, i64 stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
TW_INLINE void store_tile(void* to, i64 stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
// sums[i][j] += a[i][2 k] * b[k][2 j] + a[i][2 k + 1] * b[k][2 j + 1] over the k: b has pairs of rows in its words.
template <int kSums, int kA, int kB>
TW_INLINE void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace tilewise::TILEWISE_ISA
