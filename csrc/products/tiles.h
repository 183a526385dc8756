// How bfloat16 is computed by matrix tiles (AMX): the layouts of the paired mode with rows of whole tiles, and a
// softmax that keeps references.
#pragma once

#include "products/tile_gemm.h"

namespace tilewise::TILEWISE_ISA {

// Scores are the products as they are.
struct NoStep {
  template <int kV, int kN>
  [[gnu::always_inline]] inline void scores(Vec<float> (&)[kN]) const {}
};

struct TileMode : PairMode {
  using Product = TileGemm;
  static constexpr int kWhole = 32;  // numbers of a row of a tile
  // Half as many queries at a time: their scores stay in the nearest cache.
  static constexpr int tile_queries = 32, query_tiles = 32;
  static constexpr int grad_tiles = 2;

  // Its registers' shapes, all alike, while a thread has tasks.
  struct Session : PairMode::Session {
    Session() {
      TileShapes shapes;
      for (int tile = 0; tile < 8; tile++) shapes.set(tile, TileGemm::kSide, 64);
      shapes.use();
    }
    ~Session() { release_tiles(); }
    PackedKeys<Word> packed;  // heads that share keys are mostly tasks one after the other
  };

  // A row's reference grows where a probability would be more than 2^8. Those up to 2^8 have as many digits as those up
  // to 1, and the sums of values are seldom scaled anew. It is asked of the words, which takes one operation for two
  // vectors; a NaN is more than 2^8.
  static constexpr int kRoomWord = 0x4380;  // 2^8
  TW_INLINE Vec<float> reference(Vec<float> before, Vec<float> peak, float factor) {
    const Vec<i32> word = pair(power((peak - before) * factor), Vec<float>{});
    const Vec<float> none = set(-__builtin_inff());
    return before == none ? peak : word > kRoomWord && peak > before ? peak : before;
  }

  static constexpr bool keeps_references = true;
  // Keys whose values are added up in one go: more of them load and store the sums less often, where the nearest cache
  // does not hold those as well.
  static constexpr int value_keys(int value_dim) { return value_dim <= 64 ? 64 : kMostValueKeys; }
  static constexpr int kMostValueKeys = 512;

  // What the next products read, brought into the nearest cache during the softmax of 64 keys: keys one after the
  // other, and values of as many keys. Null where there is none, or too much to stay there.
  struct Near {
    const Word *keys = nullptr, *values = nullptr;
    i64 value_stride = 0;
  };
  static constexpr int kNearKeys = 64;
  // With each two keys of the softmax.
  template <int kWords>
  TW_INLINE void fetch(Near& near) {
    constexpr int kLines = kWords / kLanes<Word> * 2;
    TW_UNROLL(8)
    for (int x = 0; x < kLines; x++) __builtin_prefetch(near.keys + x * kLanes<Word>, 0, 3);
    near.keys += kLines * kLanes<Word>;
    if constexpr (kWords == 32) {
      TW_UNROLL(2)
      for (int x = 0; x < 2; x++, near.values += near.value_stride) {
        __builtin_prefetch(near.values, 0, 3);
        __builtin_prefetch(near.values + kLanes<Word>, 0, 3);
      }
    }
  }
  // The softmax of a block of keys whose scores take the references that the rows have. Probabilities go to a place of
  // their own; where a row's reference has to grow after all, they count for nothing and false is returned, unless
  // `last`. Meanwhile the nearest cache takes in what the next products read; `words`: of a key. `step` makes
  // scores of what s has.
  template <class Step = NoStep>
  static bool softmax_kept(const float* s, int width, int count, const float* row_max, float* row_sum, float factor,
                           i32* p, bool last, Near fetched, int words, i64 = 0, Step step = {}) {
    alignas(64) float top[tile_queries];
    for (int i = 0; i < width; i += kLanes<float>) {
      // A row that has seen no key yet has no maximum to subtract.
      const Vec<float> before = load(row_max + i);
      store(top + i, before == set(-__builtin_inff()) ? Vec<float>{} : before);
    }
    const bool wide = width == 2 * kLanes<float>;
    if (wide && fetched.keys != nullptr && count == kNearKeys) {
      if (words == 32) return softmax_columns<2, 32>(s, count, top, row_sum, factor, p, last, fetched, step);
      if (words == 64) return softmax_columns<2, 64>(s, count, top, row_sum, factor, p, last, fetched, step);
    }
    if (wide) return softmax_columns<2, 0>(s, count, top, row_sum, factor, p, last, fetched, step);
    return softmax_columns<1, 0>(s, count, top, row_sum, factor, p, last, fetched, step);
  }
  template <int kV, int kFetched, class Step>
  TW_NOINLINE static bool softmax_columns(const float* s, int count, const float* top, float* row_sum, float factor,
                                          i32* p, bool last, Near fetched, Step step) {
    constexpr int lanes = kLanes<float>, width = kV * lanes;
    Vec<float> reference[kV], sum[kV];
    __m512i most[kV];
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) reference[v] = load(top + v * lanes), sum[v] = Vec<float>{}, most[v] = __m512i{};
    // Of the kN / kV keys from j on.
    const auto probabilities = [&]<int kN>(int j, Vec<float>(&x)[kN]) __attribute__((always_inline)) {
      TW_UNROLL(4)
      for (int n = 0; n < kN; n++) x[n] = load(s + static_cast<i64>(j) * width + n * lanes);
      step.template scores<kV>(x);
      TW_UNROLL(4)
      for (int n = 0; n < kN; n++) x[n] = power((x[n] - reference[n % kV]) * factor);
    };
    for (int first = 0; first < count; first += kSubKeys) {
      Vec<float> piece[kV] = {};
      const int end = first + kSubKeys <= count ? first + kSubKeys : count;
      int j = first;
      TW_UNROLL(2)
      for (; j + 2 <= end; j += 2) {
        if constexpr (kFetched != 0) fetch<kFetched>(fetched);
        Vec<float> x[2 * kV];
        probabilities(j, x);
        TW_UNROLL(2)
        for (int v = 0; v < kV; v++) {
          piece[v] += x[v] + x[kV + v];
          const Vec<i32> words = pair(x[v], x[kV + v]);
          most[v] = _mm512_max_epu16(most[v], (__m512i)words);
          store(p + static_cast<i64>(j / 2) * width + v * lanes, words);
        }
      }
      Vec<float> x[kV] = {};
      if (j < end) probabilities(j, x);
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) {
        if (j < end) {
          const Vec<i32> words = pair(x[v], Vec<float>{});
          piece[v] += x[v];
          most[v] = _mm512_max_epu16(most[v], (__m512i)words);
          store(p + j / 2 * width + v * lanes, words);
        }
        sum[v] += piece[v];
      }
    }
    u64 grows = 0;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) grows |= _mm512_cmpgt_epu16_mask(most[v], _mm512_set1_epi16(kRoomWord));
    if (__builtin_expect(grows != 0, 0) && !last) return false;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) store(row_sum + v * lanes, load(row_sum + v * lanes) + sum[v]);
    return true;
  }

  // Whether every row has a reference.
  static bool settled(const float* row_max, int width) {
    u64 none = 0;
    for (int i = 0; i < width; i += kLanes<float>)
      none |= bits_of_mask<i32>((Vec<i32>)(load(row_max + i) == -__builtin_inff()));
    return none == 0;
  }
  static bool grows(const float* row_max, const float* peak, int width, float factor) {
    return grows_by<TileMode>(row_max, peak, width, factor);
  }
  template <class Mode>
  static bool grows_by(const float* row_max, const float* peak, int width, float factor) {
    u64 grown = 0;
    for (int i = 0; i < width; i += kLanes<float>) {
      const Vec<float> before = load(row_max + i);
      grown |= bits_of_mask<i32>((Vec<i32>)(Mode::reference(before, load(peak + i), factor) != before));
    }
    return grown != 0;
  }
  // Lets the references of rows grow to the largest scores of a block, and scales what the rows have so far.
  static void raise(const float* peak, int width, float* row_max, float* row_sum, float factor, float* out,
                    int value_dim) {
    raise_by<TileMode>(peak, width, row_max, row_sum, factor, out, value_dim);
  }
  template <class Mode>
  TW_NOINLINE static void raise_by(const float* peak, int width, float* row_max, float* row_sum, float factor,
                                   float* out, int value_dim) {
    for (int i = 0; i < width; i += kLanes<float>) {
      const Vec<float> before = load(row_max + i), now = Mode::reference(before, load(peak + i), factor);
      const u64 grown = bits_of_mask<i32>((Vec<i32>)(now != before));
      if (grown == 0) continue;
      store(row_max + i, now);
      if (bits_of_mask<i32>((Vec<i32>)(before != -__builtin_inff())) == 0) continue;  // nothing so far
      const Vec<float> one = set(1.0f), top = now == -__builtin_inff() ? Vec<float>{} : now;
      const Vec<float> alpha = select_bits<float>(grown, exp2<5>((before - top) * factor, float{}), one);
      store(row_sum + i, load(row_sum + i) * alpha);
      for (int d = 0; d < value_dim; d++) store(out + d * width + i, load(out + d * width + i) * alpha);
    }
  }

  static constexpr i64 packed_keys = 2048;
  static int block_keys(int, int) { return 64; }

  // 2^x from its whole part down: the scaling instruction takes that by itself. Relative error 9e-5, 7e-6 on average.
  // What ends below the normal range is 0, as a session has it.
  TW_INLINE Vec<float> power(Vec<float> x) {
    const Vec<float> part = (Vec<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec<float> p = set(7.706724107e-02f);
    p = fused(p, part, set(2.276449800e-01f));
    p = fused(p, part, set(6.951166391e-01f));
    p = fused(p, part, set(1.0f));
    return (Vec<float>)_mm512_scalef_ps((__m512)p, (__m512)x);
  }
  // By integers, which do not wait for the port that floats and tiles share; halves are rounded up.
  TW_INLINE Vec<i32> pair(Vec<float> first, Vec<float> second) {
    alignas(64) static constexpr u16 kUpper[32] = {1,  1,  3,  3,  5,  5,  7,  7,  9,  9,  11, 11, 13, 13, 15, 15,
                                                   17, 17, 19, 19, 21, 21, 23, 23, 25, 25, 27, 27, 29, 29, 31, 31};
    const Vec<u32> low = (Vec<u32>)first + 0x8000, high = (Vec<u32>)second + 0x8000;
    return (Vec<i32>)_mm512_mask_permutexvar_epi16((__m512i)high, 0x55555555u, _mm512_load_si512(kUpper), (__m512i)low);
  }

  static int words(int depth) { return static_cast<int>(round_up(depth, kWhole) / 2); }
  // Rows of whole tiles on their own cache lines; where they lie if they lie so, side by side.
  static Words<Word> along_depth(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
    if (col == 1 && aligned && row == depth && depth % kWhole == 0) return {reinterpret_cast<const Word*>(p), row / 2};
    const int whole = words(depth);
    for (int j = 0; j < rows; j++)
      for (int d = 0; d < whole; d += kLanes<i32>)
        store(room + j * whole + d, pairs_strided(bits(p) + j * row + 2 * d * col, col, depth - 2 * d));
    return {room, whole};
  }
  // Transposed, in pairs of rows: to[d][j / 2] = (from[j][d], from[j + 1][d]). Zeros behind the last row to a whole
  // tile, and another tile of them for a block that begins within one.
  static i64 row_stride(i64 rows) { return round_up((rows + 1) / 2, TileGemm::kSide) + TileGemm::kSide; }
  static i64 rows_room(i64 rows, int depth) { return row_stride(rows) * round_up(depth, TileGemm::kSide); }
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows / 2; }
  static Words<Word> along_rows(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = row_stride(rows);
    constexpr int lanes = kLanes<i32>;
    for (int j = 0; j < rows; j += 2 * lanes) {
      for (int d = 0; d < depth; d += lanes) {
        const bool whole = col == 1 && j + 2 * lanes <= rows && d + lanes <= depth;
        Vec<i32> r[lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++)
          r[x] = whole ? whole_pair(bits(p) + (j + 2 * x) * row + d, row)
                       : pair_of_rows(bits(p), row, col, j + 2 * x, rows, d, depth);
        transpose<i32>(r);
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) store(room + (d + x) * stride + j / 2, r[x]);
      }
    }
    clear_behind(room, rows, depth, 1, 0);
    return {room, stride};
  }
  // The tile of zeros behind the last key, in each of so many planes.
  static void clear_behind(Word* room, int rows, int depth, int planes, i64 apart) {
    const i64 stride = row_stride(rows);
    Word* const first = room + stride - TileGemm::kSide;
    for (int y = 0; y < planes; y++)
      for (int d = 0; d < depth; d++) store(first + y * apart + d * stride, Vec<Word>{});
  }
  // 16 words of a row and the row behind it.
  TW_INLINE Vec<i32> whole_pair(const u16* p, i64 row) {
    alignas(64) static constexpr u16 kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + row));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return (Vec<i32>)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
  }
  // 16 words of row j and the row behind it, from d on; zeros where there is none.
  TW_INLINE Vec<i32> pair_of_rows(const u16* p, i64 row, i64 col, int j, int rows, int d, int depth) {
    Vec<u32> word[2] = {};
    for (int x = 0; x < 2; x++) {
      if (j + x >= rows) continue;
      const u16* from = p + (j + x) * row + d * col;
      if (col == 1) {
        word[x] = __builtin_convertvector(load16(from, depth - d), Vec<u32>);
      } else {
        for (int y = 0; y < kLanes<i32> && d + y < depth; y++) word[x][y] = from[y * col];
      }
    }
    return (Vec<i32>)(word[0] | word[1] << 16);
  }
  // Pairs of the numbers of two rows, 32 of each: as 32 words.
  TW_INLINE void store_pairs_of_rows(Word* to, __m512i first, __m512i second) {
    alignas(64) static constexpr u16 kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    store(to, (Vec<i32>)_mm512_permutex2var_epi16(first, low, second));
    store(to + kLanes<i32>, (Vec<i32>)_mm512_permutex2var_epi16(first, high, second));
  }
  static Words<Word> padded(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    constexpr int step = 2 * kLanes<i32>;
    if (col != 1 || rows % 2 != 0 || depth % step != 0) return PairMode::padded(p, row, col, rows, depth, room);
    Word* to = room;
    for (int j = 0; j < rows; j += 2) {
      const u16* from = bits(p) + j * row;
      for (int d = 0; d < depth; d += step, to += step)
        store_pairs_of_rows(to, _mm512_loadu_si512(from + d), _mm512_loadu_si512(from + row + d));
    }
    return {room, depth};
  }
  // P and dS of two keys (p[lanes][key]) and 32 queries: in rows `words` apart, where a word is two neighbouring
  // queries, and dS in pairs of keys.
  TW_INLINE void store_two(Word* p_rows, Word* ds_rows, i64 words, Word* ds_columns, const Vec<float> (&p)[2][2],
                           const Vec<float> (&ds)[2][2]) {
    const auto row = [](Vec<float> a, Vec<float> b)
                         __attribute__((always_inline)) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); };
    store(p_rows, (Vec<i32>)row(p[0][0], p[1][0]));
    store(p_rows + words, (Vec<i32>)row(p[0][1], p[1][1]));
    const __m512i first = row(ds[0][0], ds[1][0]), second = row(ds[0][1], ds[1][1]);
    store(ds_rows, (Vec<i32>)first);
    store(ds_rows + words, (Vec<i32>)second);
    store_pairs_of_rows(ds_columns, first, second);
  }
  // As unpack_transposed, of two columns of the result at once: half as many words to transpose.
  TW_NOINLINE static void unpack(const float* from, int width, int rows, int depth, const float* factor, u64 live,
                                 Bf16* to, i64 row) {
    constexpr int lanes = kLanes<float>;
    for (int i = 0; i < rows; i += lanes) {
      const Vec<float> scale = load(factor + i);
      const auto column = [&](int d) __attribute__((always_inline)) {
        return d < depth ? keep_where<float>(live >> i, load(from + static_cast<i64>(d) * width + i) * scale)
                         : Vec<float>{};
      };
      for (int d = 0; d < depth; d += 2 * lanes) {
        Vec<i32> r[lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) r[x] = PairMode::pair(column(d + 2 * x), column(d + 2 * x + 1));
        transpose<i32>(r);
        const i64 count = depth - d;
        if (i + lanes <= rows && count >= 2 * lanes) {
          TW_UNROLL(16)
          for (int x = 0; x < lanes; x++) store(reinterpret_cast<i32*>(to + (i + x) * row + d), r[x]);
          continue;
        }
        for (int x = 0; x < lanes && i + x < rows; x++)
          std::memcpy(static_cast<void*>(to + (i + x) * row + d), &r[x],
                      static_cast<std::size_t>(min(count, 2 * lanes)) * sizeof(Bf16));
      }
    }
  }
  static void transposed(const Bf16* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    pack_transposed_pairs(bits(p), row, col, rows, depth, width, to);
    const int there = PairMode::words(depth);
    std::memset(to + static_cast<i64>(there) * width, 0,
                static_cast<std::size_t>(words(depth) - there) * static_cast<std::size_t>(width) * sizeof(Word));
  }
};

}  // namespace tilewise::TILEWISE_ISA
