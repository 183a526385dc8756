// The chunks of keys that the backward pass goes through, and the gradients of a chunk's keys and values.
#pragma once

#include "base/ahead.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

constexpr int kTilesPerSum = 64;  // tiles of queries whose shares of dK and dV are added up in one go

// Keys are worked through in chunks of whole blocks; the sum over chunks is taken in their order. How many
// blocks a chunk has depends on the sequence's own length alone.
constexpr int kChunkBlocks = 8;  // at least
constexpr int kMostChunks = 8;

struct Chunks {
  KeyBlocks blocks;
  i64 per_chunk, count;
  explicit Chunks(i64 key_limit)
      : blocks(key_limit),
        per_chunk(max(kChunkBlocks, (blocks.count + kMostChunks - 1) / kMostChunks)),
        count((blocks.count + per_chunk - 1) / per_chunk) {}
  i64 first_block(i64 chunk) const { return chunk * per_chunk; }
  i64 last_block(i64 chunk) const { return min(blocks.count, (chunk + 1) * per_chunk); }
  i64 begin(i64 chunk) const { return blocks.begin(first_block(chunk)); }
  i64 end(i64 chunk) const { return blocks.end(last_block(chunk) - 1); }
  i64 room() const { return per_chunk * kBlockKeys + kBlockKeys / 2; }
};

// The gradients of a chunk's keys or values, block by block. Tiles add to a block's part; after every kTilesPerSum
// tiles of queries that had any share of the chunk, parts go on to totals, so that no chain of additions is longer. A
// block does so when it is next touched: blocks that few tiles touch cost little.
template <class Acc>
class KeySums {
 public:
  struct Block {
    i64 since;   // which sum its part belongs to; -1: it was never touched
    bool moved;  // it has a total
  };

  // rooms: two, of a chunk's keys each, `stride` numbers for a key. state: one per block.
  KeySums(Acc* first, Acc* second, i64 stride, Block* state, const Chunks& all, i64 chunk)
      : rooms_{first, second}, stride_(stride), state_(state), all_(all), first_(all.first_block(chunk)) {
    for (i64 x = first_; x < all.last_block(chunk); x++) state_[x - first_] = {-1, false};
  }

  // Where a tile of queries adds its share of a block.
  Acc* part(i64 block) {
    Block& x = state_[block - first_];
    if (x.since != sum_) {
      if (x.since >= 0) settle(block);
      std::memset(room(block, x.moved), 0, static_cast<std::size_t>(size(block)) * sizeof(Acc));
      x.since = sum_;
    }
    return room(block, x.moved);
  }
  void count_tile() {
    if (++pending_ == kTilesPerSum) sum_++, pending_ = 0;
  }
  // Tiles whose shares still go into the same sum.
  i64 tiles_left() const { return kTilesPerSum - pending_; }
  // The sum of a block; null where it is zero.
  const Acc* finish(i64 block) {
    Block& x = state_[block - first_];
    if (x.since < 0) return nullptr;
    if (x.moved) settle(block);
    return room(block, false);
  }

  // What the next tile reads and writes of a block.
  void look_ahead(i64 block, Ahead& ahead) const {
    const Block& x = state_[block - first_];
    const i64 bytes = size(block) * static_cast<i64>(sizeof(Acc));
    ahead.add(room(block, x.moved), bytes, 1, bytes);
    if (x.since >= 0 && x.since != sum_) ahead.add(room(block, !x.moved), bytes, 1, bytes);
  }

 private:
  i64 size(i64 block) const { return (all_.blocks.end(block) - all_.blocks.begin(block)) * stride_; }
  // The first room has the part until that becomes the total; then the second has the part.
  Acc* room(i64 block, bool second) const {
    return rooms_[second] + (all_.blocks.begin(block) - all_.blocks.begin(first_)) * stride_;
  }
  void settle(i64 block) {
    Block& x = state_[block - first_];
    if (x.moved) {
      Acc *total = room(block, false), *part = room(block, true);
      for (i64 i = 0; i < size(block); i += kLanes<Acc>) store(total + i, load(total + i) + load(part + i));
    }
    x.moved = true;
  }

  Acc* rooms_[2];
  i64 stride_;
  Block* state_;
  const Chunks& all_;
  i64 first_, sum_ = 0;
  int pending_ = 0;
};

}  // namespace tilewise::TILEWISE_ISA
