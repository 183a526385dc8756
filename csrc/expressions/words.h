// What the code of a compiled expression is written in (kernels/cpu/emit.py): one function per operation, on as many
// lanes as a vector of floats has. The core does not include this; generated code does, behind the headers it needs,
// with TW_REAL and TW_WHOLE defined as its floats and integers.
#pragma once

#include "expressions/program.h"
#include "expressions/integers.h"
#include "base/tile_sizes.h"

namespace tilewise::TILEWISE_ISA {

using Real = TW_REAL;
using Whole = TW_WHOLE;
using Truth = SInt<Real>;
constexpr int kStep = kLanes<Real>;
constexpr int kParts = kStep / kLanes<Whole>;  // vectors of integers to one of floats

using Reals = Vec<Real>;
using Truths = Vec<Truth>;  // all ones or zeros
struct Wholes {
  Vec<Whole> part[kParts];
};

// ---- registers, leaves

template <class T>
TW_INLINE T* held(const ExprFrame& f, int extent, int reg, int at) {
  return reinterpret_cast<T*>(f.registers[extent] + reg * kRegisterElements[extent] * i64{sizeof(Whole)}) + at;
}
TW_INLINE void read(const ExprFrame& f, int extent, int reg, int at, Reals& to) {
  to = load(held<Real>(f, extent, reg, at));
}
TW_INLINE void read(const ExprFrame& f, int extent, int reg, int at, Wholes& to) {
  for (int p = 0; p < kParts; p++) to.part[p] = load(held<Whole>(f, extent, reg, at) + p * kLanes<Whole>);
}
TW_INLINE void read(const ExprFrame& f, int extent, int reg, int at, Truths& to) {
  to = load(held<Truth>(f, extent, reg, at));
}
template <class T>
TW_INLINE T read(const ExprFrame& f, int extent, int reg, int at) {
  T to;
  read(f, extent, reg, at, to);
  return to;
}
TW_INLINE void write(const ExprFrame& f, int extent, int reg, int at, Reals x) {
  store(held<Real>(f, extent, reg, at), x);
}
TW_INLINE void write(const ExprFrame& f, int extent, int reg, int at, const Wholes& x) {
  for (int p = 0; p < kParts; p++) store(held<Whole>(f, extent, reg, at) + p * kLanes<Whole>, x.part[p]);
}

TW_INLINE Reals reals(double x) { return set(static_cast<Real>(x)); }
TW_INLINE Wholes wholes(i64 x) {
  Wholes r;
  for (int p = 0; p < kParts; p++) r.part[p] = set(static_cast<Whole>(x));
  return r;
}
TW_INLINE Truths truths(bool x) { return set(static_cast<Truth>(-static_cast<int>(x))); }

TW_INLINE Real first(Reals x) { return x[0]; }
TW_INLINE Truth first(Truths x) { return x[0]; }
TW_INLINE Whole first(const Wholes& x) { return x.part[0][0]; }

template <class F>
TW_INLINE Wholes each(const Wholes& a, const F& f) {
  Wholes r;
  for (int p = 0; p < kParts; p++) r.part[p] = f(a.part[p]);
  return r;
}
template <class F>
TW_INLINE Wholes each(const Wholes& a, const Wholes& b, const F& f) {
  Wholes r;
  for (int p = 0; p < kParts; p++) r.part[p] = f(a.part[p], b.part[p]);
  return r;
}
template <class F>
TW_INLINE Truths each_truth(const Wholes& a, const Wholes& b, const F& f) {
  if constexpr (kParts == 1) {
    return (Truths)f(a.part[0], b.part[0]);
  } else {
    Truths r;
    for (int p = 0; p < kParts; p++)
      store_truth<Whole>(reinterpret_cast<Truth*>(&r) + p * kLanes<Whole>, f(a.part[p], b.part[p]));
    return r;
  }
}
TW_INLINE Wholes as_masks(const Truths& c) {
  Wholes r;
  if constexpr (kParts == 1) {
    r.part[0] = (Vec<Whole>)c;
  } else {
    for (int p = 0; p < kParts; p++)
      r.part[p] = truth_as(reinterpret_cast<const Truth*>(&c) + p * kLanes<Whole>, Whole{});
  }
  return r;
}

// ---- captured tensors

template <class From>
struct Source {
  const From* data;
  bool none;
  i64 last[kMaxRank], stride[kMaxRank];
};
template <class From>
TW_INLINE Source<From> source(const ExprTensor& t) {
  Source<From> s;
  s.data = static_cast<const From*>(t.data);
  s.none = false;
  for (int d = 0; d < kMaxRank; d++) {
    s.last[d] = t.size[d] - 1, s.stride[d] = t.stride[d];
    s.none |= d < t.rank && t.size[d] == 0;
  }
  return s;
}
// How far an index goes, moved into its dimension.
template <class From>
TW_INLINE i64 moved_first(const Source<From>& s, int d, Whole index) {
  return max(0, min(index, s.last[d])) * s.stride[d];
}
template <class From>
TW_INLINE Wholes moved(const Source<From>& s, int d, const Wholes& index) {
  const Vec<Whole> none{}, last = set(static_cast<Whole>(s.last[d]));
  return each(index, [&](Vec<Whole> x) {
    x = x > last ? last : x;
    return (x < none ? none : x) * static_cast<Whole>(s.stride[d]);
  });
}

TW_INLINE Real converted(Real x, Reals) { return x; }
TW_INLINE Whole converted(i64 x, Wholes) { return static_cast<Whole>(x); }
TW_INLINE Truth converted(unsigned char x, Truths) { return x ? -1 : 0; }

TW_INLINE Reals filled(Real x, Reals) { return set(x); }
TW_INLINE Wholes filled(Whole x, Wholes) { return wholes(x); }
TW_INLINE Truths filled(Truth x, Truths) { return set(x); }

template <class T, class From>
TW_INLINE T pick_one(const Source<From>& s, i64 at) {
  return s.none ? T{} : filled(converted(s.data[at], T{}), T{});
}
TW_INLINE bool neighbours(const Wholes& at) {
  u64 same = 0;
  for (int p = 0; p < kParts; p++) {
    const Vec<Whole> row = lane_numbers<Whole>() + static_cast<Whole>(at.part[0][0] + p * kLanes<Whole>);
    same += bits_of_mask<Whole>(at.part[p] == row) == kAllLanes<Whole>;
  }
  return same == kParts;
}
template <class T, class From>
TW_INLINE T pick(const Source<From>& s, const Wholes& at) {
  T to{};
  if (s.none) return to;
  auto* p = reinterpret_cast<decltype(converted(From{}, T{}))*>(&to);
  const Whole* places = reinterpret_cast<const Whole*>(&at);
  if (neighbours(at)) {
    const From* first = s.data + at.part[0][0];
    if constexpr (sizeof(From) == sizeof(*p) && sizeof(From) >= 4) {
      std::memcpy(p, first, sizeof to);
    } else {
      for (int i = 0; i < kStep; i++) p[i] = converted(first[i], T{});
    }
    return to;
  }
#if TILEWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(From) == 4 && sizeof(Whole) == 4) {
    const __m512 picked = _mm512_i32gather_ps((__m512i)at.part[0], reinterpret_cast<const float*>(s.data), 4);
    std::memcpy(p, &picked, sizeof picked);
    return to;
  }
#endif
  for (int i = 0; i < kStep; i++) p[i] = converted(s.data[places[i]], T{});
  return to;
}

// ---- operations, of any kind that they take

template <ExprOp kOp, char kGives, class T>
TW_INLINE auto lifted(const T& a, const T& b) {
  if constexpr (std::is_same_v<T, Wholes>) {
    const auto code = [](auto p, auto q) { return Code<kOp>::template of<Whole>(p, q); };
    if constexpr (kGives == 'b') {
      return each_truth(a, b, code);
    } else {
      return each(a, b, code);
    }
  } else if constexpr (std::is_same_v<T, Truths>) {
    return Code<kOp>::template of<Truth>(a, b);
  } else {
    return Code<kOp>::template of<Real>(a, b);
  }
}
#define TILEWISE_WORD(op, name, arity, takes, gives, code, whole, real) \
  template <class T>                                                    \
  TW_INLINE auto op_##name(const T& a, const T& b) {                    \
    return lifted<ExprOp::op, gives>(a, b);                             \
  }                                                                     \
  template <class T>                                                    \
  TW_INLINE auto op_##name(const T& a) {                                \
    return op_##name(a, a);                                             \
  }
TILEWISE_OPERATIONS(TILEWISE_WORD)
#undef TILEWISE_WORD

// ---- integers

TW_INLINE Wholes op_shr_by(const Wholes& a, i64 by) {
  const Whole bits = static_cast<Whole>(min(by, kTopBit<Whole>));
  return each(a, [=](auto p) { return p >> bits; });
}
TW_INLINE Wholes op_bits_of(const Wholes& a, i64 bits) {
  return each(a, [=](auto p) { return p & static_cast<Whole>(bits); });
}
TW_INLINE Wholes op_where(const Truths& c, const Wholes& a, const Wholes& b) {
  const Wholes mask = as_masks(c);
  Wholes r;
  for (int p = 0; p < kParts; p++) r.part[p] = mask.part[p] ? a.part[p] : b.part[p];
  return r;
}
TW_INLINE Wholes op_to_int(const Wholes& a) { return a; }
TW_INLINE Wholes op_to_int(const Truths& a) { return op_neg(as_masks(a)); }
TW_INLINE Wholes op_to_int(const Reals& a) {
  Wholes r;
  for (int p = 0; p < kParts; p++)
    r.part[p] = to_integers(reinterpret_cast<const Real*>(&a) + p * kLanes<Whole>, Whole{});
  return r;
}

// ---- booleans

TW_INLINE Truths op_where(Truths c, Truths a, Truths b) { return c ? a : b; }

// Conditions along diagonals, a bit each: those of a key's queries, which begin at bit `from`.
constexpr int kDiagonalWords = (kExprKeys + 64) / 64 + 1;
TW_INLINE u64 row_bits(const u64* words, int from) {
  const u64* p = words + from / 64;
  return p[0] >> from % 64 | p[1] << 1 << (63 - from % 64);
}
TW_INLINE void add_bits(u64* words, int at, Truths x) { words[at / 64] |= bits_of_mask<Truth>(x) << at % 64; }
TW_INLINE Wholes lanes_from(i64 first) {
  Wholes r;
  for (int p = 0; p < kParts; p++) r.part[p] = lane_numbers<Whole>() + static_cast<Whole>(first + p * kLanes<Whole>);
  return r;
}

// ---- floats: each operation rounded by itself, as the interpreter has it

// By a constant: by way of its inverse, and of what that leaves over. Infinite quotients leave NaN over.
TW_INLINE Reals op_div_by(Reals a, double b) {
#if defined(__FMA__) || defined(__aarch64__)
  const Reals by = reals(b), inverse = set(static_cast<Real>(1) / static_cast<Real>(b));
  const Reals q = rounded(a * inverse, Real{});
  const Reals exact = fused(fused(-q, by, a), inverse, q);
  return exact != exact ? q : exact;
#else
  return a / reals(b);
#endif
}
// For what is tanh or sigmoid of it alone, which have no steps: an error of a unit more is not seen.
TW_INLINE Reals op_over(Reals a, double b) { return rounded(a * static_cast<Real>(1 / b), Real{}); }
// Of a score that is yet to be scaled.
TW_INLINE Reals op_scaled_add(Reals s, Reals scale, Reals x) { return fused(s, scale, x); }
TW_INLINE Reals op_scaled_sub(Reals s, Reals scale, Reals x) { return fused(s, scale, -x); }
TW_INLINE Reals op_scaled_add_from(Reals s, Reals scale, Reals x) { return fused(s, scale, x); }
TW_INLINE Reals op_scaled_sub_from(Reals s, Reals scale, Reals x) { return fused(-s, scale, x); }
// A constant exponent: those that torch has short forms for, and any other.
TW_INLINE Reals op_power_by(Reals a, double exponent) {
  const Real by = static_cast<Real>(exponent), one = 1;
  if (by == 2) return op_mul(a, a);
  if (by == 3) return op_mul(op_mul(a, a), a);
  if (by == -1) return one / a;
  if (by == -2) return one / op_mul(a, a);
  if (by == static_cast<Real>(0.5)) return square_root(a);
  if (by == static_cast<Real>(-0.5)) return one / square_root(a);
  return each_lane<Real>(a, [=](Real p) { return power_of(p, by); });
}
// For scores of operands of 16 bits: by less than 3e-5 of itself too small far from zero. A quotient of polynomials up
// to 6, its values fitted for the least relative error.
TW_INLINE Reals coarse_far(Reals a) {
  const Reals low = reals(-6), high = reals(6);
  Reals x = low > a ? low : a;  // of NaN stays NaN
  x = high < x ? high : x;
  const Reals t = x * x;
  const Reals p = (t * static_cast<Real>(0.0015145628713071346) + static_cast<Real>(0.114829882979393)) * t +
                  static_cast<Real>(0.9999853372573853);
  const Reals q = ((t * static_cast<Real>(5.627159771393053e-05) + static_cast<Real>(0.017611145973205566)) * t +
                   static_cast<Real>(0.44811397790908813)) *
                      t +
                  static_cast<Real>(1);
  return x * p / q;
}
TW_INLINE Reals op_tanh_coarse(Reals a) {
  if constexpr (sizeof(Real) == 8) {
    return coarse_far(a);
  } else {
    const Reals square = a * a, near = (Reals)tanh_near((Vec<float>)a, (Vec<float>)square);
    const u64 far = bits_not_below((Vec<float>)square, kTanhNear);
    if (__builtin_expect(far == 0, 1)) return near;
    return select_bits<Real>(far, coarse_far(a), near);
  }
}
TW_INLINE Reals op_where(Truths c, Reals a, Reals b) { return c ? a : b; }
TW_INLINE Reals op_where_bits(u64 c, Reals a, Reals b) { return select_bits<Real>(c, a, b); }
TW_INLINE Reals op_to_float(Reals a) { return a; }
TW_INLINE Reals op_to_float(Truths a) { return __builtin_convertvector(-a, Reals); }
TW_INLINE Reals op_to_float(const Wholes& a) {
  Reals r;
  for (int p = 0; p < kParts; p++) store_converted(reinterpret_cast<Real*>(&r) + p * kLanes<Whole>, a.part[p]);
  return r;
}

// ---- scores

// The scores of some columns on their way out.
template <int kV>
struct Score {
  Real *scores, *gain, *peak;
  int from, rows;
  Reals top[kV];

  __attribute__((always_inline)) Score(const ExprFrame& f, int first)
      : scores(static_cast<Real*>(f.s)),
        gain(static_cast<Real*>(f.gain)),
        peak(static_cast<Real*>(f.peak)),
        from(first),
        rows(f.rows) {
    for (int v = 0; v < kV; v++) top[v] = reals(-__builtin_inf());
  }
  // Lanes without a query hold no score.
  __attribute__((always_inline)) Reals there(int v, Reals x) const {
    const int i = from + v * kStep;
    if (i + kStep <= rows) return x;
    return keep_where<Real>(i < rows ? (u64{1} << (rows - i)) - 1 : 0, x);
  }
  __attribute__((always_inline)) void put(int v, int at, Reals x) {
    x = there(v, x);
    store(scores + at, x);
    top[v] = vmax(x, top[v]);
  }
  __attribute__((always_inline)) void put_gain(int v, int at, Reals x) const { store(gain + at, there(v, x)); }
  __attribute__((always_inline)) void close() const {
    for (int v = 0; v < kV; v++) store(peak + from + v * kStep, top[v]);
  }
};

}  // namespace tilewise::TILEWISE_ISA
