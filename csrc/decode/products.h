// The two products of few rows. Keys and values are found through one pointer per key, so that they may lie anywhere,
// and the lanes are along the width of a head: what is loaded is used for all rows that share the key. What a row gets
// does not depend on the rows beside it.
#pragma once

#include "decode/ahead.h"
#include "decode/rows.h"
#include "products/modes.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

// ---- vectors to their sums or largest elements, one per lane

struct Sum {
  template <class V>
  TW_INLINE V of(V a, V b) {
    return a + b;
  }
};
struct Largest {
  TW_INLINE Vec<float> of(Vec<float> a, Vec<float> b) { return vmax(a, b); }
  TW_INLINE Vec<double> of(Vec<double> a, Vec<double> b) { return vmax(a, b); }
};

// Of each `domain` lanes of a, and then of b, the chunks at even places, or those at odd ones.
template <int kChunk, int kDomain, bool kOdd, class V, int... I>
TW_INLINE V every_second(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I), half = kDomain / 2;
  return __builtin_shufflevector(
      a, b, (I / kDomain * kDomain + (I % half / kChunk * 2 + kOdd) * kChunk + I % kChunk + I % kDomain / half * n)...);
}

// The lanes of r[i] folded into lane i of the result; neighbours first, whatever i is. Within 16 bytes as long as there
// are neighbours there: shuffles that stay there take half as long.
template <class Fold, class T, int kWidth = 1>  // lanes that are folded already
TW_INLINE Vec<T> fold_lanes(Vec<T>* r) {
  constexpr int n = kLanes<T>, near = 16 / sizeof(T);
  if constexpr (kWidth == n) {
    return r[0];
  } else {
    constexpr int chunk = kWidth < near ? 1 : near, domain = kWidth < near ? near : n;
    using Order = std::make_integer_sequence<int, n>;
    using Words = Vec<std::conditional_t<sizeof(T) == 4, float, T>>;  // GCC 12 takes a slower shuffle for integers
    TW_UNROLL(8)
    for (int i = 0; i < n / kWidth / 2; i++) {
      const Words a = (Words)r[2 * i], b = (Words)r[2 * i + 1];
      r[i] = Fold::of((Vec<T>)every_second<chunk, domain, false>(a, b, Order{}),
                      (Vec<T>)every_second<chunk, domain, true>(a, b, Order{}));
    }
    return fold_lanes<Fold, T, 2 * kWidth>(r);
  }
}

// The lanes of one vector, to the bit as fold_lanes has them.
template <int kStep, class V, int... I>
TW_INLINE V neighbours(V v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ kStep)...);
}
template <class Fold, class T, int kStep = 1>
TW_INLINE T fold_vector(Vec<T> v) {
  constexpr int n = kLanes<T>;
  v = Fold::of(v, neighbours<kStep>(v, std::make_integer_sequence<int, n>{}));
  if constexpr (2 * kStep < n)
    return fold_vector<Fold, T, 2 * kStep>(v);
  else
    return v[0];
}

// to[r] = f(r) folded over its lanes.
template <class Fold, class C, class F>
static void each_fold(int rows, C* to, const F& f) {
  constexpr int lanes = kLanes<C>;
  if (rows == 1) {
    to[0] = fold_vector<Fold, C>(f(0));
    return;
  }
  for (int r = 0; r < rows; r += lanes) {
    Vec<C> vectors[lanes] = {};
    for (int i = 0; i < lanes && r + i < rows; i++) vectors[i] = f(r + i);
    const Vec<C> all = fold_lanes<Fold, C>(vectors);
    for (int i = 0; i < lanes && r + i < rows; i++) to[r + i] = all[i];
  }
}

// ---- rows of operands

// Vectors of a row of keys, as the dot product takes them, and of rows of values, as the weighted sum does: `unit` of
// them belong together.
template <class Mode>
struct RowVectors {
  using Elem = typename Mode::Elem;
  using Key = Elem;  // of keys and values
  using Acc = typename Mode::Acc;
  static constexpr int unit = 1, step = kLanes<Acc>;  // step: elements of a unit
  static constexpr int sums = 1;                      // accumulators of a unit of values
  static constexpr int together = 1;                  // rows of values that are widened at once

  // The first `count` elements from p on, zeros behind them.
  TW_INLINE void of_key(const Elem* p, i64 count, Vec<Acc>* to) { to[0] = widen(p, count); }
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<Acc>* to) {
    to[0] = widen(rows[j] + column, count);
  }
  TW_INLINE void in_order(Vec<Acc>*) {}
  // A row of probabilities as the weighted sum reads it, in place.
  static void weights(Acc*, int) {}
  // Rows of queries, zeros behind them up to `stride` words.
  static void pack(const Elem* from, i64 row, i64 col, int rows, int depth, i64 stride, Acc* to) {
    pack_rows(from, row, col, rows, depth, stride, to);
  }
};

TW_INLINE Vec<u32> words_of(const Bf16* p, i64 count) {
  Vec<u32> words{};
  if (count >= 2 * kLanes<u32>) {
    std::memcpy(&words, p, sizeof words);
  } else if (count > 0) {
#if TILEWISE_VECTOR_BYTES == 64
    words = (Vec<u32>)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
#else
    std::memcpy(&words, p, static_cast<std::size_t>(count) * 2);
#endif
  }
  return words;
}

// bfloat16 as float: a word holds one of an even place, to be shifted, and one of an odd place, to be masked.
template <>
struct RowVectors<PlainMode<Bf16, float>> {
  using Key = Bf16;
  static constexpr int unit = 2, step = 2 * kLanes<float>, sums = 2, together = 1;

  TW_INLINE void of_key(const Bf16* p, i64 count, Vec<float>* to) {
    const Vec<u32> words = words_of(p, count);
    to[0] = (Vec<float>)(words << 16);
    to[1] = (Vec<float>)(words & 0xffff0000u);
  }
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<float>* to) {
    of_key(rows[j] + column, count, to);
  }
  TW_INLINE void in_order(Vec<float>* sums) { turn(sums, std::make_integer_sequence<int, kLanes<float>>{}); }
  static void weights(float*, int) {}
  static void pack(const Bf16* from, i64 row, i64 col, int rows, int depth, i64 stride, float* to) {
    for (int i = 0; i < rows; i++) {
      float* at = to + i * stride;
      if (col == 1) {
        for (i64 d = 0; d < stride; d += step) {
          Vec<float> x[unit];
          of_key(from + i * row + d, depth - d, x);
          store(at + d, x[0]);
          store(at + d + kLanes<float>, x[1]);
        }
        continue;
      }
      for (i64 d = 0; d < stride; d++) {
        const i64 place = d % step, source = d - place + place % kLanes<float> * 2 + place / kLanes<float>;
        at[d] = source < depth ? widen_one(from + i * row + source * col) : 0;
      }
    }
  }

 private:
  template <int... I>
  TW_INLINE void turn(Vec<float>* sums, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    const Vec<float> even = sums[0], odd = sums[1];
    sums[0] = __builtin_shufflevector(even, odd, (I / 2 + I % 2 * n)...);
    sums[1] = __builtin_shufflevector(even, odd, (n / 2 + I / 2 + I % 2 * n)...);
  }
};

#if defined(TW_PAIRS)
template <>
struct RowVectors<PairMode> {
  using Key = Bf16;
  static constexpr int unit = 1, step = 2 * kLanes<float>, sums = 2, together = 1;

  TW_INLINE void of_key(const Bf16* p, i64 count, Vec<i32>* to) { to[0] = (Vec<i32>)words_of(p, count); }
  // Two rows, interleaved within each 16 bytes of a vector: the sums of a longer one come out of order.
  template <class Rows>
  TW_INLINE void of_values(const Rows& rows, int j, i64 column, i64 count, Vec<i32>* to) {
    const Vec<u32> a = words_of(rows[j] + column, count), b = words_of(rows[j + 1] + column, count);
#if defined(__AVX512BF16__)
    to[0] = (Vec<i32>)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    to[1] = (Vec<i32>)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
    to[0] = (Vec<i32>)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
    to[1] = (Vec<i32>)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
  }
#if defined(__AVX512BF16__)
  TW_INLINE void in_order(Vec<float>* sums) {
    alignas(64) static constexpr i32 first[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    alignas(64) static constexpr i32 second[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const __m512 low = (__m512)sums[0], high = (__m512)sums[1];
    sums[0] = (Vec<float>)_mm512_permutex2var_ps(low, _mm512_load_si512(first), high);
    sums[1] = (Vec<float>)_mm512_permutex2var_ps(low, _mm512_load_si512(second), high);
  }
#else
  TW_INLINE void in_order(Vec<float>*) {}
#endif
  static void pack(const Bf16* from, i64 row, i64 col, int rows, int depth, i64 stride, i32* to) {
    pack_rows_pairs(PairMode::bits(from), row, col, rows, depth, stride, to);
  }
  static void weights(float* p, int count) {
    constexpr int lanes = kLanes<float>;
    for (int j = 0; j < count; j += step) {
      const Vec<float> first = load(p + j), second = j + lanes < count ? load(p + j + lanes) : Vec<float>{};
#if defined(__AVX512BF16__)
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
      const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
#endif
      std::memcpy(reinterpret_cast<i32*>(p) + j / 2, &both, sizeof both);
    }
  }
};
#endif

// ---- the products

// Whether products are summed in integers: see decode/integers.h.
template <class Mode>
constexpr bool kIntegers = !std::is_same_v<typename Mode::Dot::Acc, typename Mode::Acc>;

// Words of a packed row of queries.
template <class Mode, class Product>
static i64 row_words(int depth) {
  using Vectors = typename Product::Vectors;
  const i64 words = round_up(Mode::words(depth), Vectors::unit * kLanes<typename Mode::Word>);
  if constexpr (kIntegers<Mode>)
    return 2 * words + Vectors::about;
  else
    return words;
}

template <class Mode>
class FewRows {
  using Word = typename Mode::Word;
  using Acc = typename Mode::Acc;
  using Dot = typename Mode::Dot;
  using Total = typename Dot::Acc;
  using Rows = RowVectors<Mode>;
  using Key = typename Rows::Key;
  static constexpr bool integers = kIntegers<Mode>;
  static constexpr int lanes = kLanes<Acc>;
  static constexpr bool many = kVectorBytes == 64;  // registers
  // Products of one row that are summed over the lanes together.
  static constexpr int kDots = many ? 16 : 8;
  static constexpr bool narrow = sizeof(Key) == 1;
  // Keys in 8 bits are widened for as many rows as can be; to integers it takes one instruction.
  static constexpr int kDotRows = narrow && !integers ? 8 : many ? 4 : 2, kSumRows = many ? 8 : 4;
  static constexpr int kTogether = Rows::together;
  // Vectors of one row's sum in registers: half of them, or a quarter of many.
  template <int kR>
  static constexpr int kMost = kR >= 8            ? 2
                               : kR == 4          ? (many ? 4 : 2)
                               : kR == 2 && !many ? 4
                                                  : 8;

 public:
  using Vectors = RowVectors<Mode>;
  static constexpr i64 alone = narrow ? 0 : 1;  // queries of a head that RowsAlone takes
  // The most rows that read a Stream. More rows read values in pieces of their width, where it took longer.
  static constexpr i64 streaming = many && !narrow && Mode::per_word == 1 ? 2 : 0;

  // What the products keep of the queries of a task: nothing but their rows.
  struct Room {
    Room() = default;
    Room(Carver&, i64, int) {}
    void open(const Word*, i64, int, int) const {}
    void close() const {}
  };

  // s[r * stride + j] = q[r] . key j, for `keys` keys, a multiple of kSubKeys.
  static void dots(const Room&, const Word* q, i64 q_stride, int row0, int rows, const Key* const* keys, int count,
                   int depth, Acc* s, i64 stride, RowsAhead& ahead) {
    static_assert(kSubKeys % kDots == 0);
    ahead.spread((ahead.left() + 1) / 2, count / kDots * rows);  // dot_rows<R> takes kSubKeys R / kDots steps
    q += row0 * q_stride;
    bool second = false;
    if constexpr (integers)
      for (int r = 0; r < rows; r++) second |= Rows::has_second(q + r * q_stride, q_stride);
    for (int j = 0; j < count; j += kSubKeys) {
      dots_piece(q, q_stride, rows, keys + j, depth, s + j, stride, ahead);
      if constexpr (integers)
        if (second) add_second(q, q_stride, rows, keys + j, depth, s + j, stride, ahead);
    }
  }

  // The same of one or two rows, from a Stream.
  static void dots(const Word* q, i64 q_stride, int rows, const Stream<Key>& keys, int count, int depth, Acc* s,
                   i64 stride) {
    rows == 1 ? stream_dots<1>(q, q_stride, keys, count, depth, s, stride)
              : stream_dots<2>(q, q_stride, keys, count, depth, s, stride);
  }

  // The same of one row.
  template <class Keys>
  TW_NOINLINE static void dot_row(const Room&, const Word* q, const Keys& keys, int count, int depth, Acc* s) {
    for (int j = 0; j < count; j += kDots) dot_block<1, kDots>(q, 0, keys.from(j), depth, s + j, 0);
  }

  // out[r] = alpha[r] * out[r] + the sum over `keys` of p[r * kRoomKeys + j] * value j. Of an odd number of keys the
  // pair's other half is a row of zeros.
  static void sums(const Room&, const Word* p, int rows, const Key* const* values, int keys, int width, Acc* out,
                   i64 out_stride, const Acc* alpha, RowsAhead& ahead) {
    const int steps = (keys + Mode::per_word - 1) / Mode::per_word;
    const int wide = lanes * (rows >= kSumRows ? kMost<kSumRows>
                              : rows >= 4      ? kMost<4>
                              : rows > 1       ? kMost<2>
                                               : kMost<1>);
    ahead.spread(ahead.left(), steps * ((rows + kSumRows - 1) / kSumRows) * ((width + wide - 1) / wide));
    int r = 0;
    const auto of_rows = [&](auto count) {
      constexpr int kR = decltype(count)::value;
      for (; r + kR <= rows; r += kR)
        sum_rows<kR>(p + r * kRoomKeys, RowPointers<Key>{values}, steps, width, out + r * out_stride, out_stride,
                     alpha + r, ahead);
    };
    if constexpr (kSumRows == 8) of_rows(Int<8>{});
    of_rows(Int<4>{});
    of_rows(Int<2>{});
    of_rows(Int<1>{});
    ahead.all();
  }
  static void sums(const Word* p, int rows, const Stream<Key>& values, int keys, int width, Acc* out, i64 out_stride,
                   const Acc* alpha) {
    NothingAhead ahead;
    rows == 1 ? sum_rows<1>(p, values, keys, width, out, out_stride, alpha, ahead)
              : sum_rows<2>(p, values, keys, width, out, out_stride, alpha, ahead);
  }
  template <class Values>
  static void sum_row(const Word* p, const Values& values, int keys, int width, Acc* out, Acc alpha) {
    NothingAhead ahead;
    sum_rows<1>(p, values, (keys + Mode::per_word - 1) / Mode::per_word, width, out, 0, &alpha, ahead);
  }

 private:
  TW_INLINE Vec<Acc> number(Vec<Total> x) {
    if constexpr (integers)
      return __builtin_convertvector(x, Vec<Acc>);
    else
      return x;
  }

  // What the second integers of some rows add. They count for such a row alone: no row changes another's bits.
  TW_NOINLINE static void add_second(const Word* q, i64 q_stride, int rows, const Key* const* keys, int depth, Acc* s,
                                     i64 stride, RowsAhead& ahead) {
    alignas(kVectorBytes) Acc more[kTileQueries * kSubKeys];
    dots_piece(q + Rows::second(q_stride), q_stride, rows, keys, depth, more, kSubKeys, ahead);
    for (int r = 0; r < rows; r++) {
      if (!Rows::has_second(q + r * q_stride, q_stride)) continue;
      for (int x = 0; x < kSubKeys; x += lanes) {
        Acc* at = s + r * stride + x;
        store(at, fused(load(more + r * kSubKeys + x), set(Rows::second_unit), load(at)));
      }
    }
  }

  TW_NOINLINE static void dots_piece(const Word* q, i64 q_stride, int rows, const Key* const* keys, int depth, Acc* s,
                                     i64 stride, RowsAhead& ahead) {
    const RowPointers<Key> pointers{keys};
    int r = 0;
    for (; r + kDotRows <= rows; r += kDotRows)
      dot_rows<kDotRows>(q + r * q_stride, q_stride, pointers, depth, s + r * stride, stride, ahead);
    if constexpr (kDotRows > 4)
      for (; r + 4 <= rows; r += 4)
        dot_rows<4>(q + r * q_stride, q_stride, pointers, depth, s + r * stride, stride, ahead);
    if constexpr (kDotRows > 2)
      for (; r + 2 <= rows; r += 2)
        dot_rows<2>(q + r * q_stride, q_stride, pointers, depth, s + r * stride, stride, ahead);
    for (; r < rows; r++) dot_rows<1>(q + r * q_stride, q_stride, pointers, depth, s + r * stride, stride, ahead);
  }

  template <int kR>
  TW_NOINLINE static void stream_dots(const Word* q, i64 q_stride, const Stream<Key>& keys, int count, int depth,
                                      Acc* s, i64 stride) {
    NothingAhead ahead;
    for (int j = 0; j < count; j += kSubKeys) dot_rows<kR>(q, q_stride, keys.from(j), depth, s + j, stride, ahead);
  }

  template <int kR, class Keys, class Ahead>
  TW_INLINE void dot_rows(const Word* q, i64 q_stride, const Keys& keys, int depth, Acc* s, i64 stride, Ahead& ahead) {
    constexpr int kK = kDots / kR;
    for (int j = 0; j < kSubKeys; j += kK) {
      ahead.step();
      dot_block<kR, kK>(q, q_stride, keys.from(j), depth, s + j, stride);
    }
  }

  template <int kR, int kK, class Keys>
  TW_INLINE void dot_block(const Word* q, i64 q_stride, const Keys& keys, int depth, Acc* s, i64 stride) {
    Vec<Total> acc[kR * kK] = {};
    const auto step = [&](int d, i64 count) {
      constexpr int kU = Rows::unit;
      if constexpr (kR > kK) {  // there are registers for the fewer, the keys
        Vec<Word> key[kK][kU];
        TW_UNROLL(4)
        for (int j = 0; j < kK; j++) Rows::of_key(keys[j] + d, count, key[j]);
        TW_UNROLL(8)
        for (int r = 0; r < kR; r++) {
          TW_UNROLL(4)
          for (int u = 0; u < kU; u++) {
            const Vec<Word> row = load(q + r * q_stride + d / Mode::per_word + u * kLanes<Word>);
            TW_UNROLL(4)
            for (int j = 0; j < kK; j++) acc[r * kK + j] = Dot::multiply_add(acc[r * kK + j], row, key[j][u]);
          }
        }
        return;
      }
      Vec<Word> row[kR][kU];
      TW_UNROLL(8)
      for (int r = 0; r < kR; r++)
        for (int u = 0; u < kU; u++) row[r][u] = load(q + r * q_stride + d / Mode::per_word + u * kLanes<Word>);
      TW_UNROLL(16)
      for (int j = 0; j < kK; j++) {
        Vec<Word> key[kU];
        Rows::of_key(keys[j] + d, count, key);
        keys.fetch(j, d);
        TW_UNROLL(4)
        for (int r = 0; r < kR; r++)
          for (int u = 0; u < kU; u++) acc[r * kK + j] = Dot::multiply_add(acc[r * kK + j], row[r][u], key[u]);
      }
    };
    int d = 0;
    for (; d + Rows::step <= depth; d += Rows::step) step(d, Rows::step);
    if (d < depth) step(d, depth - d);
    TW_UNROLL(16)
    for (int x = 0; x < kR * kK; x += lanes) {
      const Vec<Acc> sums = number(fold_lanes<Sum, Total>(acc + x));
      if constexpr (kK >= lanes) {
        store(s + x / kK * stride + x % kK, sums);
      } else {
        TW_UNROLL(4)
        for (int r = 0; r < lanes / kK; r++)
          std::memcpy(s + (x / kK + r) * stride, reinterpret_cast<const Acc*>(&sums) + r * kK, kK * sizeof(Acc));
      }
    }
  }

  template <int kR, class Values, class Ahead>
  TW_NOINLINE static void sum_rows(const Word* p, const Values& values, int steps, int width, Acc* out, i64 out_stride,
                                   const Acc* alpha, Ahead& ahead) {
    int column = 0;
    const auto of_columns = [&](auto count) {
      constexpr int kV = decltype(count)::value;
      if constexpr (kV <= kMost<kR> && kV >= Rows::sums)
        for (; column + kV * lanes <= width; column += kV * lanes)
          sum_block<kR, kV, false>(p, values, steps, column, 0, out + column, out_stride, alpha, ahead);
    };
    of_columns(Int<8>{});
    of_columns(Int<4>{});
    of_columns(Int<2>{});
    of_columns(Int<1>{});
    if (column < width)
      sum_block<kR, Rows::sums, true>(p, values, steps, column, width - column, out + column, out_stride, alpha, ahead);
  }

  template <int kR, int kV>
  using Block = Vec<Total>[kR][kV];

  template <int kR, int kV, bool kTail, class Values, class Ahead>
  TW_INLINE void sum_piece(const Word* p, const Values& values, int from, int to, i64 column, i64 count, Ahead& ahead,
                           Block<kR, kV>& acc) {
    TW_UNROLL(2)
    for (int j = from; j < to; j += kTogether) {
      Vec<Word> x[kTogether][kV];
      TW_UNROLL(2)
      for (int t = 0; t < kTogether; t++) ahead.step();
      TW_UNROLL(8)
      for (int v = 0; v < kV; v += Rows::sums) {
        const i64 at = column + v * lanes, here = kTail ? count : 1 << 20;
        if constexpr (kTogether == 2)
          Rows::of_two_values(values, j, at, here, x[0] + v, x[1] + v);
        else
          Rows::of_values(values, j * Mode::per_word, at, here, x[0] + v);
        values.fetch(j * Mode::per_word, at);
      }
      TW_UNROLL(8)
      for (int r = 0; r < kR; r++) {
        TW_UNROLL(2)
        for (int t = 0; t < kTogether; t++) {
          const auto weight = Dot::broadcast(p[r * kRoomKeys + j + t]);
          TW_UNROLL(8)
          for (int v = 0; v < kV; v++) acc[r][v] = Dot::multiply_add(acc[r][v], weight, x[t][v]);
        }
      }
    }
  }

  // `count`: how many columns there are where that is less than kV vectors.
  template <int kR, int kV, bool kTail, class Values, class Ahead>
  TW_INLINE void sum_block(const Word* p, const Values& values, int steps, i64 column, i64 count, Acc* out,
                           i64 out_stride, const Acc* alpha, Ahead& ahead) {
    Block<kR, kV> acc = {};
    // Floats are summed in pieces where chains are short; sums of integers are exact.
    constexpr bool pieces = kChain < 1 << 10 && !integers;
    sum_piece<kR, kV, kTail>(p, values, 0, pieces && steps > kChain ? kChain : steps, column, count, ahead, acc);
    if constexpr (pieces) {
      for (int from = kChain; from < steps; from += kChain) {
        Block<kR, kV> piece = {};
        sum_piece<kR, kV, kTail>(p, values, from, from + kChain < steps ? from + kChain : steps, column, count, ahead,
                                 piece);
        for (int r = 0; r < kR; r++)
          for (int v = 0; v < kV; v++) acc[r][v] += piece[r][v];
      }
    }
    TW_UNROLL(8)
    for (int r = 0; r < kR; r++) {
      TW_UNROLL(8)
      for (int v = 0; v < kV; v += Rows::sums) {
        Vec<Acc> sums[Rows::sums];
        for (int x = 0; x < Rows::sums; x++) {
          sums[x] = number(acc[r][v + x]);
          if constexpr (integers) sums[x] *= Rows::weight_factor(p + r * kRoomKeys);
        }
        Rows::in_order(sums);
        for (int x = 0; x < Rows::sums; x++) {
          Acc* to = out + r * out_stride + (v + x) * lanes;
          store(to, fused(load(to), set(alpha[r]), sums[x]));
        }
      }
    }
  }
};

}  // namespace tilewise::TILEWISE_ISA
