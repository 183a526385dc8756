// Expressions: what a mask or a score says of one pair (query, key), as a graph whose nodes stand in the order of
// evaluation, and the program that kernels run. Nothing here depends on an instruction set.
#pragma once

#include "args.h"

namespace tilewise {

// Which operation takes which kinds is said in expr_compile.cc.
// clang-format off
enum class ExprOp : unsigned char {
  score, batch, head, query, key, queries, keys,  // leaves: s b h m n M N
  constant, load,
  add, sub, mul, floordiv, mod, min, max, neg, abs, sign, div, pow,
  exp, exp2, log, log2, tanh, sigmoid, sqrt, rsqrt, sin, cos, floor, ceil, round, trunc,
  shl, shr, all, any, differ, negate,  // the last four: and, or, xor, not of booleans or of bits
  lt, le, eq, ne, where, to_float, to_int,
  shr_by, bits_of, power_by  // by a constant: what becomes of divisions of integers, and of pow
};
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
// not depend on the query fills a vector, of at most 16 lanes; a piece has 16 keys, a tile 64 queries.
constexpr i64 kExprHeader = 64;
constexpr i64 kRegisterElements[4] = {16, 64, 16 * 16, 16 * 64};

// One value of a program. `extent`: bit 0, it depends on the query (the lane); bit 1, on the key. Values of one
// extent share a set of registers.
struct ExprValue {
  ExprOp op;
  ExprKind kind, arg_kind;  // arg_kind: of the last argument
  unsigned char extent, count;
  short reg, arg[kMaxRank];
  short slot;
  i64 integer;
  double real;
};

enum ExprExtent : int { whole_tile = 0, per_query = 1, per_key = 2, per_pair = 3 };

// An expression as it is run: the values that the outputs need, first those that hold for a whole tile, then those
// per query, per key, per pair. Integers are 32 bits wide where they all fit, else 64 (with float64 always).
struct ExprProgram {
  const ExprValue* values;
  const ExprTensor* tensors;  // by slot
  const ExprRange* held;      // by slot: what an integer tensor holds
  int begin[5];               // the first value of each extent, and the end
  int registers[4];
  int outputs, output[kMaxOutputs];
  int loads;                  // of which a gradient is wanted
  ExprValue load[kMaxLoads];  // their index arguments are kept like outputs
  bool wide;                  // 64-bit integers
  bool wide_floats;           // float64
  i64 room, bytes;            // where its scratch memory begins, and its size
};

// Ranges of all values over a box. `proof`: what has any value (x // 0, a shift too far, NaN as an integer) may be
// left out, since nothing depends on it.
void expr_ranges(const ExprProgram& program, const ExprBox& box, bool proof, ExprRange* ranges);

// Whether a boolean program is false (0) for all pairs of a box, for some (1) or for none (2).
int expr_cover(const ExprProgram& program, const ExprBox& box);

}  // namespace tilewise
