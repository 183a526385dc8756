// How bfloat16 is computed by matrix tiles (AMX): the layouts of the paired mode with rows of whole tiles, and a
// softmax that keeps references.
#pragma once

#include "products/tile_gemm.h"

namespace tilewise::TILEWISE_ISA {

struct TileMode : PairMode {
  using Product = TileGemm;
  static constexpr int kWhole = 32;  // numbers of a row of a tile
  // Half as many queries at a time: their scores stay in the nearest cache.
  static constexpr int tile_queries = 32, query_tiles = 16;

  // Its registers' shapes, all alike, while a thread has tasks.
  struct Session {
    Session() {
      TileShapes shapes;
      for (int tile = 0; tile < 8; tile++) shapes.set(tile, TileGemm::kSide, 64);
      shapes.use();
    }
    ~Session() { release_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // A row's reference grows where a score is more than this above it, in base-2 units. Probabilities up to 2^8 have as
  // many digits as those up to 1, and the sums of values are seldom scaled anew.
  static constexpr float kRoom = 8;
  TW_INLINE Vec<float> reference(Vec<float> before, Vec<float> peak, float factor) {
    return (peak - before) * factor > kRoom ? peak : before;
  }
  // Most blocks leave all references as they are. Then nothing waits for the largest score: probabilities are made from
  // the scores as they come, to a place of their own, and thrown away where a row's reference has to grow after all.
  // The sums are those of the ordinary softmax to the bit.
  static constexpr bool keeps_references = true;
  TW_NOINLINE static bool softmax_kept(const float* s, int width, int count, const float* row_max, float* row_sum,
                                       float factor, i32* p, const float* out, int value_dim) {
    return width == 2 * kLanes<float> ? softmax_kept<2>(s, count, row_max, row_sum, factor, p, out, value_dim)
                                      : softmax_kept<1>(s, count, row_max, row_sum, factor, p, out, value_dim);
  }
  template <int kV>
  TW_INLINE bool outgrown(const Vec<float> (&most)[kV]) {
    u64 grows = 0;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) grows |= bits_of_mask<i32>((Vec<i32>)(most[v] > kRoom));
    return grows != 0;
  }
  template <int kV>
  TW_INLINE bool softmax_kept(const float* s, int count, const float* row_max, float* row_sum, float factor, i32* p,
                              const float* out, int value_dim) {
    constexpr int lanes = kLanes<float>, width = kV * lanes;
    Vec<float> top[kV], sum[kV], most[kV];
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) top[v] = load(row_max + v * lanes), sum[v] = most[v] = Vec<float>{};
    // The sums of values that these probabilities are for come nearer meanwhile.
    const int lines = kV * value_dim / max(count / 2, 1);
    const float* near = out;
    for (int first = 0; first < count; first += kSubKeys) {
      Vec<float> piece[kV] = {};
      const int whole = count - first >= kSubKeys ? kSubKeys : (count - first) / 2 * 2;
      for (int j = first; j < first + whole; j += 2) {
        for (int x = 0; x < lines; x++, near += kLanes<float>) __builtin_prefetch(near, 1, 3);
        TW_UNROLL(2)
        for (int v = 0; v < kV; v++) {
          const float* from = s + j * width + v * lanes;
          const Vec<float> x = (load(from) - top[v]) * factor, y = (load(from + width) - top[v]) * factor;
          most[v] = vmax(y, vmax(x, most[v]));
          const Vec<float> a = power(x), b = power(y);
          piece[v] += a + b;
          store(p + j / 2 * width + v * lanes, pair(a, b));
        }
      }
      TW_UNROLL(2)
      for (int v = 0; v < kV; v++) {
        if (whole < kSubKeys && count % 2 != 0) {
          const Vec<float> x = (load(s + (count - 1) * width + v * lanes) - top[v]) * factor, a = power(x);
          most[v] = vmax(x, most[v]);
          piece[v] += a;
          store(p + count / 2 * width + v * lanes, pair(a, Vec<float>{}));
        }
        sum[v] += piece[v];
      }
    }
    if (__builtin_expect(outgrown(most), 0)) return false;
    TW_UNROLL(2)
    for (int v = 0; v < kV; v++) store(row_sum + v * lanes, load(row_sum + v * lanes) + sum[v]);
    return true;
  }
  // Three steps of three blocks at once, where tiles and vectors take turns: the scores of one, the softmax of the one
  // before (as softmax_kept), the values of the one before that. All blocks have as many keys.
  struct Fused {
    const i32* keys;
    i64 key_stride;
    const i32* q;
    float* made;     // the scores that are made
    const float* s;  // those that become probabilities
    const float* row_max;
    float* row_sum;
    float factor;
    i32* p;
    const i32* values;
    i64 value_stride;
    const i32* before;  // the probabilities that are used
    float* out;
  };
  // False, and nothing done, for shapes that have no such step. `kept`: as softmax_kept has it; scores and sums of
  // values are made in any case.
  static bool fused_step(int head_dim, int value_dim, int count, int width, const Fused& x, bool& kept) {
    if (width != 2 * kLanes<float> || head_dim != value_dim) return false;
    if (head_dim == 64 && count == 64) return kept = fused_step<64, 64>(x), true;
    if (head_dim == 128 && count == 128) return kept = fused_step<128, 128>(x), true;
    return false;
  }
  template <int kDepth, int kKeys>
  TW_NOINLINE static bool fused_step(const Fused& x) {
    constexpr int lanes = kLanes<float>, side = TileGemm::kSide, kScoreSteps = kDepth / kWhole;
    constexpr int kValueSteps = kKeys / kWhole;
    // A block of 2 x 2 tiles goes with 16 keys, two by two, of the softmax.
    constexpr int kPairs = kSubKeys / 2, kPerStep = kPairs / kScoreSteps;
    static_assert(kScoreSteps == kValueSteps && kPairs % kScoreSteps == 0 && kKeys == kDepth);
    const Vec<float> top[2] = {load(x.row_max), load(x.row_max + lanes)};
    const float factor = x.factor;
    Vec<float> sum[2] = {}, most[2] = {}, piece[2] = {};
    const float* s = x.s;
    i32* p = x.p;
    const auto soften = [&](int turn) __attribute__((always_inline)) {  // the share of a product, of four to a step
      constexpr int each = kPerStep > 3 ? kPerStep / 4 : 1;
      if (kPerStep < 4 && turn % (4 / kPerStep) != 4 / kPerStep - 1) return;
      TW_UNROLL(4)
      for (int i = 0; i < each; i++, s += 4 * lanes, p += 2 * lanes) {
        TW_UNROLL(2)
        for (int v = 0; v < 2; v++) {
          const Vec<float> a = (load(s + v * lanes) - top[v]) * factor,
                           b = (load(s + (2 + v) * lanes) - top[v]) * factor;
          most[v] = vmax(b, vmax(a, most[v]));
          const Vec<float> first = power(a), second = power(b);
          piece[v] += first + second;
          store(p + v * lanes, pair(first, second));
        }
      }
    };
    const auto add_piece = [&]() __attribute__((always_inline)) {
      TW_UNROLL(2)
      for (int v = 0; v < 2; v++) sum[v] += piece[v], piece[v] = Vec<float>{};
    };
    const auto multiply = [&](const i32* a, i64 a_stride, const i32* b) __attribute__((always_inline)) {
      constexpr i64 b_row = 2 * lanes * 4;
      load_tile<6>(b, b_row);
      load_tile<4>(a, a_stride * 4);
      multiply_tiles<0, 4, 6>();
      soften(0);
      load_tile<7>(b + side, b_row);
      multiply_tiles<1, 4, 7>();
      soften(1);
      load_tile<5>(a + side * a_stride, a_stride * 4);
      multiply_tiles<2, 5, 6>();
      soften(2);
      multiply_tiles<3, 5, 7>();
      soften(3);
    };
    const auto store_block = [&](float* c) __attribute__((always_inline)) {
      constexpr i64 row = 2 * lanes * 4;
      store_tile<0>(c, row);
      store_tile<1>(c + side, row);
      store_tile<2>(c + 2 * side * side, row);
      store_tile<3>(c + 2 * side * side + side, row);
    };
    for (int n = 0; n < kKeys; n += 2 * side) {
      clear_tile<0>();
      clear_tile<1>();
      clear_tile<2>();
      clear_tile<3>();
      TW_UNROLL(4)
      for (int k = 0; k < kScoreSteps; k++)
        multiply(x.keys + n * x.key_stride + k * side, x.key_stride, x.q + k * side * 2 * lanes);
      store_block(x.made + n * 2 * lanes);
      add_piece();
    }
    for (int d = 0; d < kDepth; d += 2 * side) {
      float* c = x.out + d * 2 * lanes;
      constexpr i64 row = 2 * lanes * 4;
      load_tile<0>(c, row);
      load_tile<1>(c + side, row);
      load_tile<2>(c + 2 * side * side, row);
      load_tile<3>(c + 2 * side * side + side, row);
      TW_UNROLL(4)
      for (int k = 0; k < kValueSteps; k++)
        multiply(x.values + d * x.value_stride + k * side, x.value_stride, x.before + k * side * 2 * lanes);
      store_block(c);
      add_piece();
    }
    if (__builtin_expect(outgrown(most), 0)) return false;
    TW_UNROLL(2)
    for (int v = 0; v < 2; v++) store(x.row_sum + v * lanes, load(x.row_sum + v * lanes) + sum[v]);
    return true;
  }

  // Whether every row has a reference.
  static bool settled(const float* row_max, int width) {
    u64 none = 0;
    for (int i = 0; i < width; i += kLanes<float>)
      none |= bits_of_mask<i32>((Vec<i32>)(load(row_max + i) == -__builtin_inff()));
    return none == 0;
  }

  static constexpr i64 packed_keys = 2048;
  static int block_keys(int head_dim, int value_dim) { return head_dim <= 64 && value_dim <= 64 ? 64 : kBlockKeys; }

  // 2^x from its whole part down: the scaling instruction takes that by itself. Relative error 9e-5, 7e-6 on average.
  TW_INLINE Vec<float> power(Vec<float> x) {
    const Vec<float> part = (Vec<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec<float> p = set(7.706724107e-02f);
    p = fused(p, part, set(2.276449800e-01f));
    p = fused(p, part, set(6.951166391e-01f));
    p = fused(p, part, set(1.0f));
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
  }
  // By integers, which do not wait for the port that floats and tiles share; halves are rounded up.
  TW_INLINE Vec<i32> pair(Vec<float> first, Vec<float> second) {
    const Vec<u32> low = ((Vec<u32>)first + 0x8000) >> 16, high = (Vec<u32>)second + 0x8000;
    return (Vec<i32>)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)low, (__m512i)high);
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
  // Transposed, in pairs of rows: to[d][j / 2] = (from[j][d], from[j + 1][d]).
  static i64 row_stride(i64 rows) { return round_up((rows + 1) / 2, TileGemm::kSide) + TileGemm::kSide; }
  static i64 rows_room(i64 rows, int depth) { return row_stride(rows) * round_up(depth, TileGemm::kSide); }
  static const Word* skip_rows(Words<Word> words, i64 rows) { return words.data + rows / 2; }
  static Words<Word> along_rows(const Bf16* p, i64 row, i64 col, int rows, int depth, Word* room) {
    const i64 stride = row_stride(rows);
    constexpr int lanes = kLanes<i32>;
    for (int j = 0; j < rows; j += 2 * lanes) {
      for (int d = 0; d < depth; d += lanes) {
        Vec<i32> r[lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) r[x] = pair_of_rows(bits(p), row, col, j + 2 * x, rows, d, depth);
        transpose<i32>(r);
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) store(room + (d + x) * stride + j / 2, r[x]);
      }
    }
    return {room, stride};
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
  static void transposed(const Bf16* p, i64 row, i64 col, int rows, int depth, int width, Word* to) {
    pack_transposed_pairs(bits(p), row, col, rows, depth, width, to);
    const int there = PairMode::words(depth);
    std::memset(to + static_cast<i64>(there) * width, 0,
                static_cast<std::size_t>(words(depth) - there) * static_cast<std::size_t>(width) * sizeof(Word));
  }
};

}  // namespace tilewise::TILEWISE_ISA
