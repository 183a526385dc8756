// The table of a mask against its definition, pair by pair; and that with it every kernel gives what it gives without.
#pragma once

#include "base/order.h"
#include "variant_tests.h"

namespace tilewise::test {

// The table of an instance's mask, [batch, heads, rows, columns], in guarded memory.
struct TableOf {
  Covers args;
  Array<unsigned char> memory;

  TableOf(const Instance& x, i64 block_queries, i64 block_keys, int threads, Place place) {
    static_cast<tilewise::Problem&>(args) = x.args;
    args.threads = threads;
    args.block_queries = block_queries, args.block_keys = block_keys;
    args.batches = x.c.batch, args.heads_apart = x.c.heads;
    args.rows = (x.c.queries + block_queries - 1) / block_queries;
    args.columns = (x.c.keys + block_keys - 1) / block_keys;
    memory = Array<unsigned char>(std::vector<unsigned char>(static_cast<std::size_t>(size()), 0xcc), place);
    args.table = memory.data();
  }
  i64 size() const { return args.batches * args.heads_apart * args.rows * args.columns; }
  unsigned char at(i64 b, i64 h, i64 row, i64 column) const {
    return args.table[((b * args.heads_apart + h) * args.rows + row) * args.columns + column];
  }
  MaskInstr instruction() const {
    MaskInstr x;
    x.op = MaskOp::tiles;
    x.block_queries = args.block_queries, x.block_keys = args.block_keys;
    x.tensor = {args.table, args.heads_apart * args.rows * args.columns, args.rows * args.columns, args.columns, 1};
    return x;
  }
};

inline int cover_by_pairs(const Naive& truth, const Instance& x, const Covers& f, i64 b, i64 h, i64 row, i64 column) {
  const i64 beyond_m = std::min((row + 1) * f.block_queries, x.queries(b));
  const i64 beyond_n = std::min((column + 1) * f.block_keys, x.keys(b));
  bool some = false, every = true;
  for (i64 m = row * f.block_queries; m < beyond_m; m++)
    for (i64 n = column * f.block_keys; n < beyond_n; n++)
      (truth.sees(b, h, m, n) ? some : every) = truth.sees(b, h, m, n);
  return !some ? 0 : every ? 2 : 1;
}

inline void check_table(const Case& c, i64 block_queries, i64 block_keys) {
  const std::string what =
      c.text() + ", tiles of " + std::to_string(block_queries) + " x " + std::to_string(block_keys);
  for (Place place : {Place::end, Place::start}) {
    Instance x(c, place);
    const Naive truth(x, false);
    for (const Kernels* kernels : instruction_sets()) {
      TableOf table(x, block_queries, block_keys, place == Place::end ? 1 : 3, place);
      expect(kernels->covers(table.args), "out of memory: " + what);
      for (i64 b = 0; b < x.c.batch; b++)
        for (i64 h = 0; h < x.c.heads; h++)
          for (i64 row = 0; row < table.args.rows; row++)
            for (i64 column = 0; column < table.args.columns; column++)
              expect(table.at(b, h, row, column) == cover_by_pairs(truth, x, table.args, b, h, row, column),
                     std::string(kernels->name) + ": the cover of tile " + std::to_string(row) + ", " +
                         std::to_string(column) + " of " + what);
      expect(x.run(*kernels, 1), "out of memory: " + what);
      std::vector<Numbers> alone;
      for (auto& [name, tensor] : x.results()) alone.push_back(tensor->values());
      x.args.mask[x.args.mask_length++] = table.instruction();
      expect(x.run(*kernels, 3), "out of memory: " + what);
      x.args.mask_length--;
      const auto results = x.results();
      for (std::size_t i = 0; i < alone.size(); i++)
        expect_same(results[i].second->values(), alone[i],
                    std::string(results[i].first) + " with a table and without, " + kernels->name + ", " + what);
    }
  }
}

inline void test_order() {
  std::vector<Weighted> tasks;
  for (i64 task = 0; task < 100; task++)
    tasks.push_back({static_cast<i64>(scramble(static_cast<u64>(task)) % 7), task});
  heaviest_first(tasks.data(), 100);
  std::vector<bool> taken(100);
  for (std::size_t i = 0; i < 100; i++) {
    taken[static_cast<std::size_t>(tasks[i].task)] = true;
    if (i == 0) continue;
    const Weighted &before = tasks[i - 1], &now = tasks[i];
    expect(before.weight > now.weight || (before.weight == now.weight && before.task < now.task),
           "tasks " + std::to_string(before.task) + " and " + std::to_string(now.task) + " stand in the wrong order");
  }
  expect(std::find(taken.begin(), taken.end(), false) == taken.end(), "a task is lost");
}

inline void test_covers(DType dtype) {
  const std::vector<std::vector<MaskSpec>> masks = {
      {band(-1, 0)},
      {band(20, 3)},
      {lengths({0, 64})},
      {documents(3)},
      {documents(0)},
      {band(-1, 0), documents(3), kAnd},
      {documents(0), kNot, band(10, -1), kOr},
      {dense(0, 0.9)},
      {dense(2, 0.1), band(-1, 0), kAnd, lengths({99, 30}), kAnd},
      {band(-1, 0), band(-1, 0), kNot, kAnd},
  };
  for (const std::vector<MaskSpec>& mask : masks) {
    Case c = make(dtype, 130, 200, 8, 8);
    c.batch = 2, c.mask = mask;
    check_table(c, 64, 128);
    check_table(c, 16, 16);
    check_table(c, 37, 5);
    Case packed = c;
    packed.query_lengths = {70, 0, 3}, packed.key_lengths = {200, 5, 0};
    packed.mask = {documents(0), band(-1, 0), kAnd};
    if (&mask == &masks[0]) check_table(packed, 32, 48);
  }
  Case longer = make(dtype, 200, 2300, 8, 8);  // several chunks of keys, and more tiles than one thread does alone
  longer.mask = {documents(7), band(-1, 0), kAnd};
  check_table(longer, 8, 16);
}

}  // namespace tilewise::test
