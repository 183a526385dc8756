// Expressions on every instruction set against a scalar evaluator: graphs drawn at random, functions by their error in
// units of the last place, covers of boxes, tensors in guarded memory.
#pragma once

#include <functional>

#include "check.h"
#include "expressions/compile.h"

namespace tilewise::test {

// A value of any kind. `any`: it may be anything (x // 0, a shift too far, NaN as an integer), and is not compared.
struct Scalar {
  i64 whole = 0;
  double real = 0;
  bool any = false;
};

struct Pair {
  i64 b, h, m, n, queries, keys;
  double s;
};

// A graph under construction, with its tensors.
struct Drawing {
  std::vector<ExprNode> nodes;
  std::vector<ExprKind> kinds;
  std::vector<ExprTensor> tensors;

  int add(ExprOp op, std::vector<int> args = {}, ExprKind kind = ExprKind::boolean, i64 whole = 0, double real = 0) {
    ExprNode node;
    node.op = op, node.kind = kind, node.integer = whole, node.real = real;
    for (int arg : args) node.arg[node.count++] = arg;
    nodes.push_back(node);
    const std::string wrong = check_nodes(nodes, kinds);
    if (!wrong.empty()) fail("a test's own expression: " + wrong);
    return static_cast<int>(nodes.size()) - 1;
  }
  int whole(i64 x) { return add(ExprOp::constant, {}, ExprKind::integer, x); }
  int real(double x) { return add(ExprOp::constant, {}, ExprKind::real, 0, x); }
  ExprKind kind(int node) const { return kinds[static_cast<std::size_t>(node)]; }
};

class Evaluator {
 public:
  Evaluator(const Drawing& d, bool wide) : d_(d), wide_(wide) {}

  std::vector<Scalar> values(const Pair& p) const {
    std::vector<Scalar> all;
    for (std::size_t i = 0; i < d_.nodes.size(); i++) all.push_back(one(d_.nodes[i], d_.kinds[i], p, all));
    return all;
  }

 private:
  double cut(double x) const { return wide_ ? x : static_cast<float>(x); }

  Scalar one(const ExprNode& node, ExprKind kind, const Pair& p, const std::vector<Scalar>& all) const {
    const auto arg = [&](int i) -> const Scalar& { return all[static_cast<std::size_t>(node.arg[i])]; };
    switch (node.op) {
      case ExprOp::score:
        return {0, cut(p.s)};
      case ExprOp::batch:
        return {p.b};
      case ExprOp::head:
        return {p.h};
      case ExprOp::query:
        return {p.m};
      case ExprOp::key:
        return {p.n};
      case ExprOp::queries:
        return {p.queries};
      case ExprOp::keys:
        return {p.keys};
      case ExprOp::constant:
        return {node.integer, cut(node.real)};
      case ExprOp::load:
        return load(node, all);
      case ExprOp::where: {
        if (arg(0).any) return {0, 0, true};
        return arg(arg(0).whole ? 1 : 2);
      }
      default:
        break;
    }
    Scalar r;
    for (int i = 0; i < node.count; i++) r.any |= arg(i).any;
    if (r.any) return r;
    const ExprKind of = d_.kinds[static_cast<std::size_t>(node.arg[node.count - 1])];
    const Scalar &a = arg(0), &b = arg(node.count - 1);
    if (of == ExprKind::real)
      of_reals(node.op, a.real, b.real, r);
    else
      of_integers(node.op, of, a.whole, b.whole, r);
    if (kind == ExprKind::real) r.real = cut(r.real);
    return r;
  }

  Scalar load(const ExprNode& node, const std::vector<Scalar>& all) const {
    const ExprTensor& t = d_.tensors[static_cast<std::size_t>(node.integer)];
    i64 at = 0;
    for (int d = 0; d < t.rank; d++) {
      const Scalar& index = all[static_cast<std::size_t>(node.arg[d])];
      if (index.any) return {0, 0, true};
      if (t.size[d] == 0) return {};
      at += std::clamp<i64>(index.whole, 0, t.size[d] - 1) * t.stride[d];
    }
    for (int d = 0; d < t.rank; d++)
      if (t.size[d] == 0) return {};
    if (t.kind == ExprKind::real) return {0, test::get(wide_ ? DType::f64 : DType::f32, t.data, at)};
    if (t.kind == ExprKind::integer) return {static_cast<const i64*>(t.data)[at]};
    return {static_cast<const char*>(t.data)[at] != 0};
  }

  static void of_integers(ExprOp op, ExprKind of, i64 a, i64 b, Scalar& r) {
    const u64 x = static_cast<u64>(a), y = static_cast<u64>(b);
    switch (op) {
      case ExprOp::add:
        r.whole = static_cast<i64>(x + y);
        break;
      case ExprOp::sub:
        r.whole = static_cast<i64>(x - y);
        break;
      case ExprOp::mul:
        r.whole = static_cast<i64>(x * y);
        break;
      case ExprOp::floordiv:
      case ExprOp::mod: {
        if (b == 0 || (a == INT64_MIN && b == -1)) {
          r.any = true;
          break;
        }
        const i64 rest = a % b;  // of the sign of a
        const bool below = rest != 0 && (rest < 0) != (b < 0);
        r.whole = op == ExprOp::mod ? rest + (below ? b : 0) : a / b - below;
        break;
      }
      case ExprOp::min:
        r.whole = std::min(a, b);
        break;
      case ExprOp::max:
        r.whole = std::max(a, b);
        break;
      case ExprOp::neg:
        r.whole = static_cast<i64>(0 - x);
        break;
      case ExprOp::abs:
        r.whole = a < 0 ? static_cast<i64>(0 - x) : a;
        break;
      case ExprOp::sign:
        r.whole = (a > 0) - (a < 0);
        break;
      case ExprOp::shl:
        r.any = b < 0 || b > 63;
        r.whole = r.any ? 0 : static_cast<i64>(x << y);
        break;
      case ExprOp::shr:
        r.any = b < 0 || b > 63;
        r.whole = r.any ? 0 : a >> b;
        break;
      case ExprOp::all:
        r.whole = a & b;
        break;
      case ExprOp::any:
        r.whole = a | b;
        break;
      case ExprOp::differ:
        r.whole = a ^ b;
        break;
      case ExprOp::negate:
        r.whole = of == ExprKind::boolean ? !a : ~a;
        break;
      case ExprOp::lt:
        r.whole = a < b;
        break;
      case ExprOp::le:
        r.whole = a <= b;
        break;
      case ExprOp::eq:
        r.whole = a == b;
        break;
      case ExprOp::ne:
        r.whole = a != b;
        break;
      default:  // conversions
        r.whole = a;
        r.real = op == ExprOp::to_float ? static_cast<double>(a) : 0;
    }
  }

  void of_reals(ExprOp op, double a, double b, Scalar& r) const {
    const double nan = NAN;
    switch (op) {
      case ExprOp::add:
        r.real = a + b;
        break;
      case ExprOp::sub:
        r.real = a - b;
        break;
      case ExprOp::mul:
        r.real = a * b;
        break;
      case ExprOp::div:
        r.real = a / b;
        break;
      case ExprOp::mod: {
        r.real = std::fmod(a, b);
        if (r.real != 0 && (r.real < 0) != (b < 0)) r.real = cut(r.real + b);
        break;
      }
      case ExprOp::floordiv: {
        if (b == 0) {
          r.real = a / b;
          break;
        }
        const double rest = std::fmod(a, b);
        double q = cut(cut(a - rest) / b);
        if (rest != 0 && (rest < 0) != (b < 0)) q = cut(q - 1);
        r.real = q == 0 ? std::copysign(0.0, a / b) : std::floor(q) + (q - std::floor(q) > 0.5);
        break;
      }
      case ExprOp::min:
        r.real = std::isnan(a) || std::isnan(b) ? nan : std::fmin(a, b);
        break;
      case ExprOp::max:
        r.real = std::isnan(a) || std::isnan(b) ? nan : std::fmax(a, b);
        break;
      case ExprOp::neg:
        r.real = -a;
        break;
      case ExprOp::abs:
        r.real = std::fabs(a);
        break;
      case ExprOp::sign:
        r.real = (a > 0) - (a < 0);
        break;
      case ExprOp::sqrt:
        r.real = std::sqrt(a);
        break;
      case ExprOp::floor:
        r.real = std::floor(a);
        break;
      case ExprOp::ceil:
        r.real = std::ceil(a);
        break;
      case ExprOp::round:
        r.real = std::nearbyint(a);
        break;
      case ExprOp::trunc:
        r.real = std::trunc(a);
        break;
      case ExprOp::lt:
        r.whole = a < b;
        break;
      case ExprOp::le:
        r.whole = a <= b;
        break;
      case ExprOp::eq:
        r.whole = a == b;
        break;
      case ExprOp::ne:
        r.whole = a != b;
        break;
      case ExprOp::to_int:
        r.any = !(std::fabs(a) < 9e18);
        r.whole = r.any ? 0 : static_cast<i64>(a);
        break;
      default:
        r.real = a;  // to_float
    }
  }

  const Drawing& d_;
  bool wide_;
};

// A place in a call: the piece that is asked for, and the problem around it.
struct Spot {
  Problem problem;
  i64 b, h, m0, n0;
  int rows, count;
  std::vector<double> s;
};

inline Spot draw_spot(u64 seed, DType dtype, i64 longest) {
  Spot x;
  x.problem.dtype = dtype;
  x.problem.batch = 3, x.problem.heads = 4;
  x.problem.queries = 1 + static_cast<i64>(scramble(seed) % static_cast<u64>(longest));
  x.problem.keys = 1 + static_cast<i64>(scramble(seed + 1) % static_cast<u64>(longest));
  x.b = static_cast<i64>(scramble(seed + 2) % 3), x.h = static_cast<i64>(scramble(seed + 3) % 4);
  x.m0 = x.problem.queries / 64 * 64 == x.problem.queries ? 0 : x.problem.queries / 64 * 64;
  x.n0 = (x.problem.keys - 1) / 16 * 16;
  if (scramble(seed + 4) % 2) x.m0 = x.m0 / 128 * 64, x.n0 = x.n0 / 32 * 16;
  x.rows = static_cast<int>(std::min<i64>(64, x.problem.queries - x.m0));
  x.count = static_cast<int>(std::min<i64>(16, x.problem.keys - x.n0));
  for (int i = 0; i < x.rows * x.count; i++) x.s.push_back(std::round(uniform(seed, static_cast<u64>(i)) * 400) / 8);
  return x;
}

// Tensors of every kind and of up to three dimensions, with gaps, in guarded memory; one is empty, one has no
// dimension.
class Captures {
 public:
  Captures(u64 seed, bool wide, Place place) {
    for (int i = 0; i < 9; i++) {
      ExprTensor t;
      t.kind = static_cast<ExprKind>(i % 3);
      t.rank = i == 3 || i == 4 ? 0 : 1 + static_cast<int>(scramble(seed + static_cast<u64>(i)) % 3);
      i64 extent = 1;
      for (int d = t.rank; d-- > 0;) {
        t.size[d] = 1 + static_cast<i64>(scramble(seed * 7 + static_cast<u64>(i * 5 + d)) % 40);
        t.stride[d] = scramble(seed * 9 + static_cast<u64>(i * 5 + d)) % 6 == 0 ? 0 : extent;
        extent = t.stride[d] == 0 ? extent : extent * t.size[d] + d % 2;
      }
      i64 count = 1;
      for (int d = 0; d < t.rank; d++) count += (t.size[d] - 1) * t.stride[d];
      if (i == 5) t.size[0] = 0, count = 0;
      std::vector<double> values;
      for (i64 x = 0; x < count; x++)
        values.push_back(std::round(uniform(seed + 5, static_cast<u64>(x * 9 + i)) * (i > 5 ? 40 : 200)) /
                         (i > 5 ? 1 : 4));
      if (t.kind == ExprKind::real && wide) t.data = keep(std::vector<double>(values), place);
      if (t.kind == ExprKind::real && !wide) t.data = keep(std::vector<float>(values.begin(), values.end()), place);
      if (t.kind == ExprKind::integer) t.data = keep(std::vector<i64>(values.begin(), values.end()), place);
      if (t.kind == ExprKind::boolean) {
        std::vector<char> bytes;
        for (double x : values) bytes.push_back(x > 0 ? (x > 5 ? 1 : 2) : 0);
        t.data = keep(std::move(bytes), place);
      }
      tensors.push_back(t);
    }
  }
  std::vector<ExprTensor> tensors;

 private:
  template <class T>
  const void* keep(std::vector<T> values, Place place) {
    auto array = std::make_shared<Array<T>>(values, place);
    held_.push_back(array);
    return array->data();
  }
  std::vector<std::shared_ptr<void>> held_;
};

// Functions of one argument by their error, which is at most `most` units in the last place.
struct Function {
  ExprOp op;
  long double (*truth)(long double);
  double low, high, most;
};
inline std::vector<Function> functions(bool wide) {
  const double big = wide ? 700 : 85;
  return {{ExprOp::exp, [](long double x) { return std::exp(x); }, -big, big, 2},
          {ExprOp::exp, [](long double x) { return std::exp(x); }, -1e-3, 1e-3, 2},
          {ExprOp::exp2, [](long double x) { return std::exp2(x); }, -big, big, 2},
          {ExprOp::exp2, [](long double x) { return std::exp2(x); }, -1, 1, 2},
          {ExprOp::log, [](long double x) { return std::log(x); }, 0.5, 2, 2},
          {ExprOp::log, [](long double x) { return std::log(x); }, 0.99, 1.01, 2},
          {ExprOp::log, [](long double x) { return std::log(x); }, 1e-30, 1e5, 2},
          {ExprOp::log2, [](long double x) { return std::log2(x); }, 0.5, 2, 2.5},
          {ExprOp::log2, [](long double x) { return std::log2(x); }, 1, 1e6, 2},
          {ExprOp::tanh, [](long double x) { return std::tanh(x); }, -4, 4, 3},
          {ExprOp::tanh, [](long double x) { return std::tanh(x); }, -1e-3, 1e-3, 3},
          {ExprOp::sigmoid, [](long double x) { return 1 / (1 + std::exp(-x)); }, -60, 60, 2.5},
          {ExprOp::sqrt, [](long double x) { return std::sqrt(x); }, 0, 1e6, 0.501},
          {ExprOp::rsqrt, [](long double x) { return 1 / std::sqrt(x); }, 1e-6, 1e6, 1.5},
          {ExprOp::sin, [](long double x) { return std::sin(x); }, -10, 10, 2},
          {ExprOp::sin, [](long double x) { return std::sin(x); }, -9e4, 9e4, 2},
          {ExprOp::sin, [](long double x) { return std::sin(x); }, -1e9, 1e9, 2},
          {ExprOp::sin, [](long double x) { return std::sin(x); }, -1e-4, 1e-4, 2},
          {ExprOp::cos, [](long double x) { return std::cos(x); }, -10, 10, 2},
          {ExprOp::cos, [](long double x) { return std::cos(x); }, -9e4, 9e4, 2},
          {ExprOp::cos, [](long double x) { return std::cos(x); }, -1e9, 1e9, 2}};
}

// An operation of the table.
struct Known {
  ExprOp op;
  std::size_t arity;
  const char* takes;
};
#define TILEWISE_KNOWN(op, name, arity, takes, gives, code, whole, real) {ExprOp::op, arity, takes},
constexpr Known kKnown[] = {TILEWISE_OPERATIONS(TILEWISE_KNOWN)};
#undef TILEWISE_KNOWN

// Those that take arguments of a kind ("bif"), but for those whose values are not exact: they are tested by their
// error.
inline std::vector<Known> exact(char kind) {
  std::vector<Known> found;
  for (const Known& known : kKnown) {
    bool good = std::strchr(known.takes, kind) != nullptr && known.op != ExprOp::pow;
    for (const Function& f : functions(false)) good &= f.op != known.op || f.most < 1;
    if (good) found.push_back(known);
  }
  return found;
}

// Nodes of every operation whose result is exact (or correctly rounded) for exact arguments.
inline void draw_nodes(Drawing& d, u64 seed, int count) {
  u64 state = seed * 77777;
  const auto next = [&](u64 below) { return static_cast<int>(scramble(state++) % below); };
  for (ExprOp leaf :
       {ExprOp::score, ExprOp::batch, ExprOp::head, ExprOp::query, ExprOp::key, ExprOp::queries, ExprOp::keys})
    d.add(leaf);
  // Relative positions: query 3, key 4, numbers of both 5 and 6.
  d.add(ExprOp::sub, {3, 4}), d.add(ExprOp::sub, {4, 3});
  d.add(ExprOp::sub, {d.add(ExprOp::add, {6, 3}), d.add(ExprOp::sub, {4, 5})});
  d.whole(3), d.whole(-2), d.whole(16), d.whole(seed % 5 == 0 ? i64{1} << 40 : 7);
  d.real(0.5), d.real(-3), d.real(seed % 3 ? 2 : INFINITY), d.real(seed % 4 ? 0.25 : NAN);
  d.add(ExprOp::constant, {}, ExprKind::boolean, 1);
  const auto pick = [&](ExprKind kind) {
    for (;;) {
      // Late ones rather than early ones, so that graphs grow deep.
      const int size = static_cast<int>(d.nodes.size()),
                at = next(3) ? size - 1 - next(12) : next(static_cast<u64>(size));
      if (at >= 0 && d.kind(at) == kind) return at;
    }
  };
  const ExprKind integer = ExprKind::integer, real = ExprKind::real, boolean = ExprKind::boolean;
  static const std::vector<Known> known[] = {exact('b'), exact('i'), exact('f')};
  // One operation of the table, on arguments of a kind.
  const auto draw = [&](ExprKind kind) {
    const std::vector<Known>& all = known[static_cast<int>(kind)];
    const Known& drawn = all[static_cast<std::size_t>(next(all.size()))];
    std::vector<int> args = {pick(kind)};
    if (drawn.op == ExprOp::shl || drawn.op == ExprOp::shr)
      args.push_back(d.add(ExprOp::mod, {pick(kind), d.whole(next(2) ? 6 : 40)}));
    else if (drawn.arity == 2)
      args.push_back(kind == integer && next(3) == 0 ? d.whole(i64{1} << next(8)) : pick(kind));
    d.add(drawn.op, args);
  };
  int loads = 0;
  while (static_cast<int>(d.nodes.size()) < count) {
    switch (next(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        draw(integer);
        break;
      case 4:
      case 5:
      case 6:
        draw(real);
        break;
      case 7:
        draw(boolean);
        break;
      case 8: {
        const ExprKind kind = static_cast<ExprKind>(next(3));
        d.add(ExprOp::where, {pick(boolean), pick(kind), pick(kind)});
        break;
      }
      case 9:
        d.add(next(2) ? ExprOp::to_float : ExprOp::to_int, {pick(static_cast<ExprKind>(next(3)))});
        break;
      default: {
        if (loads++ == kMaxLoads) break;
        const int slot = next(static_cast<u64>(d.tensors.size()));
        std::vector<int> index;
        for (int i = 0; i < d.tensors[static_cast<std::size_t>(slot)].rank; i++) index.push_back(pick(integer));
        d.add(ExprOp::load, index, d.tensors[static_cast<std::size_t>(slot)].kind, slot);
      }
    }
  }
}

// One piece on every instruction set: each output against the evaluator.
inline void check_piece(const Drawing& d, const Spot& spot, const std::vector<int>& outputs, const std::string& what) {
  const bool wide = spot.problem.dtype == DType::f64;
  Problem problem = spot.problem;
  const CompiledExpr compiled(d.nodes, d.kinds, outputs, {}, d.tensors, problem);
  const Evaluator evaluator(d, wide);
  std::vector<std::vector<Scalar>> truth;
  for (int j = 0; j < spot.count; j++)
    for (int i = 0; i < spot.rows; i++)
      truth.push_back(evaluator.values({spot.b, spot.h, spot.m0 + i, spot.n0 + j, problem.queries, problem.keys,
                                        spot.s[static_cast<std::size_t>(j * spot.rows + i)]}));
  std::vector<double> out(outputs.size() * truth.size());
  ExprPiece piece;
  piece.program = &compiled.program();
  piece.b = spot.b, piece.h = spot.h, piece.queries = problem.queries, piece.keys = problem.keys;
  piece.m0 = spot.m0, piece.n0 = spot.n0, piece.rows = spot.rows, piece.count = spot.count;
  piece.s = spot.s.data(), piece.out = out.data();
  for (const Kernels* kernels : instruction_sets()) {
    if (!kernels->expr_piece(piece)) return fail("out of memory");
    for (std::size_t x = 0; x < outputs.size(); x++) {
      const std::size_t node = static_cast<std::size_t>(outputs[x]);
      for (std::size_t at = 0; at < truth.size(); at++) {
        const Scalar& right = truth[at][node];
        if (right.any) continue;
        const double got = out[x * truth.size() + at];
        i64 whole;
        std::memcpy(&whole, &got, 8);
        const bool real = d.kinds[node] == ExprKind::real;
        const i64 wanted = d.kinds[node] == ExprKind::boolean ? -right.whole : right.whole;
        if (real ? got == right.real || (std::isnan(got) && std::isnan(right.real)) : whole == wanted) continue;
        return fail(std::string(kernels->name) + ", " + what + ": node " + std::to_string(node) + " (operation " +
                    std::to_string(static_cast<int>(d.nodes[node].op)) + ") at pair " + std::to_string(at) + " gives " +
                    (real ? number(got) : std::to_string(whole)) + ", should be " +
                    (real ? number(right.real) : std::to_string(wanted)));
      }
    }
  }
}

inline void test_expr_graphs(DType dtype) {
  for (u64 seed = 1; seed <= 400; seed++) {
    if (static_cast<int>(seed) % every != 0) continue;
    Drawing d;
    const Captures captures(seed, dtype == DType::f64, seed % 2 ? Place::end : Place::start);
    d.tensors = captures.tensors;
    draw_nodes(d, seed, 60);
    const Spot spot = draw_spot(seed, dtype, seed % 7 == 0 ? 100000 : 300);
    for (int first = 7; first < static_cast<int>(d.nodes.size()); first += kMaxOutputs) {
      std::vector<int> outputs;
      for (int x = first; x < first + kMaxOutputs && x < static_cast<int>(d.nodes.size()); x++) outputs.push_back(x);
      check_piece(d, spot, outputs, "graph " + std::to_string(seed));
    }
    check_piece(d, spot, {static_cast<int>(d.nodes.size()) - 1}, "graph " + std::to_string(seed) + ", the last node");
  }
}

// Every operation on every mixture of extents, and all counts of rows and keys.
inline void test_expr_extents(DType dtype) {
  for (int count = 1; count <= 16; count++) {
    Drawing d;
    const int m = d.add(ExprOp::query), n = d.add(ExprOp::key), h = d.add(ExprOp::head), s = d.add(ExprOp::score);
    const int distance = d.add(ExprOp::sub, {m, n});
    const int aligned = d.add(ExprOp::sub, {d.add(ExprOp::sub, {n, h}), m});
    std::vector<int> wholes = {m, n, h, distance, aligned}, reals = {s}, outputs;
    for (int x : wholes) reals.push_back(d.add(ExprOp::to_float, {x}));
    for (int a : wholes)
      for (int b : wholes) outputs.push_back(d.add(ExprOp::lt, {a, b}));
    for (int a : reals)
      for (int b : reals) outputs.push_back(d.add(ExprOp::sub, {a, b}));
    Spot spot = draw_spot(static_cast<u64>(count), dtype, 300);
    spot.problem.queries = spot.problem.keys = 200;
    spot.m0 = 64, spot.n0 = 32, spot.rows = count * 4 - count % 3, spot.count = count;
    spot.s.assign(static_cast<std::size_t>(spot.rows * count), 1.25);
    for (std::size_t first = 0; first < outputs.size(); first += kMaxOutputs)
      check_piece(d, spot,
                  std::vector<int>(outputs.begin() + static_cast<i64>(first),
                                   outputs.begin() + static_cast<i64>(std::min(first + kMaxOutputs, outputs.size()))),
                  std::to_string(spot.rows) + " rows, " + std::to_string(count) + " keys");
  }
}

// What is said of a box holds for all of its pairs.
inline void test_expr_cover(DType dtype) {
  int certain = 0;
  for (u64 seed = 1; seed <= 600; seed++) {
    Drawing d;
    const Captures captures(seed, dtype == DType::f64, Place::end);
    d.tensors = captures.tensors;
    draw_nodes(d, seed, 25 + static_cast<int>(seed % 30));
    const Spot spot = draw_spot(seed, dtype, 90);
    const Evaluator evaluator(d, dtype == DType::f64);
    for (int node = 7; node < static_cast<int>(d.nodes.size()); node++) {
      if (d.kind(node) != ExprKind::boolean) continue;
      Problem problem = spot.problem;
      const CompiledExpr compiled(d.nodes, d.kinds, {node}, {}, d.tensors, problem);
      const int cover = expr_cover(compiled.program(), {{spot.b, spot.b},
                                                        {spot.h, spot.h},
                                                        {spot.m0, spot.m0 + spot.rows - 1},
                                                        {spot.n0, spot.n0 + spot.count - 1},
                                                        {problem.queries, problem.queries},
                                                        {problem.keys, problem.keys}});
      if (cover == 1) continue;
      certain++;
      for (int x = 0; x < spot.rows * spot.count; x += 3) {
        const Pair pair = {spot.b,
                           spot.h,
                           spot.m0 + x % spot.rows,
                           spot.n0 + x / spot.rows,
                           problem.queries,
                           problem.keys,
                           spot.s[static_cast<std::size_t>(x)]};
        const Scalar value = evaluator.values(pair)[static_cast<std::size_t>(node)];
        expect(value.any || value.whole == cover / 2,
               "graph " + std::to_string(seed) + ", node " + std::to_string(node) + " is not what its cover says");
      }
    }
  }
  expect(certain > 300, "covers are certain now and then");
}

inline void test_expr_functions(DType dtype) {
  const bool wide = dtype == DType::f64;
  for (const Function& f : functions(wide)) {
    Drawing d;
    d.add(f.op, {d.add(ExprOp::score)});
    for (u64 batch = 0; batch < 8; batch++) {
      Spot spot = draw_spot(batch, dtype, 300);
      spot.problem.queries = spot.problem.keys = 64, spot.m0 = spot.n0 = 0, spot.rows = 64, spot.count = 16;
      spot.s.clear();
      for (u64 i = 0; i < 1024; i++) {
        const double x = f.low + (f.high - f.low) * (uniform(batch + 3, i) + 1) / 2;
        spot.s.push_back(wide ? x : static_cast<float>(x));
      }
      Problem problem = spot.problem;
      const CompiledExpr compiled(d.nodes, d.kinds, {1}, {}, d.tensors, problem);
      std::vector<double> out(1024);
      ExprPiece piece;
      piece.program = &compiled.program(), piece.queries = piece.keys = 64, piece.rows = 64, piece.count = 16;
      piece.s = spot.s.data(), piece.out = out.data();
      for (const Kernels* kernels : instruction_sets()) {
        if (!kernels->expr_piece(piece)) return fail("out of memory");
        for (std::size_t i = 0; i < 1024; i++) {
          const long double truth = f.truth(spot.s[i]);
          const long double unit = std::ldexp(1.0L, std::ilogb(truth) - (wide ? 52 : 23));
          const double error = static_cast<double>(std::fabs(out[i] - truth) / unit);
          if (error / f.most > report.worst) {
            report.worst = error / f.most;
            report.worst_case = std::string(expr_name(f.op)) + " " + kernels->name;
          }
          if (error > f.most)
            fail(std::string(kernels->name) + ": " + expr_name(f.op) + "(" + number(spot.s[i]) + ") is " +
                 number(out[i]) + ", off by " + number(error) + " units");
        }
      }
    }
  }
}

inline void test_expr_specials(DType dtype) {
  const double inf = INFINITY, nan = NAN, tiny = dtype == DType::f64 ? 5e-324 : 1.4e-45;
  struct Case {
    ExprOp op;
    double x, truth;
  };
  const Case cases[] = {{ExprOp::exp, -inf, 0},
                        {ExprOp::exp, inf, inf},
                        {ExprOp::exp, 0, 1},
                        {ExprOp::exp, 2000, inf},
                        {ExprOp::exp, -2000, 0},
                        {ExprOp::exp, nan, nan},
                        {ExprOp::exp2, -inf, 0},
                        {ExprOp::exp2, inf, inf},
                        {ExprOp::exp2, 3, 8},
                        {ExprOp::exp2, nan, nan},
                        {ExprOp::exp2, -149, std::ldexp(1.0, -149)},
                        {ExprOp::log, 0, -inf},
                        {ExprOp::log, -0.0, -inf},
                        {ExprOp::log, 1, 0},
                        {ExprOp::log, inf, inf},
                        {ExprOp::log, -1, nan},
                        {ExprOp::log, nan, nan},
                        {ExprOp::log2, 0, -inf},
                        {ExprOp::log2, inf, inf},
                        {ExprOp::log2, 64, 6},
                        {ExprOp::log2, tiny, dtype == DType::f64 ? -1074.0 : -149.0},
                        {ExprOp::log2, -inf, nan},
                        {ExprOp::tanh, inf, 1},
                        {ExprOp::tanh, -inf, -1},
                        {ExprOp::tanh, nan, nan},
                        {ExprOp::sigmoid, inf, 1},
                        {ExprOp::sigmoid, -inf, 0},
                        {ExprOp::sigmoid, nan, nan},
                        {ExprOp::sqrt, -1, nan},
                        {ExprOp::sqrt, inf, inf},
                        {ExprOp::rsqrt, 0, inf},
                        {ExprOp::rsqrt, inf, 0},
                        {ExprOp::sin, inf, nan},
                        {ExprOp::cos, -inf, nan},
                        {ExprOp::sin, 0, 0},
                        {ExprOp::cos, 0, 1},
                        {ExprOp::sin, nan, nan},
                        {ExprOp::floor, -inf, -inf},
                        {ExprOp::round, 2.5, 2},
                        {ExprOp::round, -3.5, -4},
                        {ExprOp::trunc, -2.7, -2},
                        {ExprOp::ceil, -0.5, 0},
                        {ExprOp::sign, nan, 0},
                        {ExprOp::abs, -inf, inf},
                        {ExprOp::neg, inf, -inf}};
  for (const Case& c : cases) {
    Drawing d;
    d.add(c.op, {d.add(ExprOp::score)});
    Problem problem;
    problem.dtype = dtype, problem.batch = problem.heads = problem.queries = problem.keys = 1;
    const CompiledExpr compiled(d.nodes, d.kinds, {1}, {}, d.tensors, problem);
    double out;
    ExprPiece piece;
    piece.program = &compiled.program(), piece.queries = piece.keys = piece.rows = piece.count = 1;
    piece.s = &c.x, piece.out = &out;
    for (const Kernels* kernels : instruction_sets()) {
      if (!kernels->expr_piece(piece)) return fail("out of memory");
      expect(out == c.truth || (std::isnan(out) && std::isnan(c.truth)),
             std::string(kernels->name) + ": operation " + std::to_string(static_cast<int>(c.op)) + " of " +
                 number(c.x) + " is " + number(out) + ", should be " + number(c.truth));
    }
  }
}

// By constants, of which torch has short forms, and by whatever a node gives.
inline void test_expr_powers(DType dtype) {
  for (const double by : {2.0, 3.0, 1.0, 0.0, 4.0, 0.5, -1.0, -0.5, -2.0, 2.5}) {
    Drawing d;
    const int s = d.add(ExprOp::abs, {d.add(ExprOp::score)}), constant = d.real(by);
    const int zero = d.add(ExprOp::sub, {d.add(ExprOp::to_float, {d.add(ExprOp::key)}), d.real(0)});
    const int same = d.add(ExprOp::where, {d.add(ExprOp::lt, {zero, zero}), zero, constant});
    const std::vector<int> outputs = {d.add(ExprOp::pow, {s, constant}), d.add(ExprOp::pow, {s, same})};
    Spot spot = draw_spot(5, dtype, 70);
    Problem problem = spot.problem;
    const CompiledExpr compiled(d.nodes, d.kinds, outputs, {}, d.tensors, problem);
    std::vector<double> out(2 * spot.s.size());
    ExprPiece piece;
    piece.program = &compiled.program(), piece.queries = problem.queries, piece.keys = problem.keys;
    piece.m0 = spot.m0, piece.n0 = spot.n0, piece.rows = spot.rows, piece.count = spot.count;
    piece.s = spot.s.data(), piece.out = out.data();
    for (const Kernels* kernels : instruction_sets()) {
      if (!kernels->expr_piece(piece)) return fail("out of memory");
      for (std::size_t i = 0; i < out.size(); i++) {
        const double truth = std::pow(std::fabs(spot.s[i % spot.s.size()]), by);
        const double allowed = (dtype == DType::f64 ? 5e-16 : 3e-7) * truth;
        expect(out[i] == truth || std::fabs(out[i] - truth) <= allowed, std::string(kernels->name) + ": pow by " +
                                                                            number(by) + " is " + number(out[i]) +
                                                                            ", should be " + number(truth));
      }
    }
  }
}

inline void test_expr_checks() {
  std::vector<ExprKind> kinds;
  ExprNode node;
  expect(!expr_op("nothing", node) && !expr_op("const_", node), "unknown operations are refused");
  expect(expr_op("load_int", node) && node.op == ExprOp::load && node.kind == ExprKind::integer, "load_int");
  Drawing d;
  d.add(ExprOp::query), d.add(ExprOp::score);
  ExprNode sum;
  sum.op = ExprOp::add, sum.count = 2, sum.arg[1] = 1;
  std::vector<ExprNode> nodes = d.nodes;
  nodes.push_back(sum);
  expect(!check_nodes(nodes, kinds).empty(), "an integer and a float are not added");
  nodes.back().arg[1] = 2;
  expect(!check_nodes(nodes, kinds).empty(), "a node is not its own argument");
  nodes.back().arg[1] = 0, nodes.back().count = 1;
  expect(!check_nodes(nodes, kinds).empty(), "a sum has two arguments");
  // The widths: positions fit into 32 bits, products of large numbers do not.
  for (const i64 factor : {i64{1} << 20, i64{1} << 40}) {
    Drawing e;
    e.add(ExprOp::mul, {e.add(ExprOp::query), e.whole(factor)});
    Problem problem;
    problem.batch = problem.heads = 1, problem.queries = problem.keys = 1000;
    const CompiledExpr compiled(e.nodes, e.kinds, {2}, {}, e.tensors, problem);
    expect(compiled.program().wide == (factor > i64{1} << 30), "integers are as wide as they need to be");
  }
}

}  // namespace tilewise::test
