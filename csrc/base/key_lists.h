// Key lists (attention(..., keys=)) as sets, and where the keys of sets lie. One pass over the numbers of each list:
// what torch does in thirty operations, each with memory of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/args.h"
#include "base/parallel.h"

namespace tilewise {

// Calls work(first, last, scratch memory of `bytes`) for all lists, some at a time. False when memory ran out.
template <class Work>
bool over_lists(int threads, i64 lists, i64 numbers_of_one, std::size_t bytes, const Work& work) {
  constexpr i64 kNumbers = 1 << 14;  // of a task: waking a thread takes as long as some thousand of them
  const i64 size = std::max<i64>(1, kNumbers / std::max<i64>(1, numbers_of_one));
  struct Shared {
    const Work& work;
    i64 lists, size;
    std::size_t bytes;
    i64 next = 0;
    int failed = 0;
  } shared{work, lists, size, bytes};
  const auto body = [](void* context) {
    Shared& s = *static_cast<Shared*>(context);
    void* memory = scratch(std::max<std::size_t>(s.bytes, 1));
    if (memory == nullptr) {
      __atomic_store_n(&s.failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (;;) {
      const i64 first = __atomic_fetch_add(&s.next, s.size, __ATOMIC_RELAXED);
      if (first >= s.lists) break;
      s.work(first, std::min(s.lists, first + s.size), memory);
    }
    trim_scratch();
  };
  const i64 tasks = (lists + size - 1) / size;
  if (tasks <= 1)
    body(&shared);
  else
    run_team(static_cast<int>(std::min<i64>(threads, tasks)), body, &shared);
  return shared.failed == 0;
}

struct KeySets {
  int threads = 1;
  i64 batch = 1, heads = 1, rows = 0, width = 0, block = 1;
  i64 strides[4] = {0, 0, 0, 0};  // of indices [batch, heads, rows, width]
  const void* indices = nullptr;  // int64 if `wide`, else int32
  bool wide = false;
  const i64* lengths = nullptr;  // [batch * rows], the keys of the sequence of each list
  // sets [batch * rows, heads, width]: blocks in ascending order, each once, then the number of blocks, which stands
  // for none. counts [batch * rows, heads]: how many keys they have.
  std::int32_t* sets = nullptr;
  i64* counts = nullptr;
  i64 wrong = -1;  // out: the first place in sets for an index that is neither a block nor -1; else -1
};

// Numbers from 0 to `most` in ascending order: eight bits at a time, the lowest first.
inline void sort_numbers(std::int32_t* x, std::int32_t* room, i64 count, std::int32_t most) {
  constexpr i64 kFew = 96;
  if (count <= kFew) {
    std::sort(x, x + count);
    return;
  }
  std::int32_t *from = x, *to = room;
  for (int shift = 0; shift < 32 && (most >> shift) != 0; shift += 8) {
    std::int32_t places[257] = {};
    for (i64 i = 0; i < count; i++) places[((from[i] >> shift) & 255) + 1]++;
    for (int digit = 0; digit < 256; digit++) places[digit + 1] += places[digit];
    for (i64 i = 0; i < count; i++) to[places[(from[i] >> shift) & 255]++] = from[i];
    std::swap(from, to);
  }
  if (from != x) std::memcpy(x, from, static_cast<std::size_t>(count) * sizeof *x);
}

// One list. Returns the place of its first wrong index, or -1.
template <class Index>
i64 make_set(const Index* from, i64 step, i64 width, std::int32_t limit, std::int32_t* set, std::int32_t* room) {
  i64 wrong = -1;
  bool ascending = true;
  std::int32_t before = -1;
  for (i64 i = 0; i < width; i++) {
    const Index index = from[i * step];
    if ((index < -1 || index >= limit) && wrong < 0) wrong = i;
    const std::int32_t number = index < 0 || index >= limit ? limit : static_cast<std::int32_t>(index);
    ascending &= number > before || number == limit;
    set[i] = before = number;
  }
  if (ascending) return wrong;
  sort_numbers(set, room, width, limit);
  i64 kept = 0;
  for (i64 i = 0; i < width && set[i] != limit; i++)
    if (kept == 0 || set[i] != set[kept - 1]) set[kept++] = set[i];
  std::fill(set + kept, set + width, limit);
  return wrong;
}

// False when memory ran out.
inline bool make_sets(KeySets& f) {
  constexpr i64 kNone = std::numeric_limits<i64>::max();
  i64 wrong = kNone;
  const auto bytes = static_cast<std::size_t>(f.width) * sizeof(std::int32_t);
  const bool done =
      over_lists(f.threads, f.batch * f.rows * f.heads, f.width, bytes, [&](i64 list, i64 end, void* room) {
        for (; list < end; list++) {
          const i64 row = list / f.heads, head = list % f.heads;
          const i64 length = f.lengths[row], blocks = (length + f.block - 1) / f.block;
          const auto limit = static_cast<std::int32_t>(blocks);
          const i64 at = row / f.rows * f.strides[0] + head * f.strides[1] + row % f.rows * f.strides[2];
          std::int32_t* set = f.sets + list * f.width;
          auto* other = static_cast<std::int32_t*>(room);
          const i64 found =
              f.wide ? make_set(static_cast<const i64*>(f.indices) + at, f.strides[3], f.width, limit, set, other)
                     : make_set(static_cast<const std::int32_t*>(f.indices) + at, f.strides[3], f.width, limit, set,
                                other);
          const i64 named = std::lower_bound(set, set + f.width, limit) - set;
          i64 count = named * f.block;
          if (named > 0 && set[named - 1] == limit - 1)
            count -= blocks * f.block - length;  // the last block is shorter
          f.counts[list] = count;
          if (found < 0) continue;
          const i64 place = list * f.width + found;
          i64 least = __atomic_load_n(&wrong, __ATOMIC_RELAXED);
          while (place < least &&
                 !__atomic_compare_exchange_n(&wrong, &least, place, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
          }
        }
      });
  f.wrong = wrong == kNone ? -1 : wrong;
  return done;
}

struct KeyPages {
  int threads = 1;
  // Lists, heads of the sets (1 or `heads`), key heads, the width of a set, keys of a block, of a page, of a head in
  // all.
  i64 lists = 0, set_heads = 1, heads = 1, width = 0, block = 1, size = 1, total = 0;
  i64 outer = 0, head = 0, page = 0;              // steps from page to page
  const std::int32_t* sets = nullptr;             // [lists, set_heads, width]
  const i64* counts = nullptr;                    // [lists, set_heads]
  const i64 *item = nullptr, *lengths = nullptr;  // [lists]: the sequence, and its keys
  const i64* starts = nullptr;                    // of packed sequences: the first key; else null
  const std::int32_t* table = nullptr;            // of keys that lie in pages already [items, columns]; else null
  i64 columns = 0, page_size = 1;
  // out: numbers [lists, heads, width * block / size], the pages; key_lengths [lists, heads]; keys, as numbers, or
  // null.
  std::int32_t *numbers = nullptr, *key_lengths = nullptr;
  i64* keys = nullptr;
};

// False when memory ran out.
inline bool find_pages(const KeyPages& f) {
  const i64 each = f.block / f.size, many = f.width * each;
  return over_lists(f.threads, f.lists * f.heads, many, 1, [&](i64 problem, i64 end, void*) {
    for (; problem < end; problem++) {
      const i64 list = problem / f.heads, head = problem % f.heads;
      const i64 own = list * f.set_heads + (f.set_heads == 1 ? 0 : head);
      const std::int32_t* set = f.sets + own * f.width;
      const i64 item = f.item[list], last = f.lengths[list] - 1;
      const i64 start = f.starts ? f.starts[item] : 0;
      const std::int32_t* table = f.table ? f.table + item * f.columns : nullptr;
      std::int32_t* numbers = f.numbers + problem * many;
      for (i64 at = 0; at < many; at++) {
        const i64 named = each == 1 ? i64{set[at]} * f.block : i64{set[at / each]} * f.block + at % each;
        const i64 key = std::max<i64>(0, std::min(named, last));  // some key stands for none, which nobody reads
        i64 number = head * f.head;
        if (table)
          number += table[key / f.page_size] * f.outer + key % f.page_size * f.page;
        else if (f.starts)
          number += std::min(key + start, f.total - 1) * f.page;
        else
          number += item * f.outer + key / f.size * f.page;
        numbers[at] = static_cast<std::int32_t>(number);
        if (f.keys) f.keys[problem * many + at] = key;
      }
      f.key_lengths[problem] = static_cast<std::int32_t>(f.counts[own]);
    }
  });
}

// Neighbouring rows together: which of them read a block, by a mark for each block of their sequence.
struct KeyUnions {
  static constexpr i64 kRows = 16;  // at most, of a group: a row is a bit of a mark
  static constexpr i64 kSizes = 5;  // of 1, 2, 4, 8 and 16 rows together

  int threads = 1;
  i64 groups = 0, heads = 1, width = 0;
  i64 longest = 0;                              // the largest of `limits`
  const std::int32_t* sets = nullptr;           // [rows of all, heads, width], of key_sets
  const i64 *first = nullptr, *rows = nullptr;  // [groups]: the place of the first row, and how many
  const i64* limits = nullptr;                  // [groups]: blocks of the sequence; a number from there on is none
  i64* sizes = nullptr;                         // out [groups, heads, kSizes], or null: blocks in the unions of so
                                                // many neighbours each, added up over the group
  std::int32_t *blocks = nullptr, *readers = nullptr;  // out [groups, heads, wide], or null: the union in ascending
  i64 wide = 0;                                        // order, then the limit; bit r is set where row r reads it
};

// How many bits of two and more rows together, of 1024 marks: in words of 16 bits, which vectors have many of.
inline void add_sizes(const std::uint16_t* marks, i64 count, i64* sizes) {
  std::uint16_t sums[KeyUnions::kSizes] = {};
  const auto bits = [](unsigned x) {
    x = (x & 0x3333u) + ((x >> 2) & 0x3333u);
    x = (x + (x >> 4)) & 0x0f0fu;
    return static_cast<std::uint16_t>((x + (x >> 8)) & 31u);
  };
  for (i64 i = 0; i < count; i++) {
    const unsigned one = marks[i];
    const unsigned two = (one | one >> 1) & 0x5555u, four = (two | two >> 2) & 0x1111u, eight = four | four >> 4;
    sums[0] = static_cast<std::uint16_t>(sums[0] + bits((one & 0x5555u) + ((one >> 1) & 0x5555u)));
    sums[1] = static_cast<std::uint16_t>(sums[1] + bits(two));
    sums[2] = static_cast<std::uint16_t>(sums[2] + bits(four));
    sums[3] = static_cast<std::uint16_t>(sums[3] + (eight & 1u) + ((eight >> 8) & 1u));
    sums[4] = static_cast<std::uint16_t>(sums[4] + ((eight | eight >> 8) & 1u));
  }
  for (i64 s = 0; s < KeyUnions::kSizes; s++) sizes[s] += sums[s];
}

// False when memory ran out.
inline bool unite(const KeyUnions& f) {
  const i64 numbers = KeyUnions::kRows * f.width + f.longest;
  const auto bytes = static_cast<std::size_t>(f.longest) * sizeof(std::uint16_t);
  return over_lists(f.threads, f.groups * f.heads, numbers, bytes, [&](i64 problem, i64 end, void* memory) {
    auto* marks = static_cast<std::uint16_t*>(memory);
    for (; problem < end; problem++) {
      const i64 group = problem / f.heads, head = problem % f.heads, limit = f.limits[group];
      std::fill(marks, marks + limit, std::uint16_t{0});
      for (i64 row = 0; row < f.rows[group]; row++) {
        const std::int32_t* set = f.sets + ((f.first[group] + row) * f.heads + head) * f.width;
        const auto bit = static_cast<std::uint16_t>(1u << row);
        for (i64 i = 0; i < f.width && set[i] >= 0 && set[i] < limit; i++)
          marks[set[i]] = static_cast<std::uint16_t>(marks[set[i]] | bit);
      }
      if (f.sizes) {
        i64* sizes = f.sizes + problem * KeyUnions::kSizes;
        std::fill(sizes, sizes + KeyUnions::kSizes, i64{0});
        for (i64 at = 0; at < limit; at += 1024) add_sizes(marks + at, std::min<i64>(1024, limit - at), sizes);
        continue;
      }
      std::int32_t *blocks = f.blocks + problem * f.wide, *readers = f.readers + problem * f.wide;
      i64 found = 0;
      for (i64 at = 0; at < limit && found < f.wide; at++) {
        if (marks[at] == 0) continue;
        blocks[found] = static_cast<std::int32_t>(at), readers[found++] = marks[at];
      }
      std::fill(blocks + found, blocks + f.wide, static_cast<std::int32_t>(limit));
      std::fill(readers + found, readers + f.wide, 0);
    }
  });
}

}  // namespace tilewise
