// Dropout by the counter-based generator Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy
// as 1, 2, 3"): the word for a pair is a function of (seed, b, h, m, n) alone.
//   counter = (n / 4, m, h, b), key = (low and high half of the seed), word n % 4; kept when word >= threshold.
// A part of a longer sequence counts its heads, queries and keys from where it lies in the whole.
#pragma once

#include "base/args.h"
#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

TW_INLINE u32 dropout_threshold(double p) {
  return static_cast<u32>(min(static_cast<i64>(p * 4294967296.0 + 0.5), 0xffffffff));
}

// bits[j] gets bit i set when the pair (row m0 + i, key n0 + j) is kept. n0 is a multiple of 4; `bits` has room
// for `count` rounded up to 4; `width` lanes (a multiple of kLanes<u32>, at most 64) are filled.
TW_NOINLINE static void dropout_bits(const Problem& f, i64 b, i64 h, i64 m0, int width, i64 n0, int count, u64* bits) {
  const u32 threshold = dropout_threshold(f.dropout);
  const i64 first = n0 + f.origin.key;
  // Words come in fours. Where the part does not begin with one, the first words are of keys before it.
  for (int j = -static_cast<int>(first & 3); j < count; j += 4) {
    u64 kept[4] = {0, 0, 0, 0};
    for (int i = 0; i < width; i += kLanes<u32>) {
      Vec<u32> c0 = set(static_cast<u32>((first + j) >> 2));
      Vec<u32> c1 = lane_numbers<u32>() + static_cast<u32>(m0 + f.origin.query + i);
      Vec<u32> c2 = set(static_cast<u32>(h + f.origin.head)), c3 = set(static_cast<u32>(b + f.origin.batch));
      u32 k0 = static_cast<u32>(f.seed), k1 = static_cast<u32>(f.seed >> 32);
      TW_UNROLL(10)
      for (int round = 0; round < 10; round++) {
        Vec<u32> high0, low0, high2, low2;
        multiply_wide(c0, 0xD2511F53u, high0, low0);
        multiply_wide(c2, 0xCD9E8D57u, high2, low2);
        c0 = high2 ^ c1 ^ k0;
        c1 = low2;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      kept[0] |= bits_at_least(c0, threshold) << i;
      kept[1] |= bits_at_least(c1, threshold) << i;
      kept[2] |= bits_at_least(c2, threshold) << i;
      kept[3] |= bits_at_least(c3, threshold) << i;
    }
    const int room = (count + 3) & ~3;
    for (int w = max(-j, 0); w < min(4, room - j); w++) bits[j + w] = kept[w];
  }
}

}  // namespace tilewise::TILEWISE_ISA
