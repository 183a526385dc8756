// How float16 and float32 are computed by matrix tiles (AMX): a float16 is exactly the sum of two bfloat16 pieces, a
// float32 of three.
//
// Why it is arranged so:
// - Of the products of two float32 those three are left out whose indices add up to more than 2: they are below its
//   rounding. Scores of float16 have all four products, so they are as exact as in float32, large ones too. Outputs
//   have three: what the fourth adds is below 2^-16, and an output is rounded to 2^-11.
// - The pieces of a float32 are cut off, so they have its sign. Those of a float16 are rounded: its last piece is
//   smaller then, and so is what the left-out product would add.
// - P and dS of the backward pass are split while they are in registers: along the queries for dV and dK, along the
//   keys for dQ.
// - Long chains of additions lose digits of a float32. So tiles add up the values of a run of keys, those that are
//   packed at once, and vectors add these sums to the output. Row sums are cut alike.
// - An infinity has no pieces: it would meet its own zeros, and inf * 0 is NaN. Its first piece is the number, its
//   others are 0, and vectors compute the sums that it is part of, from the first pieces alone: these sums are infinite
//   or NaN whatever else is in them.
// - Tiles take numbers below 2^-126 for zero, so a float32 below 2^-110 has fewer digits here.
#pragma once

#include "products/piece_gemm.h"
#include "products/tiles.h"

namespace tilewise::TILEWISE_ISA {

template <int kPieces>
struct PiecePairs;
template <>
struct PiecePairs<2> {
  static constexpr PiecePair scores[] = {{0, 1}, {1, 1}, {1, 0}, {0, 0}}, values[] = {{1, 0}, {0, 0}, {0, 1}};
};
template <>
struct PiecePairs<3> {
  static constexpr PiecePair scores[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};
  static constexpr const auto& values = scores;
};

template <class E>
struct PieceMode {
  using Elem = E;
  using Acc = float;
  using Word = i32;
  using Product = PieceGemm;
  using Session = TileMode::Session;
  static constexpr int pieces = sizeof(E) == 2 ? 2 : 3;
  using Pairs = PiecePairs<pieces>;
  static constexpr int per_word = 2;
  static constexpr bool paired = true, coarse = false;
  static constexpr int step = 2, grad_tiles = 1;
  static constexpr int tile_queries = TileMode::tile_queries, query_tiles = TileMode::query_tiles;
  static constexpr bool keeps_references = true;
  static constexpr int kWhole = TileMode::kWhole;
  static constexpr bool sums_in_runs = pieces == 3;  // of packed_keys; vectors add these to the output
  static constexpr int value_keys(int value_dim) { return pieces == 2 ? TileMode::value_keys(value_dim) : 64; }
  static constexpr i64 packed_keys = pieces == 2 ? 1024 : 512;
  static int block_keys(int, int) { return 64; }

  static const E* at(const void* data, i64 offset) { return static_cast<const E*>(data) + offset; }
  static E* at(void* data, i64 offset) { return static_cast<E*>(data) + offset; }

  // ---- probabilities

  // Relative error 3e-6 for float16, 8e-8 for float32. What ends below the normal range is 0, as a session has it.
  TW_INLINE Vec<float> power(Vec<float> x) {
    if constexpr (pieces == 2) {
      const Vec<float> part = (Vec<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
      Vec<float> p = set(1.342668553e-02f);
      p = fused(p, part, set(5.224247220e-02f));
      p = fused(p, part, set(2.412802057e-01f));
      p = fused(p, part, set(6.930448448e-01f));
      p = fused(p, part, set(1.0f));
      return (Vec<float>)_mm512_scalef_ps((__m512)p, (__m512)x);
    } else {
      const Vec<float> part = (Vec<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const Vec<float> p = exp2_minus_one<6>(part) + 1.0f;
      return (Vec<float>)_mm512_scalef_ps((__m512)p, (__m512)(x - part));
    }
  }
  // The upper halves of both, side by side.
  TW_INLINE Vec<i32> uppers(Vec<float> first, Vec<float> second) {
    return (Vec<i32>)_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
  }
  // The first piece of a probability as a number, and the last one, rounded.
  TW_INLINE Vec<float> first_piece(Vec<float> x) {
    return (Vec<float>)((pieces == 2 ? (Vec<u32>)x + 0x8000 : (Vec<u32>)x) & 0xffff0000u);
  }
  TW_INLINE Vec<i32> top_word(Vec<float> first, Vec<float> second) {
    return uppers(first_piece(first), first_piece(second));
  }
  // Words of each piece of two keys' probabilities; returns those of the first.
  TW_INLINE Vec<i32> store_pieces(Vec<float> a, Vec<float> b, Word* to, i64 apart) {
    const Vec<float> a0 = first_piece(a), b0 = first_piece(b);
    const Vec<i32> words = uppers(a0, b0);
    store(to, words);
    a -= a0, b -= b0;
    if constexpr (pieces == 2) {
      store(to + apart, uppers(first_piece(a), first_piece(b)));
    } else {
      const Vec<float> a1 = first_piece(a), b1 = first_piece(b);
      store(to + apart, uppers(a1, b1));
      store(to + 2 * apart, uppers(a - a1, b - b1));
    }
    return words;
  }

  // As in TileMode.
  TW_INLINE Vec<float> reference(Vec<float> before, Vec<float> peak, float factor) {
    const Vec<i32> word = top_word(power((peak - before) * factor), Vec<float>{});
    const Vec<float> none = set(-__builtin_inff());
    return before == none ? peak : word > TileMode::kRoomWord && peak > before ? peak : before;
  }
  using Near = TileMode::Near;
  static bool softmax_kept(const float* s, int width, int count, const float* row_max, float* row_sum, float factor,
                           i32* p, bool last, const Near&, int, i64 apart) {
    auto* const run = width == 2 * kLanes<float> ? &softmax_columns<2> : &softmax_columns<1>;
    return run(s, count, row_max, row_sum, factor, p, last, apart);
  }
  // A row that has seen no key yet has no maximum to subtract.
  TW_INLINE Vec<float> reference_of(const float* row_max) {
    const Vec<float> top = load(row_max);
    return top == set(-__builtin_inff()) ? Vec<float>{} : top;
  }
  template <int kV>
  TW_NOINLINE static bool softmax_columns(const float* s, int count, const float* row_max, float* row_sum, float factor,
                                          i32* p, bool last, i64 apart) {
    constexpr int lanes = kLanes<float>, width = kV * lanes;
    Vec<float> top[kV], sum[kV];
    __m512i most[kV];
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) top[v] = reference_of(row_max + v * lanes), sum[v] = Vec<float>{}, most[v] = __m512i{};
    for (int first = 0; first < count; first += kSubKeys) {
      Vec<float> piece[kV] = {};
      const int end = first + kSubKeys <= count ? first + kSubKeys : count;
      for (int j = first; j < end; j += 2) {
        TW_UNROLL(2)
        for (int v = 0; v < kV; v++) {
          const float* from = s + static_cast<i64>(j) * width + v * lanes;
          const Vec<float> a = power((load(from) - top[v]) * factor);
          const Vec<float> b = j + 1 < end ? power((load(from + width) - top[v]) * factor) : Vec<float>{};
          piece[v] += a + b;
          const Vec<i32> words = store_pieces(a, b, p + static_cast<i64>(j / 2) * width + v * lanes, apart);
          most[v] = _mm512_max_epu16(most[v], (__m512i)words);
        }
      }
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) sum[v] += piece[v];
    }
    u64 grows = 0;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) grows |= _mm512_cmpgt_epu16_mask(most[v], _mm512_set1_epi16(TileMode::kRoomWord));
    if (__builtin_expect(grows != 0, 0) && !last) return false;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) store(row_sum + v * lanes, load(row_sum + v * lanes) + sum[v]);
    return true;
  }
  static bool settled(const float* row_max, int width) { return TileMode::settled(row_max, width); }
  static bool grows(const float* row_max, const float* peak, int width, float factor) {
    return TileMode::grows_by<PieceMode>(row_max, peak, width, factor);
  }
  // `moment`: see RowNumbers, or null. `sum_before`, `out_before`: of keys before those of row_sum and out, or null.
  static void raise(const float* peak, int width, float* row_max, float* row_sum, float factor, float* out,
                    int value_dim, float* moment, float* sum_before, float* out_before) {
    float top[tile_queries], sums[tile_queries];
    for (int i = 0; i < width; i += kLanes<float>) {
      store(top + i, load(row_max + i));
      store(sums + i, load(row_sum + i) + (sum_before == nullptr ? Vec<float>{} : load(sum_before + i)));
    }
    TileMode::raise_by<PieceMode>(peak, width, row_max, row_sum, factor, out, value_dim);
    for (int i = 0; i < width; i += kLanes<float>) {
      const u64 grown = bits_of_mask<i32>((Vec<i32>)(load(row_max + i) != load(top + i)));
      if (grown == 0) continue;
      const Vec<float> change = (load(top + i) - reference_of(row_max + i)) * factor;
      const Vec<float> alpha = select_bits<float>(grown, exp2<5>(change, float{}), set(1.0f));
      if (moment != nullptr) {
        // What was relative to the reference before becomes relative to the one now.
        const Vec<float> moved = (load(moment + i) + vmax(set(kFar<float>), change) * load(sums + i)) * alpha;
        store(moment + i, select_bits<float>(grown, moved, load(moment + i)));
      }
      if (sum_before == nullptr) continue;
      store(sum_before + i, load(sum_before + i) * alpha);
      for (int d = 0; d < value_dim; d++) store(out_before + d * width + i, load(out_before + d * width + i) * alpha);
    }
  }
  // Adds what a block of keys has of the moments.
  TW_NOINLINE static void add_moments(const float* s, int width, int count, const float* row_max, float* moment,
                                      float factor) {
    for (int i = 0; i < width; i += kLanes<float>) {
      const Vec<float> top = reference_of(row_max + i);
      Vec<float> sum{};
      for (int j = 0; j < count; j++) {
        const Vec<float> t = (load(s + j * width + i) - top) * factor;
        sum = fused(power(t), vmax(set(kFar<float>), t), sum);
      }
      store(moment + i, load(moment + i) + sum);
    }
  }
  // Leaves of probabilities those whose bits are set, a u64 for each key.
  TW_NOINLINE static void drop(Word* p, i64 apart, int width, int count, const u64* kept) {
    for (int j = 0; j < count; j += 2) {
      for (int i = 0; i < width; i += kLanes<Word>) {
        const Vec<i32> first = lanes_from_bits<float>(kept[j] >> i);
        const Vec<i32> second = lanes_from_bits<float>(j + 1 < count ? kept[j + 1] >> i : 0);
        const Vec<i32> mask = (first & 0xffff) | (second & -65536);
        for (int y = 0; y < pieces; y++) {
          Word* to = p + y * apart + i64{j / 2} * width + i;
          store(to, load(to) & mask);
        }
      }
    }
  }

  // ---- operands: a plane of words for each piece, then a byte for each row: whether a number of it is not finite

  static int words(int depth) { return TileMode::words(depth); }
  static i64 query_room(i64 queries, int depth) { return pieces * queries * words(depth) + (queries + 3) / 4; }
  static i64 key_room(i64 rows, int depth) { return pieces * rows * words(depth) + (rows + 3) / 4; }
  static i64 rows_room(i64 rows, int depth) {
    return pieces * TileMode::rows_room(rows, depth) + round_up(rows, TileGemm::kSide) / 4;
  }

  // Pieces as numbers; false where one of the numbers is not finite.
  TW_INLINE bool split(Vec<float> x, Vec<float> (&piece)[pieces]) {
    const __mmask16 odd = _mm512_fpclass_ps_mask((__m512)x, 0x99);  // infinite or NaN
    if constexpr (pieces == 2) {
      const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
      piece[0] = (Vec<float>)_mm512_slli_epi32(first, 16);
    } else {
      piece[0] = (Vec<float>)((Vec<u32>)x & 0xffff0000u);
      // A NaN whose upper half is that of an infinity stays one.
      const __mmask16 none = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
      piece[0] = (Vec<float>)_mm512_mask_mov_epi32((__m512i)piece[0], none, _mm512_set1_epi32(0x7fc00000));
    }
    const __mmask16 finite = static_cast<__mmask16>(~odd);
    Vec<float> rest = (Vec<float>)_mm512_maskz_sub_ps(finite, (__m512)x, (__m512)piece[0]);
    for (int y = 1; y + 1 < pieces; y++) {
      piece[y] = (Vec<float>)((Vec<u32>)rest & 0xffff0000u);
      rest -= piece[y];
    }
    piece[pieces - 1] = rest;
    return odd == 0;
  }
  // 32 neighbours as words of pairs, piece by piece; false where one of them is not finite.
  TW_INLINE bool split_pairs(const E* p, i64 col, i64 count, Vec<i32> (&word)[pieces]) {
    Vec<float> low[pieces], high[pieces];
    const bool first = split(widen_strided<float>(p, col, count), low);
    const bool second =
        split(count > kLanes<float> ? widen_strided<float>(p + kLanes<float> * col, col, count - kLanes<float>)
                                    : Vec<float>{},
              high);
    TW_UNROLL(3)
    for (int y = 0; y < pieces; y++) word[y] = upper_halves(low[y], high[y]);
    return first && second;
  }

  static Words<Word> along_depth(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const int whole = words(depth);
    const i64 apart = i64{rows} * whole;
    unsigned char* const odd = reinterpret_cast<unsigned char*>(room + pieces * apart);
    bool any = false;
    for (int j = 0; j < rows; j++) {
      bool finite = true;
      for (int d = 0; d < whole; d += kLanes<i32>) {
        Vec<i32> word[pieces];
        finite &= split_pairs(p + j * row + 2 * d * col, col, depth - 2 * d, word);
        TW_UNROLL(3)
        for (int y = 0; y < pieces; y++) store(room + y * apart + j * whole + d, word[y]);
      }
      odd[j] = !finite;
      any |= !finite;
    }
    return {room, whole, apart, any ? odd : nullptr};
  }
  // Transposed, in pairs of rows, as in TileMode.
  static Words<Word> along_rows(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    constexpr int lanes = kLanes<i32>;
    const i64 stride = TileMode::row_stride(rows), apart = TileMode::rows_room(rows, depth);
    unsigned char* const odd = reinterpret_cast<unsigned char*>(room + pieces * apart);
    bool any = false;
    std::memset(odd, 0, static_cast<std::size_t>(rows));
    for (int j = 0; j < rows; j += 2 * lanes) {
      for (int d = 0; d < depth; d += lanes) {
        Vec<i32> r[pieces][lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) {
          Vec<float> half[2][pieces];
          TW_UNROLL(2)
          for (int z = 0; z < 2; z++) {
            const int at = j + 2 * x + z;
            const bool there = at < rows;
            const bool finite =
                split(there ? widen_strided<float>(p + at * row + d * col, col, depth - d) : Vec<float>{}, half[z]);
            if (__builtin_expect(!finite, 0)) odd[at] = 1, any = true;
          }
          TW_UNROLL(3)
          for (int y = 0; y < pieces; y++) r[y][x] = uppers(half[0][y], half[1][y]);
        }
        TW_UNROLL(3)
        for (int y = 0; y < pieces; y++) {
          transpose<i32>(r[y]);
          TW_UNROLL(16)
          for (int x = 0; x < lanes; x++) store(room + y * apart + (d + x) * stride + j / 2, r[y][x]);
        }
      }
    }
    TileMode::clear_behind(room, rows, depth, pieces, apart);
    return {room, stride, apart, any ? odd : nullptr};
  }
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows / 2; }
  // Queries; `width` of them, a whole number of vectors.
  static Words<Word> transposed(const E* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    constexpr int lanes = kLanes<i32>;
    const int whole = words(depth);
    const i64 apart = i64{whole} * width;
    unsigned char* const odd = reinterpret_cast<unsigned char*>(to + pieces * apart);
    bool any = false;
    std::memset(odd, 0, static_cast<std::size_t>(width));
    for (int i = 0; i < width; i += lanes) {
      for (int d = 0; d < whole; d += lanes) {
        Vec<i32> r[pieces][lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) {
          Vec<i32> word[pieces] = {};
          if (i + x < rows && !split_pairs(p + (i + x) * row + 2 * d * col, col, depth - 2 * d, word))
            odd[i + x] = 1, any = true;
          TW_UNROLL(3)
          for (int y = 0; y < pieces; y++) r[y][x] = word[y];
        }
        TW_UNROLL(3)
        for (int y = 0; y < pieces; y++) {
          transpose<i32>(r[y]);
          TW_UNROLL(16)
          for (int x = 0; x < lanes; x++) store(to + y * apart + i64{d + x} * width + i, r[y][x]);
        }
      }
    }
    return {to, width, apart, any ? odd : nullptr};
  }
  // Rows of queries as the right operand of a product over them: word d of row j / 2 has number d of two rows.
  static i64 padded_stride(int depth) { return round_up(depth, kLanes<float>); }
  static i64 padded_room(i64 rows, int depth) {
    return pieces * ((rows + 1) / 2) * padded_stride(depth) + (rows + 3) / 4;
  }
  static Words<Word> padded(const E* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = padded_stride(depth), apart = (rows + 1) / 2 * stride;
    unsigned char* const odd = reinterpret_cast<unsigned char*>(room + pieces * apart);
    bool any = false;
    for (int j = 0; j < rows; j += 2) {
      const i64 second = j + 1 < rows;
      bool finite = true;
      for (int d = 0; d < depth; d += kLanes<float>) {
        Vec<float> half[2][pieces];
        finite &= split(widen_strided<float>(p + j * row + d * col, col, depth - d), half[0]);
        finite &= split(widen_strided<float>(p + (j + second) * row + d * col, col, second * (depth - d)), half[1]);
        TW_UNROLL(3)
        for (int y = 0; y < pieces; y++) store(room + y * apart + j / 2 * stride + d, uppers(half[0][y], half[1][y]));
      }
      odd[j] = odd[j + second] = !finite;
      any |= !finite;
    }
    return {room, stride, apart, any ? odd : nullptr};
  }
  // P and dS of two keys (p[vector][key]) and some vectors of queries, piece by piece: in rows `words` apart, where
  // a word is two neighbouring queries; and dS in words of both keys too. False where a number is not finite: dS is not
  // where P is not.
  struct Rows {
    Word *p, *ds, *columns;
    i64 words, rows_apart, columns_apart;
  };
  template <int kV>
  TW_INLINE bool store_rows(const Vec<float> (&p)[kV][2], const Vec<float> (&ds)[kV][2], const Rows& to) {
    unsigned odd = 0;
    TW_UNROLL(4)
    for (int v = 0; v < kV; v++)
      odd |= _mm512_fpclass_ps_mask((__m512)ds[v][0], 0x99) | _mm512_fpclass_ps_mask((__m512)ds[v][1], 0x99);
    if (__builtin_expect(odd != 0, 0)) {
      // Copies: whose address is taken is in no register, here or above.
      TW_UNROLL(4)
      for (int v = 0; v < kV; v++) {
        const Vec<float> own_p[2] = {p[v][0], p[v][1]}, own_ds[2] = {ds[v][0], ds[v][1]};
        store_odd(own_p, own_ds, to, v);
      }
      return false;
    }
    TW_UNROLL(2)
    for (int v = 0; v < kV; v += 2) {
      store_pieces_of<kV, false>(p, v, to.p, to);
      store_pieces_of<kV, true>(ds, v, to.ds, to);
    }
    return true;
  }
  // Of vector v and the one behind it, if there is one.
  template <int kV, bool kColumns>
  TW_INLINE void store_pieces_of(const Vec<float> (&x)[kV][2], int v, Word* rows, const Rows& to) {
    constexpr int half = kLanes<float> / 2;
    const bool both = v + 1 < kV;
    Vec<float> rest[2][2] = {{x[v][0], x[v][1]}, {x[both ? v + 1 : v][0], x[both ? v + 1 : v][1]}};
    TW_UNROLL(3)
    for (int y = 0; y < pieces; y++) {
      Vec<float> piece[2][2];
      TW_UNROLL(2)
      for (int u = 0; u < 2; u++) {
        TW_UNROLL(2)
        for (int z = 0; z < 2; z++) {
          piece[u][z] = y + 1 < pieces ? first_piece(rest[u][z]) : rest[u][z];
          rest[u][z] -= piece[u][z];
        }
        if (kColumns && (u == 0 || both))
          store(to.columns + y * to.columns_apart + (v + u) * kLanes<float>, uppers(piece[u][0], piece[u][1]));
      }
      TW_UNROLL(2)
      for (int z = 0; z < 2; z++) {
        Word* row = rows + y * to.rows_apart + z * to.words + v * half;
        const Vec<i32> words = upper_halves(piece[0][z], piece[1][z]);
        if (both)
          store(row, words);
        else
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256((__m512i)words));
      }
    }
  }
  // Of vector v; other pieces of what is not finite are zeros.
  TW_NOINLINE static void store_odd(const Vec<float> (&p)[2], const Vec<float> (&ds)[2], const Rows& to, int v) {
    Vec<float> piece[2][pieces];
    const auto rows = [&](const Vec<float>(&x)[2], Word* row) {
      for (int z = 0; z < 2; z++) {
        split(x[z], piece[z]);
        for (int y = 0; y < pieces; y++)
          _mm256_storeu_si256(
              reinterpret_cast<__m256i*>(row + y * to.rows_apart + z * to.words + v * kLanes<float> / 2),
              _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)piece[z][y], 16)));
      }
    };
    rows(p, to.p);
    rows(ds, to.ds);
    for (int y = 0; y < pieces; y++)
      store(to.columns + y * to.columns_apart + v * kLanes<float>, uppers(piece[0][y], piece[1][y]));
  }
  // Of 32 neighbours.
  TW_INLINE Vec<i32> upper_halves(Vec<float> first, Vec<float> second) {
    alignas(64) static constexpr u16 kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return (Vec<i32>)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(kUpper), (__m512i)second);
  }
  static void unpack(const float* from, int width, int rows, int depth, const float* factor, u64 live, E* to, i64 row) {
    unpack_transposed(from, width, rows, depth, factor, live, to, row);
  }

  // ---- products of the backward pass

  // Scores, or dP.
  static void scores(Words<Word> keys, Words<Word> queries, int count, int width, int words, float* s, Ahead* ahead) {
    typename Product::Pending last;
    Product::template run<Pairs::scores, false>({keys.data, keys.stride, keys.apart, queries.data, queries.stride,
                                                 queries.apart, count, words, width, s, width},
                                                last, ahead);
    Product::flush(last);
    if (keys.odd != nullptr || queries.odd != nullptr) odd_scores(keys, queries, count, width, words, s);
  }
  // An entry of such a product, of each lane from i on, added up in the same order.
  static Vec<float> inner(Words<Word> a, Words<Word> b, int i, int words) {
    Vec<float> sum{};
    for (int d = 0; d < words; d += Product::kStep)
      for (const PiecePair pair : Pairs::scores)
        sum = TileGemm::add_inner(a.data + d * a.stride + i + pair.a * a.apart,
                                  b.data + d * b.stride + i + pair.b * b.apart, a.stride, sum);
    u64 odd = 0;
    for (int x = 0; x < kLanes<float>; x++)
      odd |= u64{(a.odd != nullptr && a.odd[i + x] != 0) || (b.odd != nullptr && b.odd[i + x] != 0)} << x;
    if (odd == 0) return sum;
    Vec<float> first{};
    for (int d = 0; d < words; d++) {
      const Vec<i32> p = load(a.data + d * a.stride + i), q = load(b.data + d * b.stride + i);
      first += low(p) * low(q);
      first += high(p) * high(q);
    }
    return select_bits<float>(odd, first, sum);
  }
  // C += A B. `odd`: whether a number of either is not finite. Tiles multiply its other pieces, which are zeros, by
  // what it meets, so vectors compute what it reaches. `spare`: of twice the size of C. A float32 is added up apart: a
  // chain of additions would have six of them for each pair of tiles.
  static void add_product(const typename Product::Operands& x, bool odd, float* spare, Ahead* ahead) {
    typename Product::Pending last;
    float* const before = spare + i64{x.rows} * x.width;
    if (odd) copy_rows(x.c, x.ldc, before, x.width, x);
    if constexpr (pieces == 2) {
      Product::template run<Pairs::values, true>(x, last, ahead);
      Product::flush(last);
    } else {
      auto apart = x;
      apart.c = spare, apart.ldc = x.width;
      Product::template run<Pairs::values, false>(apart, last, ahead);
      Product::flush(last);
      for (int r = 0; r < x.rows; r++)
        for (int i = 0; i < x.width; i += kLanes<float>)
          store(x.c + r * x.ldc + i, load(x.c + r * x.ldc + i) + load(spare + i64{r} * x.width + i));
    }
    if (odd) add_odd(x, before);
  }
  static void copy_rows(const float* from, i64 stride, float* to, i64 to_stride, const typename Product::Operands& x) {
    for (int r = 0; r < x.rows; r++)
      std::memcpy(to + r * to_stride, from + r * stride, static_cast<std::size_t>(x.width) * sizeof(float));
  }
  TW_NOINLINE static void add_odd(const typename Product::Operands& x, const float* before) {
    for (int r = 0; r < x.rows; r++) {
      for (int i = 0; i < x.width; i += kLanes<float>) {
        const Vec<float> sum = first_pieces(x.a + r * x.lda, x.b + i, x.ldb, x.depth, Vec<float>{});
        const u64 reached = _mm512_fpclass_ps_mask((__m512)sum, 0x99);
        float* to = x.c + r * x.ldc + i;
        store(to, select_bits<float>(reached, load(before + i64{r} * x.width + i) + sum, load(to)));
      }
    }
  }

  // ---- sums that numbers are part of which are not finite

  TW_INLINE Vec<float> low(Vec<i32> word) { return (Vec<float>)(word << 16); }
  TW_INLINE Vec<float> high(Vec<i32> word) { return (Vec<float>)(word & -65536); }

  // The sum over `words` words of a and of columns of b, from the first pieces.
  TW_INLINE Vec<float> first_pieces(const Word* a, const Word* b, i64 stride, int words, Vec<float> sum) {
    for (int d = 0; d < words; d++) {
      const u32 word = static_cast<u32>(a[d]);
      const Vec<i32> other = load(b + d * stride);
      sum += (Vec<float>)set(word << 16) * (Vec<float>)(other << 16);
      sum += (Vec<float>)set(word & 0xffff0000u) * (Vec<float>)(other & -65536);
    }
    return sum;
  }
  // Of keys (rows) and queries (columns) that are marked.
  TW_NOINLINE static void odd_scores(Words<Word> keys, Words<Word> queries, int count, int width, int words, float* s) {
    for (int i = 0; i < width; i += kLanes<float>) {
      u64 odd = 0;
      for (int x = 0; x < kLanes<float> && queries.odd != nullptr; x++) odd |= u64{queries.odd[i + x]} << x;
      for (int j = 0; j < count; j++) {
        const u64 lanes = keys.odd != nullptr && keys.odd[j] != 0 ? 0xffff : odd;
        if (lanes == 0) continue;
        float* to = s + j * width + i;
        const Vec<float> sum = first_pieces(keys.data + j * keys.stride, queries.data + i, width, words, Vec<float>{});
        store(to, select_bits<float>(lanes, sum, load(to)));
      }
    }
  }
  // The columns of values that have such a number among `words` words of keys; false if there are none.
  static constexpr int kColumnWords = kMaxDim / 64;
  static bool odd_columns(Words<Word> values, int count, int value_dim, u64 (&columns)[kColumnWords]) {
    bool any = false;
    for (int j = 0; values.odd != nullptr && j < count; j++) any |= values.odd[j] != 0;
    if (!any) return false;
    for (u64& x : columns) x = 0;
    for (int d = 0; d < value_dim; d++) {
      for (int w = 0; w < (count + 1) / 2; w++) {
        const u32 word = static_cast<u32>(values.data[d * values.stride + w]);
        if ((word & 0x7f80) == 0x7f80 || (word & 0x7f800000) == 0x7f800000) columns[d / 64] |= u64{1} << d % 64;
      }
    }
    return true;
  }
};

}  // namespace tilewise::TILEWISE_ISA
