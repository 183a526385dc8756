// Runs the program of an expression over a piece of a tile: queries in the lanes, up to kSubKeys keys. Every value is
// computed at its own extent: once per tile, per query, per key or per pair.
#pragma once

#include "expressions/program.h"
#include "expressions/integers.h"
#include "base/leave.h"

namespace tilewise::TILEWISE_ISA {

// Where a value's elements lie: element (j, i), key j and lane i, at data[j * row + (i & lane)]. What does not depend
// on the query fills one vector (lane is 0), what does not depend on the key has one row (row is 0).
struct Operand {
  char* data;
  int row, lane;
  template <class T>
  T* at(int j, int i) const {
    return reinterpret_cast<T*>(data) + j * row + (i & lane);
  }
};

template <class C>
class ExprRun {
  using Truth = SInt<C>;
  static constexpr int lanes = kLanes<C>;

  // At the start of the program's scratch memory: what the values that are kept were computed for.
  struct State {
    i64 b, h, queries, keys, m0[kExprTiles];
    int rows[kExprTiles];
  };
  static_assert(sizeof(State) <= kExprHeader && kRegisterElements[per_query] == kTileQueries &&
                kRegisterElements[per_pair] == kTileQueries * kSubKeys);

 public:
  // `room`: the thread's scratch memory for expressions.
  ExprRun(const ExprProgram& program, char* room)
      : p_(program), state_(*reinterpret_cast<State*>(room + program.room)) {
    char* at = room + program.room + kExprHeader;
    for (int extent = 0; extent < kExtents; extent++) {
      size_[extent] = kRegisterElements[extent] * (program.wide ? 8 : 4);
      base_[extent] = at;
      at += size_[extent] * program.registers[extent] * (extent == per_query ? kExprTiles : 1);
    }
    queries_ = base_[per_query];
  }

  // A sequence and a head: computes what holds for all of it.
  void open(i64 b, i64 h, i64 queries, i64 keys) const {
    state_ = {b, h, queries, keys, {}, {}};
    run(whole_tile, 1);
  }

  // A tile of queries: computes what holds for each of them. Kernels come back to a few tiles for every block of keys.
  void tile(i64 m0, int rows) {
    const i64 place = m0 / kTileQueries % kExprTiles;
    m0_ = m0, rows_ = rows, width_ = static_cast<int>(round_up(rows, lanes));
    base_[per_query] = queries_ + place * size_[per_query] * p_.registers[per_query];
    if (state_.rows[place] == rows && state_.m0[place] == m0) return;
    state_.m0[place] = m0, state_.rows[place] = rows;
    run(per_query, 1);
  }

  // The keys n0 .. n0 + count - 1; s[j * width + i] are the scores.
  void piece(C* s, i64 n0, int count) {
    s_ = s, n0_ = n0, diagonal_ = diagonals_ = kDiagonals;
    if (p_.compiled != nullptr) {
      if (p_.registers[per_diagonal] > 0) {
        run(per_key, count);
        run(per_diagonal, 1);
      }
      ExprFrame given = frame(s, n0, count);
      return p_.compiled(&given);
    }
    run(per_key, count);
    run(per_diagonal, 1);
    run(per_pair, count);
  }

  // The same of a score and up to kExprKeys keys, as the tail has it: s is multiplied by `scale`, and becomes the new
  // score.
  void block(C* s, i64 n0, int keys, C scale, C* peak) {
    diagonal_ = diagonals_ = static_cast<int>(round_up(keys, lanes));
    s_ = s, n0_ = n0;
    if (p_.registers[per_diagonal] > 0) {
      run(per_key, 1);
      run(per_diagonal, 1);
    }
    const int step = p_.tail.alone ? keys : kSubKeys;
    for (int j = 0; j < keys; j += step) {
      const int count = static_cast<int>(min(step, keys - j)), width = width_;
      s_ = s + static_cast<i64>(j) * width, n0_ = n0 + j, diagonal_ = diagonals_ - j;
      if (p_.tail.keys) run(per_key, count);
      if (!p_.tail.scales)
        for (int x = 0; x < count * width; x += lanes) store(s_ + x, load(s_ + x) * scale);
      for (int at = p_.begin[per_pair]; at < p_.tail.begin; at++) run_one(at, count, width);
      end({s_, peak, width, rows_, count}, p_.tail.scales ? scale : static_cast<C>(1));
    }
  }

  // What compiled code is given for such a piece.
  ExprFrame frame(C* s, i64 n0, int count) const {
    return {base_, p_.tensors, s, nullptr, nullptr, nullptr, n0, count, width_, rows_, 1};
  }

  int width() const { return width_; }
  Operand output(int index) const { return operand(p_.output[index]); }
  // `along`: as the elements of a register of diagonals lie, for values of that extent.
  Operand operand(int index, bool along = false) const {
    const ExprValue& x = p_.values[index];
    char* data = x.reg < 0 ? reinterpret_cast<char*>(s_) : base_[x.extent] + x.reg * size_[x.extent];
    switch (x.extent) {
      case per_query:
        return {data, 0, -1};
      case per_key:
        return {data, lanes, 0};
      case per_diagonal:
        if (along) return {data, 0, -1};
        return {data + diagonal_ * (p_.wide && x.kind == ExprKind::integer ? 8 : static_cast<int>(sizeof(C))), -1, -1};
      case per_pair:
        return {data, width_, -1};
      default:
        return {data, 0, 0};
    }
  }
  // What there is of a value per row of keys.
  int columns(int extent) const {
    if (extent == whole_tile || extent == per_key) return lanes;
    return extent == per_diagonal ? diagonals_ + width_ : width_;
  }

 private:
  // Over elements of one type, one vector after the other.
  template <class T, class F>
  static void map(Operand to, Operand a, int rows, int columns, const F& f) {
    for (int j = 0; j < rows; j++) {
      T *r = to.at<T>(j, 0), *x = a.at<T>(j, 0);
      for (int i = 0; i < columns; i += lanes)
        for (int v = 0; v < lanes; v += kLanes<T>) store(r + i + v, f(load(x + (i & a.lane) + v)));
    }
  }
  template <class T, class F>
  static void map(Operand to, Operand a, Operand b, int rows, int columns, const F& f) {
    for (int j = 0; j < rows; j++) {
      T *r = to.at<T>(j, 0), *x = a.at<T>(j, 0), *y = b.at<T>(j, 0);
      for (int i = 0; i < columns; i += lanes)
        for (int v = 0; v < lanes; v += kLanes<T>)
          store(r + i + v, f(load(x + (i & a.lane) + v), load(y + (i & b.lane) + v)));
    }
  }
  // From elements of one type to another: f(to, from) for each vector of the wider type W.
  template <class To, class From, class W, class F>
  static void turn(Operand to, Operand a, int rows, int columns, const F& f) {
    for (int j = 0; j < rows; j++)
      for (int i = 0; i < columns; i += lanes)
        for (int v = 0; v < lanes; v += kLanes<W>) f(to.at<To>(j, 0) + i + v, a.at<From>(j, i) + v);
  }
  template <class T, class F>
  static void compare(Operand to, Operand a, Operand b, int rows, int columns, const F& f) {
    using Same = SameSize<T>;
    for (int j = 0; j < rows; j++)
      for (int i = 0; i < columns; i += lanes)
        for (int v = 0; v < lanes; v += kLanes<T>)
          store_truth<Same>(to.at<Truth>(j, 0) + i + v, f(load(a.at<T>(j, i) + v), load(b.at<T>(j, i) + v)));
  }
  template <class T>
  static void choose(Operand to, Operand c, Operand a, Operand b, int rows, int columns) {
    using Same = SameSize<T>;
    for (int j = 0; j < rows; j++)
      for (int i = 0; i < columns; i += lanes)
        for (int v = 0; v < lanes; v += kLanes<T>)
          store(to.at<T>(j, 0) + i + v,
                truth_as(c.at<Truth>(j, i) + v, Same{}) ? load(a.at<T>(j, i) + v) : load(b.at<T>(j, i) + v));
  }
  template <class T>
  static void fill(Operand to, T value) {
    for (int v = 0; v < lanes; v++) to.at<T>(0, 0)[v] = value;
  }

  void run(int extent, int rows) const {
    const int columns = this->columns(extent);
    for (int at = p_.begin[extent]; at < p_.begin[extent + 1]; at++) run_one(at, rows, columns);
  }
  void run_one(int at, int rows, int columns) const {
    if constexpr (sizeof(C) == 8) {
      compute<i64>(at, rows, columns);
    } else if (p_.wide) {
      compute<i64>(at, rows, columns);
    } else {
      compute<i32>(at, rows, columns);
    }
  }

  // ---- the tail of a score

  void end(const Leaving<C>& to, C scale) const {
    using V = Vec<C>;
    const ExprTail& t = p_.tail;
    switch (t.end) {
      case ExprEnd::add:
        return end_of_two(to, scale, [](V x, V y) { return x + y; });
      case ExprEnd::sub:
        return end_of_two(to, scale, [](V x, V y) { return x - y; });
      case ExprEnd::sub_from:
        return end_of_two(to, scale, [](V x, V y) { return y - x; });
      case ExprEnd::mul:
        return end_of_two(to, scale, [](V x, V y) { return x * y; });
      case ExprEnd::where:
        return end_where(to, scale, [](Vec<Truth> c, V x, V y) { return c ? x : y; });
      case ExprEnd::where_not:
        return end_where(to, scale, [](Vec<Truth> c, V x, V y) { return c ? y : x; });
      case ExprEnd::tanh:
        return end_function(to, scale, [](auto& x) { tanh_of_all(x); });
      case ExprEnd::sigmoid:
        return end_function(to, scale, [](auto& x) {
          for (auto& y : x) y = sigmoid(y, C{});
        });
      default: {
        const Operand x = operand(t.x);
        leave(to, [=](int j, int i, auto& out) {
          const C* from = x.at<C>(j, 0);
          for (auto& y : out) y = load(from + (i & x.lane)) * scale, i += lanes;
        });
      }
    }
  }
  // Rounded after it was scaled, as where that is done by itself.
  static Vec<C> scaled(const C* p, C scale) { return rounded(load(p) * scale, C{}); }
  template <class F>
  void end_of_two(const Leaving<C>& to, C scale, const F& f) const {
    const Operand x = operand(p_.tail.x), y = operand(p_.tail.before);
    leave(to, [=](int j, int i, auto& out) {
      const C *p = x.at<C>(j, i), *q = y.at<C>(j, 0);
      TW_UNROLL(4)
      for (auto& z : out) z = f(scaled(p, scale), load(q + (i & y.lane))), i += lanes, p += lanes;
    });
  }
  template <class F>
  void end_where(const Leaving<C>& to, C scale, const F& f) const {
    const Operand x = operand(p_.tail.x), y = operand(p_.tail.before), c = operand(p_.tail.after);
    leave(to, [=](int j, int i, auto& out) {
      const C *p = x.at<C>(j, i), *q = y.at<C>(j, 0);
      const Truth* r = c.at<Truth>(j, 0);
      TW_UNROLL(4)
      for (auto& z : out)
        z = f(load(r + (i & c.lane)), scaled(p, scale), load(q + (i & y.lane))), i += lanes, p += lanes;
    });
  }
  template <class F>
  void end_function(const Leaving<C>& to, C scale, const F& f) const {
    const ExprTail& t = p_.tail;
    const Operand x = operand(t.x);
    const C one = 1, before = t.before < 0 ? one : *operand(t.before).template at<C>(0, 0);
    const C after = t.after < 0 ? one : *operand(t.after).template at<C>(0, 0);
    const auto with = [&](const auto& inner) {
      leave(to, [=](int j, int i, auto& out) {
        const C* p = x.at<C>(j, i);
        for (auto& z : out) z = inner(scaled(p, scale), before), p += lanes;
        f(out);
        for (auto& z : out) z = z * after;
      });
    };
    if (t.over) return with([](Vec<C> z, C by) { return z / by; });
    return with([](Vec<C> z, C by) { return z * by; });
  }

  template <class I>
  TW_NOINLINE void compute(int at, int rows, int columns) const {
    const ExprValue& x = p_.values[at];
    const bool along = x.extent == per_diagonal;
    const Operand to = operand(at, along);
    if (x.op == ExprOp::difference) return difference<I>(x, to, columns);
    if (x.op == ExprOp::load) return gather<I>(x, to, rows, columns);
    if (x.count == 0) return leaf<I>(x, to, rows, columns);
    const Operand a = operand(x.arg[0], along), b = operand(x.arg[x.count > 1 ? 1 : 0], along);
    if (x.op == ExprOp::where) {
      const Operand c = operand(x.arg[2], along);
      if (x.kind == ExprKind::real) return choose<C>(to, a, b, c, rows, columns);
      if (x.kind == ExprKind::boolean) return choose<Truth>(to, a, b, c, rows, columns);
      return choose<I>(to, a, b, c, rows, columns);
    }
    switch (x.op) {
      case ExprOp::to_float:
        return to_float<I>(x, to, a, rows, columns);
      case ExprOp::to_int:
        return to_int<I>(x, to, a, rows, columns);
      case ExprOp::shr_by:
        return map<I>(to, a, rows, columns,
                      [by = min(x.integer, kTopBit<I>)](Vec<I> p) { return p >> static_cast<I>(by); });
      case ExprOp::bits_of:
        return map<I>(to, a, rows, columns, [by = static_cast<I>(x.integer)](Vec<I> p) { return p & by; });
      case ExprOp::power_by:
        return power(static_cast<C>(x.real), to, a, rows, columns);
      default:
        break;
    }
    switch (x.arg_kind) {
      case ExprKind::boolean:
        return operation<Truth, 'b'>(x.op, to, a, b, rows, columns);
      case ExprKind::integer:
        return operation<I, 'i'>(x.op, to, a, b, rows, columns);
      case ExprKind::real:
        return operation<C, 'f'>(x.op, to, a, b, rows, columns);
    }
  }

  template <class I>
  void leaf(const ExprValue& x, Operand to, int rows, int columns) const {
    switch (x.op) {
      case ExprOp::score:
        return;
      case ExprOp::query:
        // Lanes behind the last query repeat it: no value is out of what was proved.
        for (int i = 0; i < columns; i++) to.at<I>(0, 0)[i] = static_cast<I>(min(m0_ + i, m0_ + rows_ - 1));
        return;
      case ExprOp::key:
        for (int j = 0; j < rows; j++)
          for (int v = 0; v < lanes; v++) to.at<I>(j, 0)[v] = static_cast<I>(n0_ + j);
        return;
      case ExprOp::batch:
        return fill(to, static_cast<I>(state_.b));
      case ExprOp::head:
        return fill(to, static_cast<I>(state_.h));
      case ExprOp::queries:
        return fill(to, static_cast<I>(state_.queries));
      case ExprOp::keys:
        return fill(to, static_cast<I>(state_.keys));
      default:
        if (x.kind == ExprKind::real) return fill(to, static_cast<C>(x.real));
        if (x.kind == ExprKind::integer) return fill(to, static_cast<I>(x.integer));
        return fill(to, static_cast<Truth>(-x.integer));
    }
  }

  // Of a query's position and a key's, or the other way round, from those of the first query and the first key.
  template <class I>
  void difference(const ExprValue& x, Operand to, int columns) const {
    using N = std::conditional_t<sizeof(I) == 4, u32, u64>;
    const N first = static_cast<N>(*operand(x.arg[0]).template at<I>(0, 0)) -
                    static_cast<N>(*operand(x.arg[1]).template at<I>(0, 0));
    const bool forward = p_.values[x.arg[0]].extent == per_query;
    I* data = to.at<I>(0, 0);
    for (int i = 0; i < columns; i += kLanes<I>) {
      const Vec<N> step = lane_numbers<N>() + static_cast<N>(i - diagonals_);
      store(data + i, (Vec<I>)(forward ? first + step : first - step));
    }
  }

  static constexpr bool among(char kind, const char* kinds) {
    return *kinds != 0 && (*kinds == kind || among(kind, kinds + 1));
  }
  // An operation of the table on elements of type T, which are of one kind.
  template <class T, char kKind>
  static void operation(ExprOp op, Operand to, Operand a, Operand b, int rows, int columns) {
    switch (op) {
#define TILEWISE_CASE(op, name, arity, takes, gives, code, whole, real)                            \
  case ExprOp::op:                                                                                 \
    if constexpr (among(kKind, takes)) each<T, ExprOp::op, arity, gives>(to, a, b, rows, columns); \
    return;
      TILEWISE_OPERATIONS(TILEWISE_CASE)
#undef TILEWISE_CASE
      default:
        return;
    }
  }
  template <class T, ExprOp kOp, int kArity, char kGives>
  static void each(Operand to, Operand a, Operand b, int rows, int columns) {
    using V = Vec<T>;
    if constexpr (kGives == 'b') {
      compare<T>(to, a, b, rows, columns, [](V p, V q) { return Code<kOp>::template of<T>(p, q); });
    } else if constexpr (kArity == 1) {
      map<T>(to, a, rows, columns, [](V p) { return Code<kOp>::template of<T>(p, p); });
    } else {
      map<T>(to, a, b, rows, columns, [](V p, V q) { return Code<kOp>::template of<T>(p, q); });
    }
  }

  template <class I>
  static void to_float(const ExprValue& x, Operand to, Operand a, int rows, int columns) {
    if (x.arg_kind == ExprKind::boolean)
      return turn<C, Truth, C>(to, a, rows, columns,
                               [](C* r, const Truth* p) { store(r, __builtin_convertvector(-load(p), Vec<C>)); });
    if (x.arg_kind == ExprKind::integer)
      return turn<C, I, I>(to, a, rows, columns, [](C* r, const I* p) { store_converted(r, load(p)); });
    map<C>(to, a, rows, columns, [](Vec<C> p) { return p; });
  }
  template <class I>
  static void to_int(const ExprValue& x, Operand to, Operand a, int rows, int columns) {
    if (x.arg_kind == ExprKind::boolean)
      return turn<I, Truth, I>(to, a, rows, columns, [](I* r, const Truth* p) { store(r, -truth_as(p, I{})); });
    if (x.arg_kind == ExprKind::real)
      return turn<I, C, I>(to, a, rows, columns, [](I* r, const C* p) { store(r, to_integers(p, I{})); });
    map<I>(to, a, rows, columns, [](Vec<I> p) { return p; });
  }

  // The exponents that torch has short forms for, and any other.
  static void power(C by, Operand to, Operand a, int rows, int columns) {
    using V = Vec<C>;
    constexpr C one = 1;
    if (by == 2) return map<C>(to, a, rows, columns, [](V p) { return p * p; });
    if (by == 3) return map<C>(to, a, rows, columns, [](V p) { return p * p * p; });
    if (by == -1) return map<C>(to, a, rows, columns, [](V p) { return one / p; });
    if (by == -2) return map<C>(to, a, rows, columns, [](V p) { return one / (p * p); });
    if (by == static_cast<C>(0.5)) return map<C>(to, a, rows, columns, [](V p) { return square_root(p); });
    if (by == static_cast<C>(-0.5)) return map<C>(to, a, rows, columns, [](V p) { return one / square_root(p); });
    map<C>(to, a, rows, columns, [=](V p) { return each_lane<C>(p, [=](C y) { return power_of(y, by); }); });
  }

 public:
  // Where the elements of a tensor lie that a load reads: offsets by `stride`, every index moved into its dimension.
  template <class I>
  class Places {
   public:
    Places(const ExprRun& run, const ExprValue& x, const i64* stride) : stride_(stride), count_(x.count) {
      const ExprTensor& t = run.p_.tensors[x.slot];
      bool queries = false;
      for (int d = 0; d < count_; d++) {
        last_[d] = t.size[d] - 1;
        index_[d] = run.operand(x.arg[d], x.extent == per_diagonal);
        kind_[d] = run.p_.values[x.arg[d]].extent;
        if (kind_[d] == whole_tile) base_ += moved(index_[d].at<I>(0, 0)[0], d);
        queries |= kind_[d] == per_query;
      }
      by_query_ = queries;
      if (!queries) return;
      for (int i = 0; i < run.width_; i += kLanes<I>) {
        Vec<I> sum{};
        for (int d = 0; d < count_; d++)
          if (kind_[d] == per_query) sum += moved(load(index_[d].at<I>(0, i)), d);
        store(queries_ + i, sum);
      }
    }
    // Whether the keys' elements lie side by side, each query's by themselves.
    bool rows_of_keys(int rows) const {
      for (int d = 0; d < count_; d++)
        if (kind_[d] >= per_diagonal) return false;
      if (!by_query_ || rows < 2) return false;
      const i64 first = row(0);
      for (int j = 1; j < rows; j++)
        if (row(j) != first + j) return false;
      return true;
    }
    i64 query(int i) const { return queries_[i]; }
    // What the tile and key j contribute.
    i64 row(int j) const {
      i64 at = base_;
      for (int d = 0; d < count_; d++)
        if (kind_[d] == per_key) at += moved(index_[d].at<I>(j, 0)[0], d);
      return at;
    }
    // Of the lanes from i on, kLanes<I> of them.
    Vec<I> vector(i64 row, int j, int i) const {
      Vec<I> at = set(static_cast<I>(row));
      if (by_query_) at += load(queries_ + i);
      for (int d = 0; d < count_; d++)
        if (kind_[d] >= per_diagonal) at += moved(load(index_[d].at<I>(j, i)), d);
      return at;
    }

   private:
    i64 moved(I index, int d) const { return max(0, min(index, last_[d])) * stride_[d]; }
    Vec<I> moved(Vec<I> index, int d) const {
      const Vec<I> none{}, last = set(static_cast<I>(last_[d]));
      index = index > last ? last : index;
      return (index < none ? none : index) * static_cast<I>(stride_[d]);
    }
    const i64* stride_;
    int count_;
    bool by_query_;
    i64 base_ = 0, last_[kMaxRank];
    int kind_[kMaxRank];
    Operand index_[kMaxRank];
    alignas(kVectorBytes) I queries_[kTileQueries];
  };

 private:
  static C element(const C* data, i64 at, C) { return data[at]; }
  template <class I>
  static I element(const i64* data, i64 at, I) {
    return static_cast<I>(data[at]);
  }
  static Truth element(const unsigned char* data, i64 at, Truth) { return data[at] ? -1 : 0; }

  // The elements at `at`; neighbours are read as they lie.
  template <class T, class I, class From>
  static void pick(T* to, const From* data, Vec<I> at) {
    const i64 first = at[0];
    const Vec<I> row = lane_numbers<I>() + static_cast<I>(first);
    if (bits_of_mask<I>(at == row) == kAllLanes<I>) {
      for (int i = 0; i < kLanes<I>; i++) to[i] = element(data, first + i, T{});
      return;
    }
#if TILEWISE_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4 && sizeof(From) == 4 && sizeof(I) == 4) {
      const __m512 picked = _mm512_i32gather_ps((__m512i)at, reinterpret_cast<const float*>(data), 4);
      std::memcpy(to, &picked, sizeof picked);
      return;
    }
#endif
    for (int i = 0; i < kLanes<I>; i++) to[i] = element(data, at[i], T{});
  }

  template <class I>
  void gather(const ExprValue& x, Operand to, int rows, int columns) const {
    const ExprTensor& t = p_.tensors[x.slot];
    switch (x.kind) {
      case ExprKind::real:
        return gather<I, C>(x, to, rows, columns, static_cast<const C*>(t.data));
      case ExprKind::integer:
        return gather<I, I>(x, to, rows, columns, static_cast<const i64*>(t.data));
      case ExprKind::boolean:
        return gather<I, Truth>(x, to, rows, columns, static_cast<const unsigned char*>(t.data));
    }
  }
  template <class I, class T, class From>
  void gather(const ExprValue& x, Operand to, int rows, int columns, const From* data) const {
    const ExprTensor& t = p_.tensors[x.slot];
    bool none = false;
    for (int d = 0; d < t.rank; d++) none |= t.size[d] == 0;
    if (none) {
      for (int j = 0; j < rows; j++)
        for (int i = 0; i < columns; i++) to.at<T>(j, 0)[i] = T{};
      return;
    }
    const Places<I> places(*this, x, t.stride);
    if constexpr (std::is_same_v<T, From> && std::is_same_v<T, C>) {
      if (x.extent == per_pair && places.rows_of_keys(rows)) return turn_rows(places, to, rows, columns, data);
    }
    for (int j = 0; j < rows; j++) {
      T* r = to.at<T>(j, 0);
      const i64 row = places.row(j);
      if (x.extent == whole_tile || x.extent == per_key) {
        const T value = element(data, row, T{});
        for (int v = 0; v < lanes; v++) r[v] = value;
        continue;
      }
      for (int i = 0; i < columns; i += kLanes<I>) pick<T, I>(r + i, data, places.vector(row, j, i));
    }
  }

  // Rows along the keys, one per query, turned so that queries lie side by side.
  template <class P>
  static void turn_rows(const P& places, Operand to, int rows, int columns, const C* data) {
    data += places.row(0);
    for (int i = 0; i < columns; i += lanes) {
      for (int j = 0; j < rows; j += lanes) {
        Vec<C> r[lanes];
        TW_UNROLL(16)
        for (int x = 0; x < lanes; x++) r[x] = load_first(data + places.query(i + x) + j, rows - j);
        transpose<C>(r);
        for (int x = 0; x < lanes && j + x < rows; x++) store(to.at<C>(j + x, i), r[x]);
      }
    }
  }

  const ExprProgram& p_;
  State& state_;
  char *base_[kExtents], *queries_;
  i64 size_[kExtents];
  i64 m0_ = 0;
  int rows_ = 0, width_ = 0;
  C* s_ = nullptr;
  i64 n0_ = 0;
  // Where the diagonal of the first key and the first query lies in its register: of the keys that diagonals were
  // computed for, and of those now looked at.
  int diagonals_ = kDiagonals, diagonal_ = kDiagonals;
};

}  // namespace tilewise::TILEWISE_ISA
