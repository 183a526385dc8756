// Expressions: what a mask or a score says of one pair (query, key), as a graph whose nodes stand in the order of
// evaluation, and the program that kernels run. Nothing here depends on an instruction set.
#pragma once

#include "base/args.h"

namespace tilewise {

// The functions of one float: X(name, vector code, range). The vector code is of a Vec<C> `a`
// (expressions/functions.h), the range of a Range `a` (expressions/ranges.cc). The row is all that the core needs of a
// function, so that the interpreter, compiled code and the ranges cannot disagree on which there are.
// clang-format off
#define TILEWISE_FUNCTIONS(X) \
  X(exp, rounded(exp_full(a, C{}), C{}), increasing(a, std::exp, 0, INFINITY)) \
  X(exp2, rounded(exp2_full(a, C{}), C{}), increasing(a, std::exp2, 0, INFINITY)) \
  X(log, log_full(a, C{}), logarithm(a, std::log)) \
  X(log2, log2_full(a, C{}), logarithm(a, std::log2)) \
  X(tanh, tanh_of(a, C{}), increasing(a, std::tanh, -1, 1)) \
  X(sigmoid, sigmoid(a, C{}), increasing(a, logistic, 0, 1)) \
  X(sqrt, square_root(a), root(a)) \
  X(rsqrt, static_cast<C>(1) / square_root(a), inverse_root(a)) \
  X(sin, sin_or_cos<false>(a), wave(a)) \
  X(cos, sin_or_cos<true>(a), wave(a)) \
  X(floor, (round_to<Toward::down>(a, C{})), rounded(a, std::floor)) \
  X(ceil, (round_to<Toward::up>(a, C{})), rounded(a, std::ceil)) \
  X(round, (round_to<Toward::nearest>(a, C{})), rounded(a, std::nearbyint)) \
  X(trunc, (round_to<Toward::zero>(a, C{})), rounded(a, std::trunc))

// Which of the others takes which kinds is said in expressions/compile.cc.
#define TILEWISE_NAME(name, code, range) name,
enum class ExprOp : unsigned char {
  score, batch, head, query, key, queries, keys,  // leaves: s b h m n M N
  constant, load,
  add, sub, mul, floordiv, mod, min, max, neg, abs, sign, div, pow,
  TILEWISE_FUNCTIONS(TILEWISE_NAME)
  shl, shr, all, any, differ, negate,  // the last four: and, or, xor, not of booleans or of bits
  lt, le, eq, ne, where, to_float, to_int,
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
