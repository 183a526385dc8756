// The two products of few rows by matrix tiles. Scores are made as they lie in the cache, S^T = K Q^T: rows of keys are
// the left operand, and the queries, in pairs along the width, the right one. In O = P V the probabilities are the left
// operand and pairs of rows of values, interleaved here, the right one.
#pragma once

#include "decode/products.h"
#include "products/amx.h"

namespace tilewise::TILEWISE_ISA {

class TileProducts {
  static constexpr int kTileRows = 16, kTileDepth = 32;  // rows; bfloat16 numbers of a row
  static constexpr int kTileBytes = 64;
  static constexpr int kGroups = 4;      // of 16 keys, multiplied side by side
  static constexpr int kColumns = 64;    // of values, interleaved and multiplied side by side
  static constexpr int kVectorRows = 2;  // rows that vectors add up faster than tiles

 public:
  using Vectors = RowVectors<PairMode>;
  static constexpr i64 alone = 0, streaming = 0;

  struct Room {
    i32* queries;  // [depth / 2][width]
    i64 width;
    u16* keys;           // copies of rows that do not lie at equal distances
    i32* values;         // two of [16][kColumns]
    float* sums;         // [kGroups][16][16]
    TileShapes* scores;  // two: of several rows and of one
    Room(Carver& carve, i64 rows, int depth) : width(round_up(rows, kTileRows) + kTileRows) {
      const i64 whole = round_up(depth, kTileDepth);
      queries = carve.take<i32>(whole / 2 * width);
      keys = carve.take<u16>(kGroups * kTileRows * whole);
      values = carve.take<i32>(2 * kTileRows * kColumns);
      sums = carve.take<float>(kGroups * kTileRows * kTileRows);
      scores = carve.take<TileShapes>(2);
    }

    void open(const i32* q, i64 q_stride, int rows, int depth) const {
      const int whole = static_cast<int>(round_up(depth, kTileDepth));
      pack_transposed_pairs(reinterpret_cast<const u16*>(q), 2 * q_stride, 1, rows, whole, static_cast<int>(width),
                            queries);
      const int rest = rest_of(depth);
      for (int single = 0; single < 2; single++) {
        const int bytes = single ? 4 : kTileBytes;  // a column per row
        TileShapes& shapes = scores[single] = TileShapes();
        for (int tile = 0; tile < 4; tile++) shapes.set(tile, kTileRows, bytes);
        shapes.set(4, kTileRows, kTileBytes);
        shapes.set(5, kTileRows, bytes);
        if (rest == 0) continue;
        shapes.set(6, kTileRows, 2 * rest);
        shapes.set(7, rest / 2, bytes);
      }
    }
    void close() const { release_tiles(); }
  };

  static void dots(const Room& room, const i32*, i64, int row0, int rows, const Bf16* const* keys, int count, int depth,
                   float* s, i64 stride, RowsAhead& ahead) {
    ahead.spread(ahead.left() / 8, count / kSubKeys);
    const bool single = rows == 1;
    room.scores[single].use();
    for (int j = 0; j < count; j += kGroups * kSubKeys) {
      const int groups = static_cast<int>(min(kGroups, (count - j) / kSubKeys));
      KeyRows at[kGroups];
      for (int g = 0; g < groups; g++) {
        u16* copies = room.keys + g * kTileRows * round_up(depth, kTileDepth);
        at[g] = rows_of(copies, keys + j + g * kSubKeys, depth);
      }
      for (int r = 0; r < rows; r += kTileRows) {
        const i32* q = room.queries + row0 + r;
        const int few = static_cast<int>(min(kTileRows, rows - r));
        float* to = s + r * stride + j;
        if (groups == 4)
          score_tiles<4>(room, q, at, depth, single ? 0 : few, to, stride, ahead);
        else if (groups == 3)
          score_tiles<3>(room, q, at, depth, single ? 0 : few, to, stride, ahead);
        else if (groups == 2)
          score_tiles<2>(room, q, at, depth, single ? 0 : few, to, stride, ahead);
        else
          score_tiles<1>(room, q, at, depth, single ? 0 : few, to, stride, ahead);
      }
    }
  }

  static void sums(const Room& room, const i32* p, int rows, const Bf16* const* values, int keys, int width, float* out,
                   i64 out_stride, const float* alpha, RowsAhead& ahead) {
    const int chunks = (keys + kTileDepth - 1) / kTileDepth, groups = (width + kColumns - 1) / kColumns;
    ahead.spread(ahead.left(), chunks * kTileRows * groups * ((rows + kTileRows - 1) / kTileRows));
    for (int r = 0; r < rows; r += kTileRows) {
      const int few = static_cast<int>(min(kTileRows, rows - r));
      if (few > kVectorRows && (r == 0 || few < kTileRows)) shape_sums(few);
      for (int column = 0; column < width; column += kColumns) {
        const Values from = {values, keys, column, width - column};
        float* to = out + r * out_stride + column;
        if (few <= kVectorRows)
          for (int i = 0; i < few; i++)
            sum_row(p + (r + i) * kRoomKeys, from, to + i * out_stride, alpha[r + i], ahead);
        else if (from.width > kColumns / 2)
          sum_tiles<2>(room, p + r * kRoomKeys, few, from, chunks, to, out_stride, alpha + r, ahead);
        else
          sum_tiles<1>(room, p + r * kRoomKeys, few, from, chunks, to, out_stride, alpha + r, ahead);
      }
    }
    ahead.all();
  }

 private:
  struct KeyRows {
    const Bf16* first;
    i64 bytes;  // from row to row
  };

  // What is left of a row behind the last whole tile. A tile's row has whole words: rows of odd width are copied.
  static int rest_of(int depth) { return depth % 2 == 0 ? depth % kTileDepth : 0; }

  // Where rows do not lie at equal distances they are copied.
  static KeyRows rows_of(u16* copies, const Bf16* const* keys, int depth) {
    const i64 apart = reinterpret_cast<const char*>(keys[1]) - reinterpret_cast<const char*>(keys[0]);
    i64 other = 0;
    for (int j = 1; j < kSubKeys; j++)
      other |= (reinterpret_cast<const char*>(keys[j]) - reinterpret_cast<const char*>(keys[j - 1])) ^ apart;
    if (other == 0 && depth % 2 == 0) return {keys[0], apart};
    const i64 whole = round_up(depth, kTileDepth);
    for (int j = 0; j < kSubKeys; j++)
      for (i64 d = 0; d < whole; d += kTileDepth)
        store(copies + j * whole + d, (Vec<u16>)words_of(keys[j] + d, depth - d));
    return {reinterpret_cast<const Bf16*>(copies), whole * 2};
  }

  // Of a single row (`rows` is 0) the tiles have one column, which is stored as it is.
  template <int kG>
  TW_NOINLINE static void score_tiles(const Room& room, const i32* q, const KeyRows* at, int depth, int rows, float* s,
                                      i64 stride, RowsAhead& ahead) {
    const i64 q_bytes = room.width * 4;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    const int rest = rest_of(depth),
              whole = depth % 2 == 0 ? depth - rest : static_cast<int>(round_up(depth, kTileDepth));
    const auto step = [&](auto a, auto b, int d) {
      constexpr int kA = decltype(a)::value, kB = decltype(b)::value;
      load_tile<kB>(q + d / 2 * room.width, q_bytes);
      load_tile<kA>(at[0].first + d, at[0].bytes), multiply_tiles<0, kA, kB>();
      if constexpr (kG > 1) load_tile<kA>(at[1].first + d, at[1].bytes), multiply_tiles<1, kA, kB>();
      if constexpr (kG > 2) load_tile<kA>(at[2].first + d, at[2].bytes), multiply_tiles<2, kA, kB>();
      if constexpr (kG > 3) load_tile<kA>(at[3].first + d, at[3].bytes), multiply_tiles<3, kA, kB>();
    };
    for (int d = 0; d < whole; d += kTileDepth) step(Int<4>{}, Int<5>{}, d);
    if (rest > 0) step(Int<6>{}, Int<7>{}, whole);
    const bool single = rows == 0;
    const i64 bytes = single ? 4 : kTileBytes, apart = single ? kSubKeys : kTileRows * kTileRows;
    float* sums = single ? s : room.sums;
    store_tile<0>(sums, bytes);
    if constexpr (kG > 1) store_tile<1>(sums + apart, bytes);
    if constexpr (kG > 2) store_tile<2>(sums + 2 * apart, bytes);
    if constexpr (kG > 3) store_tile<3>(sums + 3 * apart, bytes);
    for (int g = 0; g < kG; g++) {
      ahead.step();
      if (single) continue;
      Vec<float> r[kTileRows];
      TW_UNROLL(16)
      for (int j = 0; j < kTileRows; j++) r[j] = load(room.sums + (g * kTileRows + j) * kTileRows);
      transpose<float>(r);
      float* to = s + g * kSubKeys;
      TW_UNROLL(16)
      for (int i = 0; i < kTileRows; i++)
        if (i < rows) store(to + i * stride, r[i]);
    }
  }

  struct Values {
    const Bf16* const* rows;
    int count, column, width;  // width: from `column` on
  };

  // Rows of values in pairs, zeros behind the last: to[j][c] holds rows 2 j and 2 j + 1 of kColumns columns, out of
  // order as Vectors::of_values has it. A quarter of a chunk, which is kTileDepth rows.
  template <int kHalves>
  TW_INLINE void interleave(const Values& from, int chunk, int quarter, i32* to, RowsAhead& ahead) {
    constexpr int kStep = 2 * kLanes<i32>, kPairs = kTileRows / 4;
    const int last = from.width - (kHalves - 1) * kStep, row = chunk * kTileDepth + quarter * 2 * kPairs;
    const Bf16* const* rows = from.rows + row;
    to += quarter * kPairs * kColumns;
    for (int j = 0; j < kPairs; j++, to += kColumns) {
      ahead.step();
      Vec<i32> x[2 * kHalves] = {};
      if (row + 2 * j < from.count) {
        if constexpr (kHalves > 1) Vectors::of_values(rows, 2 * j, from.column, kStep, x);
        Vectors::of_values(rows, 2 * j, from.column + (kHalves - 1) * kStep, last, x + 2 * (kHalves - 1));
      }
      TW_UNROLL(4)
      for (int v = 0; v < 2 * kHalves; v++) store(to + v * kLanes<i32>, x[v]);
    }
  }

  // What tiles do, by vectors and to the bit: of kTileDepth keys the even ones are added up, and the odd ones, and then
  // both; numbers below the normal range are 0.
  static void sum_row(const i32* p, const Values& values, float* out, float alpha, RowsAhead& ahead) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    if (values.width > kColumns / 2)
      sum_row_vectors<2>(p, values, out, alpha, ahead);
    else
      sum_row_vectors<1>(p, values, out, alpha, ahead);
    _mm_setcsr(before);
  }

  template <int kHalves>
  TW_NOINLINE static void sum_row_vectors(const i32* p, const Values& values, float* out, float alpha,
                                          RowsAhead& ahead) {
    using Widened = RowVectors<PlainMode<Bf16, float>>;
    constexpr int lanes = kLanes<float>, kV = 2 * kHalves, kStep = 2 * lanes;
    Vec<float> sums[kV] = {};
    for (int first = 0; first < values.count; first += kTileDepth) {
      const int end = static_cast<int>(min(first + kTileDepth, values.count));
      Vec<float> parts[2][kV] = {};
      for (int j = first; j < end; j += 2) {
        ahead.step();
        const u32 pair = static_cast<u32>(p[j / 2]);
        const float weights[2] = {__builtin_bit_cast(float, pair << 16), __builtin_bit_cast(float, pair & 0xffff0000u)};
        TW_UNROLL(2)
        for (int x = 0; x < 2; x++) {
          Vec<float> v[kV];
          const Bf16* row = values.rows[j + x] + values.column;
          if constexpr (kHalves > 1) Widened::of_key(row, kStep, v);
          Widened::of_key(row + (kHalves - 1) * kStep, values.width - (kHalves - 1) * kStep, v + kV - 2);
          TW_UNROLL(4)
          for (int i = 0; i < kV; i++) parts[x][i] = fused(v[i], set(weights[x]), parts[x][i]);
        }
      }
      TW_UNROLL(4)
      for (int i = 0; i < kV; i++) sums[i] += parts[0][i] + parts[1][i];
    }
    TW_UNROLL(2)
    for (int i = 0; i < kV; i += 2) Widened::in_order(sums + i);
    TW_UNROLL(4)
    for (int i = 0; i < kV; i++) store(out + i * lanes, fused(load(out + i * lanes), set(alpha), sums[i]));
  }

  static void shape_sums(int rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; tile++) shapes.set(tile, rows, kTileBytes);
    for (int tile = 5; tile < 7; tile++) shapes.set(tile, kTileRows, kTileBytes);
    shapes.use();
  }

  // The next rows are interleaved while the last ones are multiplied: what was just stored cannot be loaded at once,
  // and a product that waits holds up what follows.
  template <int kHalves>
  TW_NOINLINE static void sum_tiles(const Room& room, const i32* p, int rows, const Values& values, int chunks,
                                    float* out, i64 out_stride, const float* alpha, RowsAhead& ahead) {
    constexpr i64 kBytes = kColumns * 4;
    constexpr int lanes = kLanes<float>;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    i32 *now = room.values, *next = now + kTileRows * kColumns;
    for (int quarter = 0; quarter < 4; quarter++) interleave<kHalves>(values, 0, quarter, now, ahead);
    for (int c = 0; c < chunks; c++) {
      const auto prepare = [&](int quarter) {
        if (c + 1 < chunks) interleave<kHalves>(values, c + 1, quarter, next, ahead);
      };
      load_tile<4>(p + c * kTileRows, kRoomKeys * 4);
      prepare(0);
      load_tile<5>(now, kBytes), multiply_tiles<0, 4, 5>();
      prepare(1);
      load_tile<6>(now + lanes, kBytes), multiply_tiles<1, 4, 6>();
      prepare(2);
      if constexpr (kHalves > 1) load_tile<5>(now + 2 * lanes, kBytes), multiply_tiles<2, 4, 5>();
      prepare(3);
      if constexpr (kHalves > 1) load_tile<6>(now + 3 * lanes, kBytes), multiply_tiles<3, 4, 6>();
      std::swap(now, next);
    }
    store_tile<0>(room.sums, kBytes), store_tile<1>(room.sums + lanes, kBytes);
    if constexpr (kHalves > 1)
      store_tile<2>(room.sums + 2 * lanes, kBytes), store_tile<3>(room.sums + 3 * lanes, kBytes);
    for (int r = 0; r < rows; r++) {
      const Vec<float> factor = set(alpha[r]);
      for (int h = 0; h < kHalves; h++) {
        Vec<float> x[2] = {load(room.sums + r * kColumns + 2 * h * lanes),
                           load(room.sums + r * kColumns + (2 * h + 1) * lanes)};
        Vectors::in_order(x);
        float* to = out + r * out_stride + 2 * h * lanes;
        store(to, fused(load(to), factor, x[0]));
        store(to + lanes, fused(load(to + lanes), factor, x[1]));
      }
    }
  }
};

}  // namespace tilewise::TILEWISE_ISA
