// The score chain on a tile: s = scale * q.k, then each step in order; and for the backward pass the product of
// the steps' derivatives (only a softcap's is not one).
#pragma once

#include "base/ahead.h"
#include "products/gemm.h"
#include "variants/mask.h"
#include "base/elementary.h"
#include "base/pack.h"
#include "base/schedule.h"

namespace tilewise::TILEWISE_ISA {

// bias[m0 + i][n0 + j] for a piece of kSubKeys keys, lanes along the queries: to[j * width + i].
template <class C, class E>
static void bias_piece(const E* from, const View& view, int rows, int count, int width, C* to) {
  constexpr int lanes = kLanes<C>;
  if (view.row == 0) {
    for (int j = 0; j < count; j++) {
      const Vec<C> v = set<C>(widen_one(from + j * view.col));
      for (int i = 0; i < width; i += lanes) store(to + j * width + i, v);
    }
    return;
  }
  if (view.row == 1) {
    for (int j = 0; j < count; j++)
      for (int i = 0; i < width; i += lanes) store(to + j * width + i, widen(from + j * view.col + i, rows - i));
    return;
  }
  for (int i = 0; i < width; i += lanes) {
    for (int j = 0; j < count; j += lanes) {
      Vec<C> r[lanes];
      TW_UNROLL(16)
      for (int x = 0; x < lanes; x++)
        r[x] =
            i + x < rows ? widen_strided<C>(from + (i + x) * view.row + j * view.col, view.col, count - j) : Vec<C>{};
      transpose<C>(r);
      for (int x = 0; x < lanes && j + x < count; x++) store(to + (j + x) * width + i, r[x]);
    }
  }
}

// A chain of one step that needs nothing but the product and the place of a pair: a softmax makes such scores itself,
// in registers. Of kN / kV keys, one after the other, and kV vectors of queries: x[key * kV + vector] are products on
// entry and scores on return, to the bit as ScoreChain::apply leaves them.
template <class C>
struct AlibiStep {
  C scale, slope;
  Vec<C> distance;  // of the first vector of queries and the next key
  template <int kV, int kN>
  [[gnu::always_inline]] inline void scores(Vec<C> (&x)[kN]) {
    TW_UNROLL(4)
    for (int n = 0; n < kN; n++) {
      const Vec<C> there = distance + static_cast<C>(n % kV * kLanes<C>);
      x[n] = rounded(x[n] * scale, C{}) - slope * magnitude(there, C{});
      if (n % kV == kV - 1) distance -= static_cast<C>(1);
    }
  }
};
template <class C>
struct SoftcapStep {
  Softcap<C> softcap;
  template <int, int kN>
  [[gnu::always_inline]] inline void scores(Vec<C> (&x)[kN]) const {
    softcap(x);
  }
};

template <class C>
class ScoreChain {
 public:
  // `room`: the thread's scratch memory for expressions. `by_keys`: queries and keys change places, here and in all
  // that is said of them below, so that the lanes are keys; without derivatives.
  ScoreChain(const Problem& problem, i64 b, i64 h, i64 queries, i64 keys, char* room, bool by_keys = false)
      : code_(problem.score),
        length_(problem.score_length),
        b_(b),
        h_(h),
        offset_(keys - queries),
        scale_(static_cast<C>(problem.scale)),
        softcap_(scale_, problem.score_length > 0 ? problem.score[0].cap : 0),
        room_(room),
        by_keys_(by_keys) {
    if (length_ == 0 || code_[0].op != ScoreOp::expr) return;
    ExprRun<C>(value_of(code_[0]), room).open(b, h, queries, keys);
    if (code_[0].slope) ExprRun<C>(*code_[0].slope, room).open(b, h, queries, keys);
  }

  // What a pass wants besides the scores. `gain` receives d(final score) / d(score after step `from` - 1), from 0:
  // d / d(scale * q.k). `raw` receives scale * q.k, `peak` the largest final score of each query where that is told
  // (see apply).
  struct Extras {
    C* gain = nullptr;
    int from = 0;
    C* raw = nullptr;
    C* peak = nullptr;
  };

  // Scores in place: s[j * width + i] for queries m0 + i, keys n0 + j; on entry q.k, on return the final score.
  // True if the peak was told.
  TW_NOINLINE bool apply(C* s, int width, i64 m0, int rows, i64 n0, int count, const Extras& extras) const {
    constexpr int lanes = kLanes<C>;
    const bool done = length_ > 0 && at_once(code_[0], extras);
    if (done) first_step(s, width, m0, rows, n0, count, extras);
    if (done && length_ == 1) return true;
    for (int j = 0; j < count; j += kSubKeys) {
      const int piece = static_cast<int>(min(kSubKeys, count - j));
      C* rows_s = s + static_cast<i64>(j) * width;
      C* rows_gain = extras.gain ? extras.gain + static_cast<i64>(j) * width : nullptr;
      const int size = piece * width;
      if (done) {
        steps(1, rows_s, rows_gain, width, m0, rows, n0 + j, piece, extras);
        continue;
      }
      C* scaled = length_ > 0 && code_[0].op == ScoreOp::softcap ? nullptr : rows_s;  // it takes q.k
      for (C* to : {extras.raw ? extras.raw + (rows_s - s) : nullptr, scaled})
        for (int x = 0; to != nullptr && x < size; x += lanes) store(to + x, load(rows_s + x) * scale_);
      if (rows_gain)
        for (int x = 0; x < size; x += lanes) store(rows_gain + x, set(static_cast<C>(1)));
      steps(0, rows_s, rows_gain, width, m0, rows, n0 + j, piece, extras);
    }
    return false;
  }

  // Whether a softmax may make the scores itself; f(step) with the step for queries from m0 and keys from n0 on.
  bool is_step() const { return length_ == 1 && (code_[0].op == ScoreOp::alibi || code_[0].op == ScoreOp::softcap); }
  template <class F>
  bool with_step(i64 m0, i64 n0, const F& f) const {
    const ScoreInstr& x = code_[0];
    if (x.op == ScoreOp::alibi) return f(AlibiStep<C>{scale_, slope_of(x), distance(m0, n0)});
    return f(SoftcapStep<C>{softcap_});
  }

  // What `apply` reads of biases of each pair: rows that lie so far apart that no processor sees what comes next.
  void look_ahead(i64 m0, int rows, i64 n0, int count, Ahead& ahead) const {
    for (int step = 0; step < length_; step++) {
      const ScoreInstr& x = code_[step];
      if (x.op != ScoreOp::bias) continue;
      const View view = x.tensor;
      if (view.row == 0 || view.col != 1) continue;
      const i64 size = size_of(x.dtype);
      const i64 at = b_ * view.batch + h_ * view.head + m0 * view.row + n0;
      ahead.add(static_cast<const char*>(view.data) + at * size, view.row * size, rows, count * size);
    }
  }

 private:
  // Whether a step takes scores as they come from the product, and a whole block of them.
  static bool at_once(const ScoreInstr& x, const Extras& extras) {
    if (extras.raw != nullptr) return false;
    if (extras.gain == nullptr) return true;
    return x.op == ScoreOp::expr && extras.from == 0 && x.slope->compiled != nullptr;
  }

  // The first step, with the scale before it; tells the peak.
  void first_step(C* s, int width, i64 m0, int rows, i64 n0, int count, const Extras& extras) const {
    static_assert(kRoomKeys <= kExprKeys);
    alignas(kVectorBytes) C room[kTileQueries];
    const Leaving<C> to = {s, extras.peak ? extras.peak : room, width, rows, count};
    const ScoreInstr& x = code_[0];
    if (x.op == ScoreOp::expr) {
      const ExprProgram& program = extras.gain ? *x.slope : value_of(x);
      if (program.compiled != nullptr) return run_compiled(program, to, m0, n0, extras, scale_);
    }
    for (int i = 0; i < width; i += kLanes<C>) store(to.peak + i, set(-static_cast<C>(__builtin_inf())));
    if (x.op == ScoreOp::expr) {
      ExprRun<C> run(value_of(x), room_);
      run.tile(m0, rows);
      run.block(s, n0, count, scale_, to.peak);
      return;
    }
    const C scale = scale_;
    if (x.op == ScoreOp::alibi) {
      leave(to, [=, this, slope = slope_of(x)](int j, int i, auto& out) {
        constexpr int kV = std::extent_v<std::remove_reference_t<decltype(out)>>;
        const C* p = s + static_cast<i64>(j) * width + i;
        for (auto& z : out) z = load(p), p += kLanes<C>;
        AlibiStep<C>{scale, slope, distance(m0 + i, n0 + j)}.template scores<kV>(out);
      });
      return;
    }
    if (x.op == ScoreOp::bias) {
      alignas(kVectorBytes) C piece[kSubKeys * kTileQueries];
      for (int first = 0; first < count; first += kSubKeys) {
        C* rows_s = s + static_cast<i64>(first) * width;
        const int keys = static_cast<int>(min(kSubKeys, count - first));
        fetch_bias(x, width, m0, rows, n0 + first, keys, piece);
        leave(Leaving<C>{rows_s, to.peak, width, rows, keys}, [=, &piece](int j, int i, auto& out) {
          i64 at = static_cast<i64>(j) * width + i;
          for (auto& z : out) z = rounded(load(rows_s + at) * scale, C{}) + load(piece + at), at += kLanes<C>;
        });
      }
      return;
    }
    leave(to, [=, softcap = softcap_](int j, int i, auto& out) {
      const C* p = s + static_cast<i64>(j) * width + i;
      for (auto& z : out) z = load(p), p += kLanes<C>;
      softcap(out);
    });
  }

  // The steps from `first` on, for a piece.
  void steps(int first, C* s, C* gain, int width, i64 m0, int rows, i64 n0, int count, const Extras& extras) const {
    for (int step = first; step < length_; step++) {
      const ScoreInstr& x = code_[step];
      switch (x.op) {
        case ScoreOp::alibi:
          alibi(x, s, width, m0, n0, count);
          break;
        case ScoreOp::softcap:
          softcap(step == 0 ? softcap_ : Softcap<C>(1, x.cap), s, count * width, step >= extras.from ? gain : nullptr);
          break;
        case ScoreOp::bias:
          bias(x, s, width, m0, rows, n0, count);
          break;
        case ScoreOp::expr:
          expr(x, s, width, m0, rows, n0, count, {.gain = extras.from == 0 ? gain : nullptr});
          break;
      }
    }
  }

  const ExprProgram& value_of(const ScoreInstr& x) const { return by_keys_ ? *x.by_keys : *x.value; }
  C slope_of(const ScoreInstr& x) const {
    return static_cast<const C*>(x.tensor.data)[b_ * x.tensor.batch + h_ * x.tensor.head];
  }
  // Of the queries from m on and key n.
  Vec<C> distance(i64 m, i64 n) const { return lane_numbers<C>() + static_cast<C>(m + offset_ - n); }
  void alibi(const ScoreInstr& x, C* s, int width, i64 m0, i64 n0, int count) const {
    for (int i = 0; i < width; i += kLanes<C>) {
      AlibiStep<C> step{1, slope_of(x), distance(m0 + i, n0)};
      for (int j = 0; j < count; j++) {
        Vec<C> score[1] = {load(s + j * width + i)};
        step.template scores<1>(score);
        store(s + j * width + i, score[0]);
      }
    }
  }

  void softcap(const Softcap<C>& capped, C* s, int size, C* gain) const {
    for (int i = 0; i < size; i += kLanes<C>) {
      Vec<C> slope;
      store(s + i, capped.with_slope(load(s + i), slope));
      if (gain) store(gain + i, load(gain + i) * slope);
    }
  }

  void bias(const ScoreInstr& x, C* s, int width, i64 m0, int rows, i64 n0, int count) const {
    alignas(kVectorBytes) C piece[kSubKeys * kTileQueries];
    fetch_bias(x, width, m0, rows, n0, count, piece);
    for (int i = 0; i < count * width; i += kLanes<C>) store(s + i, load(s + i) + load(piece + i));
  }
  // The biases of a piece, laid out as its scores.
  void fetch_bias(const ScoreInstr& x, int width, i64 m0, int rows, i64 n0, int count, C* piece) const {
    View view = x.tensor;
    if (by_keys_) view.row = x.tensor.col, view.col = x.tensor.row;
    const i64 at = b_ * view.batch + h_ * view.head + m0 * view.row + n0 * view.col;
    if constexpr (sizeof(C) == 8) {
      bias_piece(static_cast<const double*>(view.data) + at, view, rows, count, width, piece);
    } else if (x.dtype == DType::bf16) {
      bias_piece(static_cast<const Bf16*>(view.data) + at, view, rows, count, width, piece);
    } else if (x.dtype == DType::f16) {
      bias_piece(static_cast<const Half*>(view.data) + at, view, rows, count, width, piece);
    } else {
      bias_piece(static_cast<const float*>(view.data) + at, view, rows, count, width, piece);
    }
  }

  // A piece, scaled.
  void expr(const ScoreInstr& x, C* s, int width, i64 m0, int rows, i64 n0, int count, const Extras& extras) const {
    C* gain = extras.gain;
    const ExprProgram& program = gain ? *x.slope : value_of(x);
    if (program.compiled != nullptr) {
      alignas(kVectorBytes) C peak[kTileQueries];
      run_compiled(program, {s, peak, width, rows, count}, m0, n0, extras, 1);
      return;
    }
    ExprRun<C> run(program, room_);
    run.tile(m0, rows);
    run.piece(s, n0, count);
    leave_pieces(run.output(0), run.output(gain ? 1 : 0), s, width, rows, count, gain);
  }
  // `scale`: what the scores are yet to be multiplied by.
  void run_compiled(const ExprProgram& program, const Leaving<C>& to, i64 m0, i64 n0, const Extras& extras,
                    C scale) const {
    ExprRun<C> run(program, room_);
    run.tile(m0, to.rows);
    ExprFrame frame = run.frame(to.s, n0, to.count);
    frame.gain = extras.gain;
    frame.peak = to.peak;
    frame.scale = static_cast<double>(scale);
    program.compiled(&frame);
  }

  // Scores and derivatives to their places. Lanes without a query hold no score, of which an expression could make NaN.
  static void leave_pieces(Operand value, Operand slope, C* s, int width, int rows, int count, C* gain) {
    constexpr int lanes = kLanes<C>;
    for (int i = 0; i < width; i += lanes) {
      const u64 there = i + lanes <= rows ? ~u64{0} : i < rows ? (u64{1} << (rows - i)) - 1 : 0;
      for (int j = 0; j < count; j++) {
        const Vec<C> score = keep_where<C>(there, load(value.at<C>(j, i)));
        if (gain) store(gain + j * width + i, keep_where<C>(there, load(slope.at<C>(j, i))));
        store(s + j * width + i, score);
      }
    }
  }

  const ScoreInstr* code_;
  int length_;
  i64 b_, h_, offset_;
  C scale_;
  Softcap<C> softcap_;  // of the first step
  char* room_;
  bool by_keys_;
};

}  // namespace tilewise::TILEWISE_ISA
