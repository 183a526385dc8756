// Expressions: what a mask or a score says of one pair (query, key), as a graph whose nodes stand in the order of
// evaluation, and the program that kernels run. Nothing here depends on an instruction set.
#pragma once

#include "base/args.h"

namespace tilewise {

// The operations: X(operation, name, arity, takes, gives, vector code, range of integers, range of floats). The row is
// all that the core needs of one, so that the interpreter, compiled code and the ranges cannot disagree.
// - name: as in variants/operations.py.
// - takes: the kinds that its arguments may have, which are of one kind: letters of "bif".
// - gives: the kind of its value; '=' for that of the arguments.
// - vector code: of a Vec<C> `a` and another one `b`, the same one if there is one argument (expressions/integers.h,
//   functions.h). Booleans are integers, all ones or zeros, and so is the result where it gives them.
// - ranges: of a Range `a` and another one `b` (expressions/ranges.cc); booleans are the integers 0 and 1.
// clang-format off
#define TILEWISE_FUNCTION(X, name, code, range) X(name, name, 1, "f", '=', code, any_integer(), range)  // of one float
#define TILEWISE_OPERATIONS(X) \
  X(add, add, 2, "if", '=', plus(a, b, C{}), whole_sum(a, b), sum(a, b)) \
  X(sub, sub, 2, "if", '=', minus(a, b, C{}), whole_difference(a, b), sum(a, negative(b))) \
  X(mul, mul, 2, "if", '=', times(a, b, C{}), whole_product(a, b), product(a, b)) \
  X(floordiv, floordiv, 2, "if", '=', floor_quotient(a, b, C{}), divided(a, b), any_real()) \
  X(mod, mod, 2, "if", '=', floor_remainder(a, b, C{}), remainder(a, b), real_remainder(a, b)) \
  X(min, min, 2, "if", '=', least(a, b, C{}), lesser(a, b), negative(larger(negative(a), negative(b)))) \
  X(max, max, 2, "if", '=', largest(a, b, C{}), greater(a, b), larger(a, b)) \
  X(neg, neg, 1, "if", '=', opposite(a, C{}), whole_negative(a), negative(a)) \
  X(abs, abs, 1, "if", '=', magnitude(a, C{}), whole_magnitude(a), magnitude(a)) \
  X(sign, sign, 1, "if", '=', sign_of(a, C{}), whole_sign(a), sign(a)) \
  X(div, div, 2, "f", '=', a / b, any_integer(), quotient(a, b)) \
  X(pow, pow, 2, "f", '=', each_lane<C>(a, b, [](C x, C y) { return power_of(x, y); }), any_integer(), power(a, b)) \
  TILEWISE_FUNCTION(X, exp, rounded(exp_full(a, C{}), C{}), increasing(a, std::exp, 0, INFINITY)) \
  TILEWISE_FUNCTION(X, exp2, rounded(exp2_full(a, C{}), C{}), increasing(a, std::exp2, 0, INFINITY)) \
  TILEWISE_FUNCTION(X, log, log_full(a, C{}), logarithm(a, std::log)) \
  TILEWISE_FUNCTION(X, log2, log2_full(a, C{}), logarithm(a, std::log2)) \
  TILEWISE_FUNCTION(X, tanh, tanh_of(a, C{}), increasing(a, std::tanh, -1, 1)) \
  TILEWISE_FUNCTION(X, sigmoid, sigmoid(a, C{}), increasing(a, logistic, 0, 1)) \
  TILEWISE_FUNCTION(X, sqrt, square_root(a), root(a)) \
  TILEWISE_FUNCTION(X, rsqrt, static_cast<C>(1) / square_root(a), inverse_root(a)) \
  TILEWISE_FUNCTION(X, sin, sin_or_cos<false>(a), wave(a)) \
  TILEWISE_FUNCTION(X, cos, sin_or_cos<true>(a), wave(a)) \
  TILEWISE_FUNCTION(X, floor, (round_to<Toward::down>(a, C{})), rounded(a, std::floor)) \
  TILEWISE_FUNCTION(X, ceil, (round_to<Toward::up>(a, C{})), rounded(a, std::ceil)) \
  TILEWISE_FUNCTION(X, round, (round_to<Toward::nearest>(a, C{})), rounded(a, std::nearbyint)) \
  TILEWISE_FUNCTION(X, trunc, (round_to<Toward::zero>(a, C{})), rounded(a, std::trunc)) \
  X(shl, shl, 2, "i", '=', shifted_left(a, b, C{}), shifted(x.op, a, b), any_real()) \
  X(shr, shr, 2, "i", '=', shifted_right(a, b, C{}), shifted(x.op, a, b), any_real()) \
  X(all, and, 2, "bi", '=', a & b, bits(x.op, a, b), any_real()) \
  X(any, or, 2, "bi", '=', a | b, bits(x.op, a, b), any_real()) \
  X(differ, xor, 2, "bi", '=', a ^ b, bits(x.op, a, b), any_real()) \
  X(negate, not, 1, "bi", '=', ~a, flipped(x.kind, a), any_real()) \
  X(lt, lt, 2, "if", 'b', a < b, comparison(x.op, a, b), real_comparison(x.op, a, b)) \
  X(le, le, 2, "if", 'b', a <= b, comparison(x.op, a, b), real_comparison(x.op, a, b)) \
  X(eq, eq, 2, "bif", 'b', a == b, comparison(x.op, a, b), real_comparison(x.op, a, b)) \
  X(ne, ne, 2, "bif", 'b', a != b, comparison(x.op, a, b), real_comparison(x.op, a, b))

#define TILEWISE_NAME(op, name, arity, takes, gives, code, whole, real) op,
enum class ExprOp : unsigned char {
  score, batch, head, query, key, queries, keys,  // leaves: s b h m n M N
  constant, load,
  TILEWISE_OPERATIONS(TILEWISE_NAME)
  where, to_float, to_int,
  shr_by, bits_of, power_by,  // by a constant: what becomes of divisions of integers, and of pow
  difference                  // of positions: what becomes of m - n and n - m
};
#undef TILEWISE_NAME
// clang-format on
enum class ExprKind : unsigned char { boolean, integer, real };

constexpr int kMaxOutputs = kMaxLoads + 2;

// A captured tensor: bytes, int64, or floats of the computing type; strides in elements.
struct ExprTensor {
  const void* data = nullptr;
  int rank = 0;
  ExprKind kind = ExprKind::real;
  i64 size[kMaxRank] = {}, stride[kMaxRank] = {};
};

// What values a node may have. Of floats `low` and `high` bound the finite ones.
struct ExprRange {
  i64 least, most;  // booleans: 0 and 1
  double low, high;
  bool nan, minus_infinity, infinity;
};

// The pairs that ranges are asked for; all bounds inclusive.
struct ExprBox {
  i64 b[2], h[2], m[2], n[2], queries[2], keys[2];
};

// Scratch memory of a program: a header, then the registers by extent, each with room for so many elements. What does
// not depend on the query fills a vector, of at most 16 lanes; a piece has 16 keys, a tile 64 queries, a block of
// pieces at most kExprKeys keys.
constexpr i64 kExprHeader = 192;
constexpr int kExprTiles = 8;  // of which the values per query are kept
constexpr int kExtents = 5;
constexpr int kExprKeys = 256;
constexpr i64 kRegisterElements[kExtents] = {16, 64, 16 * 16, kExprKeys + 64, 16 * 64};
constexpr int kDiagonals = 16;  // where the diagonal of a piece's first key and the first query lies in its register

// What a value depends on. Of m - n alone (as relative positions are): it is the same along a diagonal of the tile.
enum ExprExtent : int { whole_tile = 0, per_query = 1, per_key = 2, per_diagonal = 3, per_pair = 4 };

// One value of a program. Values of one extent share a set of registers.
struct ExprValue {
  ExprOp op;
  ExprKind kind, arg_kind;  // arg_kind: of the last argument
  unsigned char extent, count;
  unsigned char follows;  // 1: m plus what holds for the tile, 2: n plus that
  short reg, arg[kMaxRank];
  short slot;
  i64 integer;
  double real;
};

// What a program is run for, which says where compiled code leaves its outputs: a mask's in `bits`, a score and its
// derivative in the place of the scores and in `gain`, all others in their registers.
enum class ExprUse : unsigned char { mask, score, loads };

// What compiled code is given for some keys of a tile: the registers by extent, of which those of a tile and of its
// queries are filled; element (j, i) of the scores at j * width + i.
struct ExprFrame {
  char* const* registers;
  const ExprTensor* tensors;
  void *s, *gain, *peak;  // of a score; `gain` may be null, `peak` receives the largest score of each query
  std::uint64_t* bits;    // of a mask, a word per key
  i64 n0;
  int count, width, rows;  // at most kExprKeys keys
  double scale;            // the scores are yet to be multiplied by it
};
using ExprCompiled = void (*)(ExprFrame*);

// How the interpreter makes the last values of a score: in one pass over a piece, the scores scaled before and the
// largest of each query found on the way. An operation with a value x of every pair and another one; `from` and `not`:
// x is the second argument. Or a function of x times (or over) one number, times another, each of them or none.
enum class ExprEnd : unsigned char { copy, add, sub, sub_from, mul, where, where_not, tanh, sigmoid };
struct ExprTail {
  ExprEnd end = ExprEnd::copy;
  bool over = false;                    // x is divided
  bool scales = false;                  // x is the score, which nothing else takes
  bool keys = false;                    // a value of a pair takes one of a key
  bool alone = false;                   // no other value is of a pair, nor is one of a key taken
  int begin = 0;                        // the first value made so
  int x = -1, before = -1, after = -1;  // places; `before` of an operation: the other argument, `after`: a condition
};

// An expression as it is run: the values that the outputs need, first those that hold for a whole tile, then those
// per query, per key, per diagonal, per pair. Integers are 32 bits wide where they all fit, else 64 (with float64
// always).
struct ExprProgram {
  const ExprValue* values;
  const ExprTensor* tensors;  // by slot
  const ExprRange* held;      // by slot: what an integer tensor holds
  int begin[kExtents + 1];    // the first value of each extent, and the end
  int registers[kExtents];
  int outputs, output[kMaxOutputs];
  int loads;                  // of which a gradient is wanted
  ExprValue load[kMaxLoads];  // their index arguments are kept like outputs
  bool wide;                  // 64-bit integers
  bool wide_floats;           // float64
  ExprTail tail;              // of a score
  i64 room, bytes;            // where its scratch memory begins, and its size
  ExprCompiled compiled;      // does the work of all values per key and per pair; null where nothing is compiled
};

// Ranges of all values over a box. `proof`: what has any value (x // 0, a shift too far, NaN as an integer) may be
// left out, since nothing depends on it.
void expr_ranges(const ExprProgram& program, const ExprBox& box, bool proof, ExprRange* ranges);

// Whether a boolean program is false (0) for all pairs of a box, for some (1) or for none (2).
int expr_cover(const ExprProgram& program, const ExprBox& box);

}  // namespace tilewise
