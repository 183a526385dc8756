// Matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, and the product of two of them in bfloat16, added
// up in float. By the assembler: the compilers' own functions say nothing of the memory that they read and write.
//
// A build with TILEWISE_SOFTWARE_TILES has the same registers in memory. It gives the same bits on any processor with
// AVX512_BF16 and AVX512_VBMI, for tests: a product takes some 60 times as long.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

#if defined(TILEWISE_SOFTWARE_TILES)

struct SoftwareTile {
  int rows = 0, bytes = 0;
  alignas(64) i32 words[16][16] = {};
};
inline thread_local SoftwareTile software_tiles[8];

struct TileShapes {
  int rows[8] = {}, row_bytes[8] = {};
  void set(int tile, int row_count, int bytes) { rows[tile] = row_count, row_bytes[tile] = bytes; }
  void use() const {
    for (int tile = 0; tile < 8; tile++) {
      software_tiles[tile] = {};
      software_tiles[tile].rows = rows[tile], software_tiles[tile].bytes = row_bytes[tile];
    }
  }
};

TW_INLINE void release_tiles() { TileShapes{}.use(); }

template <int kTile>
TW_INLINE void clear_tile() {
  std::memset(software_tiles[kTile].words, 0, sizeof software_tiles[kTile].words);
}
template <int kTile>
TW_INLINE void load_tile(const void* from, i64 stride) {
  SoftwareTile& tile = software_tiles[kTile];
  clear_tile<kTile>();
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(tile.words[r], static_cast<const char*>(from) + r * stride, static_cast<std::size_t>(tile.bytes));
}
template <int kTile>
TW_INLINE void store_tile(void* to, i64 stride) {
  const SoftwareTile& tile = software_tiles[kTile];
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, tile.words[r], static_cast<std::size_t>(tile.bytes));
}
// Even and odd places apart, then both, then to the sums, as the instruction has it.
template <int kSums, int kA, int kB>
TW_NOINLINE void multiply_tiles() {
  SoftwareTile& sums = software_tiles[kSums];
  const SoftwareTile &a = software_tiles[kA], &b = software_tiles[kB];
  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // to nearest; subnormal numbers and results are 0
  for (int m = 0; m < sums.rows; m++) {
    Vec<float> even{}, odd{};
    for (int k = 0; k < a.bytes / 4; k++) {
      const Vec<i32> p = set(a.words[m][k]), q = load(b.words[k]);
      even = fused((Vec<float>)(p << 16), (Vec<float>)(q << 16), even);
      odd = fused((Vec<float>)(p & -65536), (Vec<float>)(q & -65536), odd);
    }
    const Vec<float> sum = (Vec<float>)load(sums.words[m]) + (even + odd);
    std::memcpy(sums.words[m], &sum, static_cast<std::size_t>(sums.bytes));
  }
  _mm_setcsr(control);
}

#else

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

#endif

}  // namespace tilewise::TILEWISE_ISA
