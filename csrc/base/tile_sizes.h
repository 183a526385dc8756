// What a tile of queries and a piece of its keys measure.
#pragma once

#include "base/simd.h"

namespace tilewise::TILEWISE_ISA {

constexpr int kTileQueries = 64;  // one bit of a u64 each
constexpr int kSubKeys = 16;      // keys of the smallest piece of a tile that is classified

}  // namespace tilewise::TILEWISE_ISA
