// The only file that knows Python: turns plain numbers and tuples into the kernels' arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind/checks.h"
#include "isa/dispatch.h"
#include "expr_code.h"
#include "expressions/compile.h"
#include "base/forks.h"
#include "base/key_lists.h"
#include "base/parallel.h"
#include "base/processor.h"
#include "bind/tensors.h"

namespace nb = nanobind;
using namespace tilewise;

namespace {

template <class T>
const T* pointer(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

// (address, strides) of a tensor [batch, head, row, col], or of a packed one [row, head, col].
View view(std::uintptr_t address, nb::handle strides) {
  View v;
  v.data = pointer<void>(address);
  const i64 dims = length(strides, "strides");
  if (dims != 3 && dims != 4) bad("a tensor has 3 or 4 strides, not " + std::to_string(dims));
  if (dims == 3) {
    v.row = number(strides, 0);
    v.head = number(strides, 1);
    v.col = number(strides, 2);
  } else {
    v.batch = number(strides, 0);
    v.head = number(strides, 1);
    v.row = number(strides, 2);
    v.col = number(strides, 3);
  }
  return v;
}

MaskOp mask_op(const std::string& name) {
  if (name == "band") return MaskOp::band;
  if (name == "below") return MaskOp::below;
  if (name == "same_document") return MaskOp::same_document;
  if (name == "dense") return MaskOp::dense;
  if (name == "and") return MaskOp::all;
  if (name == "or") return MaskOp::any;
  if (name == "not") return MaskOp::negate;
  if (name == "blocks") return MaskOp::blocks;
  if (name == "tiles") return MaskOp::tiles;
  bad("no mask operation is called '" + name + "'");
}

ScoreOp score_op(const std::string& name) {
  if (name == "alibi") return ScoreOp::alibi;
  if (name == "softcap") return ScoreOp::softcap;
  if (name == "bias") return ScoreOp::bias;
  bad("no score operation is called '" + name + "'");
}

// An expression as the backend gives it: its nodes, and of each slot of its text the place among the captured tensors.
struct GivenExpr {
  std::vector<ExprNode> nodes;
  std::vector<ExprKind> kinds;
  std::vector<int> slots, outputs, loads;
};

// One node as (name, arguments, value).
ExprNode expr_node(nb::handle given) {
  const std::string name = nb::cast<std::string>(given[0]);
  const auto args = nb::cast<std::vector<int>>(given[1]);
  ExprNode node;
  if (!expr_op(name, node)) bad("no operation of an expression is called '" + name + "'");
  if (args.size() > kMaxRank)
    bad("'" + name + "' has " + std::to_string(args.size()) + " arguments; " + std::to_string(kMaxRank) +
        " are the most");
  for (int arg : args) node.arg[node.count++] = arg;
  if (node.op == ExprOp::constant && node.count > 0) bad("'" + name + "' takes no arguments");
  nb::object value = nb::borrow(given[2]);
  const bool stored = node.op == ExprOp::constant || node.op == ExprOp::load;
  if (stored == value.is_none()) bad("'" + name + "' has a value that it should not have, or none");
  if (!stored) return node;
  if (node.op == ExprOp::constant && node.kind == ExprKind::boolean)
    node.integer = PyObject_IsTrue(value.ptr()) == 1;
  else if (node.op == ExprOp::constant && node.kind == ExprKind::real)
    node.real = nb::cast<double>(value);
  else
    node.integer = nb::cast<i64>(value);
  return node;
}

// `most`: nodes. Errors name what is wrong.
GivenExpr given_expr(nb::handle nodes, std::vector<int> outputs, std::vector<int> loads, std::vector<int> slots,
                     int most) {
  GivenExpr e;
  for (nb::handle node : nodes) e.nodes.push_back(expr_node(node));
  const int count = static_cast<int>(e.nodes.size());
  if (count > most) bad("an expression has at most " + std::to_string(most) + " nodes, not " + std::to_string(count));
  const std::string wrong = check_nodes(e.nodes, e.kinds);
  if (!wrong.empty()) bad("expression: " + wrong);
  int all_loads = 0;
  for (const ExprNode& node : e.nodes) {
    if (node.op != ExprOp::load) continue;
    all_loads++;
    if (node.integer < 0 || node.integer >= static_cast<i64>(slots.size()))
      bad("an expression loads from slot " + std::to_string(node.integer) + " of " + std::to_string(slots.size()));
  }
  if (all_loads > kMaxLoads)
    bad("an expression has at most " + std::to_string(kMaxLoads) + " loads, not " + std::to_string(all_loads));
  check_places(e.nodes, outputs, loads);
  e.outputs = std::move(outputs), e.loads = std::move(loads), e.slots = std::move(slots);
  return e;
}

// Whether expressions are compiled, and how often that was said: what was known before then is forgotten.
bool compile_exprs = false;
int compile_epoch = 0;

void set_compile_exprs(bool wanted) {
  if (wanted == compile_exprs) return;
  compile_exprs = wanted;
  compile_epoch++;
}

// Whether float32 may be computed by matrix tiles.
bool float_tiles = false;

const char* name_of(ExprUse use) { return use == ExprUse::mask ? "mask" : use == ExprUse::score ? "score" : "loads"; }

nb::tuple places(const short* args, int count) {
  nb::list list;
  for (int i = 0; i < count; i++) list.append(static_cast<int>(args[i]));
  return nb::tuple(list);
}

// A program for what writes code from it: (instruction set, bits of floats, bits of integers, whether the operands have
// 16 bits, use, values, outputs, index arguments that are kept); a value as (name, kind, kind of the last argument,
// extent, arguments, register, slot, integer, real).
nb::tuple described(const ExprProgram& p, ExprUse use, DType dtype) {
  nb::list values, outputs, kept;
  for (int at = 0; at < p.begin[kExtents]; at++) {
    const ExprValue& x = p.values[at];
    values.append(nb::make_tuple(expr_name(x.op), static_cast<int>(x.kind), static_cast<int>(x.arg_kind),
                                 static_cast<int>(x.extent), places(x.arg, x.count), static_cast<int>(x.reg),
                                 static_cast<int>(x.slot), x.integer, x.real));
  }
  for (int i = 0; i < p.outputs; i++) outputs.append(p.output[i]);
  for (int i = 0; i < p.loads; i++)
    for (int d = 0; d < p.load[i].count; d++) kept.append(static_cast<int>(p.load[i].arg[d]));
  return nb::make_tuple(active().name, p.wide_floats ? 64 : 32, p.wide ? 64 : 32,
                        dtype == DType::bf16 || dtype == DType::f16, name_of(use), nb::tuple(values),
                        nb::tuple(outputs), nb::tuple(kept));
}

constexpr int kIntegerCode = 4, kBooleanCode = 5;  // dtypes of captured tensors besides DType's
constexpr int kMostThreads = 4096;

// The compiled expressions of one call.
using CompiledExprs = std::vector<std::unique_ptr<CompiledExpr>>;

// A problem without its tensors, made once per plan; a call copies it and fills the pointers in.
class Kernel {
 public:
  Kernel(int dtype, nb::tuple dims, double scale, double dropout, bool varlen) : varlen_(varlen) {
    problem_.dtype = dtype_of(dtype);
    require_length(dims, 7, "dims");
    for (int i = 5; i < 7; i++)
      if (number(dims, i) < 1 || number(dims, i) > kMaxDim) bad("D and Dv must be 1 to " + std::to_string(kMaxDim));
    problem_.batch = number(dims, 0);
    problem_.heads = number(dims, 1);
    problem_.kv_heads = number(dims, 2);
    problem_.queries = number(dims, 3);
    problem_.keys = number(dims, 4);
    problem_.head_dim = static_cast<int>(number(dims, 5));
    problem_.value_dim = static_cast<int>(number(dims, 6));
    problem_.scale = scale;
    problem_.dropout = dropout;
    check_problem(problem_);
  }

  // left, right and length are the parameters of a band or of a fixed length; left and right also the queries and keys
  // of a table's rectangles; slots say which captured tensors
  // the instruction reads (-1: none).
  void add_mask(const std::string& op, bool bounds, i64 left, i64 right, bool bottom_right, i64 length, int slot,
                int second_slot) {
    const MaskOp known = mask_op(op);
    check_mask_slots(known, slot, second_slot);
    MaskInstr& x = next_mask(known);
    x.bounds = bounds;
    if (known == MaskOp::blocks || known == MaskOp::tiles) {
      if (left < 1 || right < 1) bad("a table has rectangles of at least one pair");
      x.block_queries = left;
      x.block_keys = right;
    } else {
      x.left = left;
      x.right = right;
    }
    x.bottom_right = bottom_right;
    x.length = length;
    mask_slots_[problem_.mask_length - 1][0] = slot;
    mask_slots_[problem_.mask_length - 1][1] = second_slot;
  }

  void add_score(const std::string& op, double cap, int slot) {
    const ScoreOp known = score_op(op);
    if (known != ScoreOp::softcap && slot < 0) bad("'" + op + "' reads a tensor and has no slot");
    next_score(known, slot).cap = cap;
  }

  void add_mask_expr(nb::tuple nodes, std::vector<int> outputs, std::vector<int> slots) {
    GivenExpr e = given_expr(nodes, std::move(outputs), {}, std::move(slots), kMaxNodes);
    if (e.outputs.size() != 1 || e.kinds[static_cast<std::size_t>(e.outputs[0])] != ExprKind::boolean)
      bad("a mask's expression has one output, a boolean");
    for (const ExprNode& node : e.nodes)
      if (node.op == ExprOp::score) bad("a mask's expression knows no score");
    next_mask(MaskOp::expr);
    codes_.clear();  // they know expressions by their addresses
    mask_exprs_.push_back(std::move(e));
  }

  void add_score_expr(nb::tuple nodes, std::vector<int> outputs, std::vector<int> slots) {
    if (problem_.score_length != 0) bad("an expression is the first step of a score");
    GivenExpr e = given_expr(nodes, std::move(outputs), {}, std::move(slots), kMaxNodes);
    if (e.outputs.size() != 1 || e.kinds[static_cast<std::size_t>(e.outputs[0])] != ExprKind::real)
      bad("a score's expression has one output, a float");
    next_score(ScoreOp::expr, -1);
    codes_.clear();
    value_ = std::move(e);
  }

  // outputs: the value, its derivative by s, and by each of `loads` (their nodes). Before any backward pass.
  void set_score_derivative(nb::tuple nodes, std::vector<int> outputs, std::vector<int> loads) {
    if (value_.outputs.empty()) bad("a derivative needs its expression first");
    if (outputs.size() != loads.size() + 2) bad("a derivative has an output per load, and two");
    GivenExpr e = given_expr(nodes, std::move(outputs), std::move(loads), value_.slots, kMaxDerivativeNodes);
    for (int output : e.outputs)
      if (e.kinds[static_cast<std::size_t>(output)] != ExprKind::real) bad("a derivative is a float");
    for (int load : e.loads)
      if (e.kinds[static_cast<std::size_t>(load)] != ExprKind::real) bad("a gradient is asked for what is no float");
    std::erase_if(codes_, [&](const Code& code) { return code.expr == &derivative_; });
    derivative_ = std::move(e);
  }

  // compiler: from a program as `described` has it to the address of its code, or 0.
  void set_compiler(nb::object compiler) { compiler_ = std::move(compiler); }

  // seed: of dropout, none without; or it and the first batch item, head, query and key that dropout counts from.
  static void read_seed(Problem& p, nb::handle seed) {
    if (!PyTuple_Check(seed.ptr())) {
      p.seed = nb::cast<std::uint64_t>(seed);
      return;
    }
    if (length(seed, "seed") != 5) bad("seed must be a number, or five");
    p.seed = nb::cast<std::uint64_t>(seed[0]);
    p.origin = {number(seed, 1), number(seed, 2), number(seed, 3), number(seed, 4)};
    if (p.origin.batch < 0 || p.origin.head < 0 || p.origin.query < 0 || p.origin.key < 0)
      bad("seed must count from 0 on");
  }

  // captured: (address, strides, dtype) per mask slot and per score slot, with the sizes too where an expression reads
  // it. sequences: (cu_q, cu_k) of a variable-length call; of keys in pages, whose cu_k is 0, then (block_table, its
  // columns, page_size, key_lengths); else empty. p: a copy of `problem()`.
  void fill(Problem& p, int threads, nb::handle seed, std::uintptr_t sinks, nb::handle mask_tensors,
            nb::handle score_tensors, nb::handle sequences, CompiledExprs& exprs, bool backward = false) const {
    if (threads < 1 || threads > kMostThreads)
      bad("threads must be 1 to " + std::to_string(kMostThreads) + ", not " + std::to_string(threads));
    if (stacked_ > 1 || (p.mask_length > 0 && stacked_ != 1)) bad("a mask's program must leave one value");
    p.threads = threads;
    if (seed.is_valid()) read_seed(p, seed);
    p.sinks = pointer<void>(sinks);
    const i64 given = length(sequences, "sequences");
    if (given != 6 && given != (varlen_ ? 2 : 0)) bad("sequences has the wrong number of elements");
    if (varlen_) {
      p.cu_q = address<const i64>(sequences, 0, "sequences");
      p.cu_k = pointer<i64>(static_cast<std::uintptr_t>(number(sequences, 1)));
      p.queries = longest(p.cu_q, p.batch);
      p.keys = p.cu_k == nullptr ? 0 : longest(p.cu_k, p.batch);
    }
    if (given == 6) {
      p.block_table = pointer<std::int32_t>(static_cast<std::uintptr_t>(number(sequences, 2)));
      p.page_slots = number(sequences, 3);
      p.page_size = number(sequences, 4);
      p.key_lengths = pointer<std::int32_t>(static_cast<std::uintptr_t>(number(sequences, 5)));
      if (p.key_lengths == nullptr && p.batch > 0) bad("keys in pages have no lengths");
      p.keys = p.batch > 0 ? *std::max_element(p.key_lengths, p.key_lengths + p.batch) : 0;
      if (p.page_slots < 0 || p.page_size < 1) bad("a page must have at least one row");
    } else if (varlen_ && p.cu_k == nullptr) {
      bad("a variable-length call has no cu_seqlens of its keys");
    }
    check_problem(p);
    const bool few = !backward && (varlen_ || p.page_size > 0 || p.queries <= kFewQueries);
    std::size_t mask_expr = 0;
    for (int i = 0; i < p.mask_length; i++) {
      if (p.mask[i].op == MaskOp::expr)
        p.mask[i].expr =
            compiled(mask_exprs_[mask_expr], mask_exprs_[mask_expr].outputs, {}, mask_tensors, p, exprs, ExprUse::mask),
        p.mask[i].by_keys = few ? exchanged(mask_exprs_[mask_expr], p, exprs) : nullptr, mask_expr++;
      else
        bind_mask(p.mask[i], mask_slots_[i], mask_tensors);
    }
    for (int i = 0; i < p.score_length; i++) {
      if (p.score[i].op == ScoreOp::expr) {
        p.score[i].value = compiled(value_, value_.outputs, {}, score_tensors, p, exprs, ExprUse::score);
        p.score[i].by_keys = few ? exchanged(value_, p, exprs) : nullptr;
        if (backward && derivative_.outputs.empty()) bad("a backward pass needs the score's derivative");
        if (backward)
          p.score[i].slope = compiled(derivative_, {derivative_.outputs[0], derivative_.outputs[1]}, {}, score_tensors,
                                      p, exprs, ExprUse::score);
      }
      if (score_slots_[i] < 0) continue;
      nb::handle entry = item(score_tensors, score_slots_[i], "the score's tensors");
      p.score[i].tensor = captured(entry, p.score[i].op == ScoreOp::alibi);
      p.score[i].dtype = dtype_of(number(entry, 2));
    }
  }

  // What the gradients of the loads need, of tensors with an address in `grads` (by score slot; else 0). False where
  // there is nothing to add to any of them: no derivative by a load, or only empty tensors, which have no address.
  [[nodiscard]] bool fill_loads(LoadBackward& f, nb::handle score_tensors, nb::tuple grads,
                                CompiledExprs& exprs) const {
    std::vector<int> outputs, loads;
    for (std::size_t i = 0; i < derivative_.loads.size(); i++) {
      const ExprNode& load = derivative_.nodes[static_cast<std::size_t>(derivative_.loads[i])];
      const int slot = derivative_.slots[static_cast<std::size_t>(load.integer)];
      double* grad = reinterpret_cast<double*>(number(grads, slot, "grads"));
      if (grad == nullptr) continue;
      int tensor = 0;
      while (tensor < f.tensors && f.grad[tensor] != grad) tensor++;
      if (tensor == f.tensors) {
        f.grad[f.tensors] = grad;
        f.size[f.tensors++] = 1;
        nb::handle sizes = item(item(score_tensors, slot, "the score's tensors"), 3, "a tensor of an expression");
        for (nb::handle size : sizes) f.size[tensor] *= nb::cast<i64>(size);
      }
      f.tensor[loads.size()] = tensor;
      outputs.push_back(derivative_.outputs[i + 2]);
      loads.push_back(derivative_.loads[i]);
    }
    if (loads.empty()) return false;
    f.loads = compiled(derivative_, outputs, loads, score_tensors, f, exprs, ExprUse::loads);
    return true;
  }

  // Of one number for each row.
  std::size_t row_bytes() const {
    const i64 count = (varlen_ ? 1 : problem_.batch) * problem_.heads * problem_.queries;
    return static_cast<std::size_t>(count) * (problem_.dtype == DType::f64 ? sizeof(double) : sizeof(float));
  }

  bool varlen() const { return varlen_; }
  const Problem& problem() const { return problem_; }

 private:
  static i64 longest(const i64* starts, i64 sequences) {
    i64 most = 0;
    for (i64 b = 0; b < sequences; b++) most = std::max(most, starts[b + 1] - starts[b]);
    return most;
  }
  MaskInstr& next_mask(MaskOp op) {
    if (problem_.mask_length == kMaxMask)
      bad("a mask program has at most " + std::to_string(kMaxMask) + " instructions");
    stacked_ = stacked(op, stacked_);
    MaskInstr& x = problem_.mask[problem_.mask_length++];
    x.op = op;
    return x;
  }
  ScoreInstr& next_score(ScoreOp op, int slot) {
    if (problem_.score_length == kMaxScore) bad("a score chain has at most " + std::to_string(kMaxScore) + " steps");
    score_slots_[problem_.score_length] = slot;
    ScoreInstr& x = problem_.score[problem_.score_length++];
    x.op = op;
    return x;
  }
  static View captured(nb::handle entry, bool heads_only) {
    nb::handle strides = item(entry, 1, "a captured tensor");
    const auto address = static_cast<std::uintptr_t>(number(entry, 0, "a captured tensor"));
    if (!heads_only) return view(address, strides);
    View v;
    v.data = pointer<void>(address);
    v.batch = number(strides, 0);
    v.head = number(strides, 1);
    return v;
  }
  // An expression cut to these outputs, and to the loads of which a gradient is wanted, with what it captures.
  const ExprProgram* compiled(const GivenExpr& e, const std::vector<int>& outputs, const std::vector<int>& loads,
                              nb::handle tensors, Problem& p, CompiledExprs& exprs, ExprUse use) const {
    std::vector<ExprTensor> captured(e.slots.size());
    for (const ExprNode& node : e.nodes)
      if (node.op == ExprOp::load) {
        const std::size_t slot = static_cast<std::size_t>(node.integer);
        captured[slot] = expr_tensor(item(tensors, e.slots[slot], "the tensors of a program"), node, p.dtype);
      }
    exprs.push_back(std::make_unique<CompiledExpr>(e.nodes, e.kinds, outputs, loads, captured, p));
    CompiledExpr& expr = *exprs.back();
    if (compile_exprs && compiler_.is_valid()) expr.run_by(code_of(e, outputs, loads, expr.program(), use));
    return &expr.program();
  }
  // The last of the expressions, with queries and keys exchanged; it is not compiled.
  static const ExprProgram* exchanged(const GivenExpr& e, Problem& p, CompiledExprs& exprs) {
    exprs.push_back(std::make_unique<CompiledExpr>(*exprs.back(), e.nodes, e.kinds, e.outputs, p));
    return &exprs.back()->program();
  }
  // The compiled code of a program, asked for when it first runs; null where there is none. What else a program is made
  // of follows from what is compared here.
  ExprCompiled code_of(const GivenExpr& e, const std::vector<int>& outputs, const std::vector<int>& loads,
                       const ExprProgram& program, ExprUse use) const {
    const char* isa = active().name;
    for (const Code& code : codes_)
      if (code.expr == &e && code.wide == program.wide && code.isa == isa && code.epoch == compile_epoch &&
          code.use == use && code.outputs == outputs && code.loads == loads)
        return code.run;
    const int epoch = compile_epoch;
    const auto address = nb::cast<std::uintptr_t>(compiler_(described(program, use, problem_.dtype)));
    const auto run = reinterpret_cast<ExprCompiled>(address);
    std::erase_if(codes_, [&](const Code& code) { return code.epoch != epoch; });
    codes_.push_back({&e, use, outputs, loads, program.wide, isa, epoch, run});
    return run;
  }
  static ExprTensor expr_tensor(nb::handle entry, const ExprNode& load, DType dtype) {
    if (length(entry, "a captured tensor") != 4) bad("a tensor of an expression comes with its sizes");
    nb::handle strides = item(entry, 1, "a captured tensor"), sizes = item(entry, 3, "a captured tensor");
    ExprTensor t;
    t.data = pointer<void>(static_cast<std::uintptr_t>(number(entry, 0)));
    t.kind = load.kind;
    bool empty = false;
    t.rank = static_cast<int>(length(sizes, "sizes"));
    if (t.rank != load.count || length(strides, "strides") != t.rank)
      bad("a tensor is loaded with another number of indices than it has dimensions");
    for (int d = 0; d < t.rank; d++) {
      t.size[d] = number(sizes, d);
      t.stride[d] = number(strides, d);
      if (t.size[d] < 0) bad("sizes must not be negative");
      empty |= t.size[d] == 0;
    }
    if (t.data == nullptr && !empty) bad("a tensor of an expression has no address");
    const int real = static_cast<int>(dtype == DType::f64 ? DType::f64 : DType::f32);
    const int wanted = load.kind == ExprKind::real      ? real
                       : load.kind == ExprKind::integer ? kIntegerCode
                                                        : kBooleanCode;
    if (number(entry, 2) != wanted) bad("a tensor is loaded as what it is not");
    return t;
  }
  static void bind_mask(MaskInstr& x, const int* slots, nb::handle tensors) {
    if (slots[0] < 0) return;
    nb::handle first = item(tensors, slots[0], "the mask's tensors");
    const auto address = static_cast<std::uintptr_t>(number(first, 0, "a captured tensor"));
    nb::handle strides = item(first, 1, "a captured tensor");
    if (x.op == MaskOp::below) x.lengths = pointer<i64>(address);
    if (x.op == MaskOp::dense || x.op == MaskOp::blocks || x.op == MaskOp::tiles) x.tensor = view(address, strides);
    if (x.op != MaskOp::same_document) return;
    nb::handle second = item(tensors, slots[1], "the mask's tensors");
    x.query_ids = pointer<i64>(address);
    x.query_batch = number(strides, 0);
    x.key_ids = pointer<i64>(static_cast<std::uintptr_t>(number(second, 0)));
    x.key_batch = number(item(second, 1, "a captured tensor"), 0);
  }

  Problem problem_;
  bool varlen_;
  int stacked_ = 0;  // values that the mask's program leaves
  int mask_slots_[kMaxMask][2];
  int score_slots_[kMaxScore];
  std::vector<GivenExpr> mask_exprs_;
  GivenExpr value_, derivative_;
  struct Code {
    const GivenExpr* expr;
    ExprUse use;
    std::vector<int> outputs, loads;
    bool wide;
    const char* isa;
    int epoch;
    ExprCompiled run;
  };
  mutable std::vector<Code> codes_;
  nb::object compiler_;
};

// lse and the row statistics are contiguous: [batch, heads, queries], or [heads, all queries].
Rows rows(const Kernel& kernel, std::uintptr_t address) {
  Rows r;
  r.data = reinterpret_cast<void*>(address);
  r.head = kernel.problem().queries;
  r.batch = kernel.varlen() ? 0 : kernel.problem().heads * r.head;
  return r;
}

// Fewer multiply-adds than these are done before another thread is awake.
constexpr double kAlone = 1 << 17;

bool short_work(const Problem& p) {
  const double rows = static_cast<double>(p.batch * p.heads) * static_cast<double>(p.queries);
  return rows * static_cast<double>(p.keys) * (p.head_dim + p.value_dim) < kAlone;
}

void check(bool done) {
  if (!done) throw std::bad_alloc();
}

// Memory for lse, row_max and row_sum that nobody wants.
std::unique_ptr<char[]> unwanted_rows(Forward& f, const Kernel& kernel) {
  const std::size_t bytes = kernel.row_bytes();
  std::unique_ptr<char[]> room(new char[3 * bytes]);
  const auto address = reinterpret_cast<std::uintptr_t>(room.get());
  f.lse = rows(kernel, address);
  f.row_max = rows(kernel, address + bytes);
  f.row_sum = rows(kernel, address + 2 * bytes);
  return room;
}

// The tensors that a kernel is for: `rows`: of queries or of keys, `width`: the last dimension.
View queries_of(const Kernel& kernel, nb::handle tensor, const char* name, int width) {
  const Problem& p = kernel.problem();
  return operand(tensor, name, p, kernel.varlen(), p.batch, p.heads, p.queries, width);
}
View keys_of(const Kernel& kernel, const Problem& filled, nb::handle tensor, const char* name, int width,
             Stored stored = Stored::plain) {
  const Problem& p = kernel.problem();
  if (filled.page_size > 0) return operand(tensor, name, p, false, -1, p.kv_heads, filled.page_size, width, stored);
  return operand(tensor, name, p, kernel.varlen(), p.batch, p.kv_heads, p.keys, width);
}

void run_forward(Forward& f, const Kernel& kernel, nb::handle q, nb::handle k, nb::handle v, nb::handle out) {
  if (short_work(f)) f.threads = 1;
  f.q = queries_of(kernel, q, "q", f.head_dim);
  f.k = keys_of(kernel, f, k, "k", f.head_dim, f.stored);
  f.v = keys_of(kernel, f, v, "v", f.value_dim, f.stored);
  f.out = queries_of(kernel, out, "out", f.value_dim);
  f.float_tiles = float_tiles;
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.forward(f));
}

// lse, row_max and row_sum: addresses; all 0 where nobody wants them. scales: of keys and of values in 8 bits.
void forward(const Kernel& kernel, int threads, nb::handle seed, nb::handle q, nb::handle k, nb::handle v,
             nb::handle out, std::uintptr_t lse, std::uintptr_t row_max, std::uintptr_t row_sum, std::uintptr_t sinks,
             nb::tuple mask_tensors, nb::tuple score_tensors, nb::tuple sequences, nb::tuple statistics,
             bool for_backward, nb::tuple scales) {
  Forward f(kernel.problem());
  f.for_backward = for_backward;
  CompiledExprs exprs;
  kernel.fill(f, threads, seed, sinks, mask_tensors, score_tensors, sequences, exprs);
  std::unique_ptr<char[]> unwanted;
  if (lse == 0 || kernel.row_bytes() == 0) {
    unwanted = unwanted_rows(f, kernel);
  } else {
    if (row_max == 0 || row_sum == 0) bad("lse comes with row_max and row_sum");
    f.lse = rows(kernel, lse);
    f.row_max = rows(kernel, row_max);
    f.row_sum = rows(kernel, row_sum);
  }
  if (length(statistics, "statistics") > 0) {  // addresses, 0 for a top_key that is not wanted
    require_length(statistics, 4, "statistics");
    Rows* arrays[] = {&f.max_logit, &f.entropy, &f.row_mean, &f.top_key};
    for (int i = 0; i < 4; i++) *arrays[i] = rows(kernel, static_cast<std::uintptr_t>(number(statistics, i)));
    for (int i = 0; i < 3; i++)
      if (arrays[i]->data == nullptr && kernel.row_bytes() > 0) bad("statistics are written together or not at all");
  }
  if (length(scales, "scales") > 0) {
    if (f.page_size == 0 || for_backward) bad("rows in 8 bits lie in pages, and have no backward pass");
    f.stored = stored_as(k);
    f.k_scales = scales_of(item(scales, 0, "scales"), "k_scale", f);
    f.v_scales = scales_of(item(scales, 1, "scales"), "v_scale", f);
  }
  run_forward(f, kernel, q, k, v, out);
}

// `forward` of a call that has no tensor beside these and wants nothing but its output: most of a short call's time is
// what comes before the kernel.
void output(const Kernel& kernel, int threads, nb::handle q, nb::handle k, nb::handle v, nb::handle out) {
  Forward f(kernel.problem());
  CompiledExprs exprs;
  kernel.fill(f, threads, nb::handle(), 0, nb::tuple(), nb::tuple(), nb::tuple(), exprs);
  const std::unique_ptr<char[]> unwanted = unwanted_rows(f, kernel);
  run_forward(f, kernel, q, k, v, out);
}

// Tensors in the order q, k, v, out, grad_out, grad_q, grad_k, grad_v. Behind the six addresses of row_arrays stands
// whether the rows see keys beyond these.
template <class Arguments>
void fill_backward(Arguments& f, const Kernel& kernel, int threads, nb::handle seed, nb::tuple tensors,
                   nb::tuple row_arrays, std::uintptr_t sinks, nb::tuple mask_tensors, nb::tuple score_tensors,
                   nb::tuple sequences, CompiledExprs& exprs) {
  static_cast<Problem&>(f) = kernel.problem();
  kernel.fill(f, threads, seed, sinks, mask_tensors, score_tensors, sequences, exprs, true);
  struct Place {
    View* view;
    const char* name;
    bool keys;
    int width;
  };
  const Place places[] = {{&f.q, "q", false, f.head_dim},
                          {&f.k, "k", true, f.head_dim},
                          {&f.v, "v", true, f.value_dim},
                          {&f.out, "out", false, f.value_dim},
                          {&f.grad_out, "grad_out", false, f.value_dim},
                          {&f.grad_q, "grad_q", false, f.head_dim},
                          {&f.grad_k, "grad_k", true, f.head_dim},
                          {&f.grad_v, "grad_v", true, f.value_dim}};
  if (f.page_size > 0) bad("keys in pages have no backward pass");
  require_length(tensors, 8, "tensors");
  require_length(row_arrays, 7, "row_arrays");
  for (int i = 0; i < 8; i++) {
    const Place& to = places[i];
    nb::handle tensor = item(tensors, i, "tensors");
    *to.view = to.keys ? keys_of(kernel, f, tensor, to.name, to.width) : queries_of(kernel, tensor, to.name, to.width);
  }
  Rows* arrays[] = {&f.row_max, &f.row_sum, &f.grad_lse, &f.delta, &f.row_mean, &f.grad_entropy};
  for (int i = 0; i < 6; i++) *arrays[i] = rows(kernel, static_cast<std::uintptr_t>(number(row_arrays, i)));
  f.partial = number(row_arrays, 6) != 0;
  f.float_tiles = float_tiles;
  const bool some = kernel.row_bytes() > 0;
  if (some && (f.row_max.data == nullptr || f.row_sum.data == nullptr || f.delta.data == nullptr))
    bad("a backward pass needs row_max, row_sum and delta");
  if (some && f.grad_entropy.data != nullptr && f.row_mean.data == nullptr)
    bad("a gradient of the entropy needs row_mean");
}

void backward(const Kernel& kernel, int threads, nb::handle seed, nb::tuple tensors, nb::tuple row_arrays,
              std::uintptr_t sinks, nb::tuple mask_tensors, nb::tuple score_tensors, nb::tuple sequences) {
  Backward f;
  CompiledExprs exprs;
  fill_backward(f, kernel, threads, seed, tensors, row_arrays, sinks, mask_tensors, score_tensors, sequences, exprs);
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.backward(f));
}

// Refines the delta of `backward` (passes/key_delta.h).
void key_delta(const Kernel& kernel, int threads, nb::handle seed, nb::tuple tensors, nb::tuple row_arrays,
               std::uintptr_t sinks, nb::tuple mask_tensors, nb::tuple score_tensors, nb::tuple sequences) {
  Backward f;
  CompiledExprs exprs;
  fill_backward(f, kernel, threads, seed, tensors, row_arrays, sinks, mask_tensors, score_tensors, sequences, exprs);
  if (f.partial) bad("the sum over a part of the keys is no delta");
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.key_delta(f));
}

void bias_backward(const Kernel& kernel, int threads, nb::handle seed, nb::tuple tensors, nb::tuple row_arrays,
                   std::uintptr_t sinks, nb::tuple mask_tensors, nb::tuple score_tensors, nb::tuple sequences,
                   int index, std::uintptr_t grad, nb::tuple grad_strides, bool wide) {
  BiasBackward f;
  CompiledExprs exprs;
  fill_backward(f, kernel, threads, seed, tensors, row_arrays, sinks, mask_tensors, score_tensors, sequences, exprs);
  if (index < 0 || index >= f.score_length || f.score[index].op != ScoreOp::bias)
    bad("step " + std::to_string(index) + " of the score is no bias");
  f.index = index;
  f.grad_bias = view(grad, grad_strides);
  f.wide = wide;
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.bias_backward(f));
}

// grads: per score slot the address of a contiguous tensor of doubles, or 0 where no gradient is wanted.
void load_backward(const Kernel& kernel, int threads, nb::handle seed, nb::tuple tensors, nb::tuple row_arrays,
                   std::uintptr_t sinks, nb::tuple mask_tensors, nb::tuple score_tensors, nb::tuple sequences,
                   nb::tuple grads) {
  LoadBackward f;
  CompiledExprs exprs;
  fill_backward(f, kernel, threads, seed, tensors, row_arrays, sinks, mask_tensors, score_tensors, sequences, exprs);
  if (!kernel.fill_loads(f, score_tensors, grads, exprs)) return;
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.load_backward(f));
}

// grid: queries and keys of a rectangle, then the sizes of the table, which is contiguous at `address`.
void covers(const Kernel& kernel, int threads, nb::tuple mask_tensors, nb::tuple sequences, nb::tuple grid,
            std::uintptr_t address) {
  Covers f;
  static_cast<Problem&>(f) = kernel.problem();
  CompiledExprs exprs;
  kernel.fill(f, threads, nb::handle(), 0, mask_tensors, nb::tuple(), sequences, exprs);
  require_length(grid, 6, "grid");
  i64* sizes[] = {&f.block_queries, &f.block_keys, &f.batches, &f.heads_apart, &f.rows, &f.columns};
  for (int i = 0; i < 6; i++) *sizes[i] = number(grid, i);
  if (f.block_queries < 1 || f.block_keys < 1) bad("a rectangle has at least one pair");
  for (int i = 2; i < 6; i++)
    if (*sizes[i] < 0) bad("sizes must not be negative");
  f.table = reinterpret_cast<unsigned char*>(address);
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.covers(f));
}

// sizes: rows, columns, stride, the first word, all words. arrays: logits, targets, losses or 0, lse, scales or 0.
// Losses are of blocks of all words alone.
void cross_entropy(int dtype, int threads, nb::tuple sizes, nb::tuple arrays, i64 ignore_index, double smoothing,
                   double z_loss, double softcap) {
  CrossEntropy f;
  f.dtype = dtype_of(dtype);
  f.threads = threads;
  require_length(sizes, 5, "sizes");
  i64* numbers[] = {&f.rows, &f.columns, &f.stride, &f.first, &f.words};
  for (int i = 0; i < 5; i++) *numbers[i] = number(sizes, i);
  if (threads < 1) bad("a call has at least one thread");
  if (f.rows < 0 || f.columns < 1 || f.stride < f.columns || f.first < 0 || f.first + f.columns > f.words)
    bad("rows of logits must hold some of the words");
  require_length(arrays, 5, "arrays");
  if (f.rows == 0) return;
  f.logits = address<void>(arrays, 0, "logits");
  f.targets = address<const i64>(arrays, 1, "targets");
  f.losses = reinterpret_cast<void*>(static_cast<std::uintptr_t>(number(arrays, 2)));
  f.lse = address<void>(arrays, 3, "lse");
  f.scales = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(number(arrays, 4)));
  if (f.losses && f.columns != f.words) bad("a loss needs all words");
  f.ignore_index = ignore_index;
  f.smoothing = smoothing;
  f.z_loss = z_loss;
  f.softcap = softcap;
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.cross_entropy(f));
}

// sizes: rows of the table, its stride, count, width. arrays: the table, places, rows.
void gathered_rows(int dtype, int threads, bool add, nb::tuple sizes, nb::tuple arrays) {
  GatheredRows f;
  f.dtype = dtype_of(dtype);
  f.threads = threads;
  f.add = add;
  require_length(sizes, 4, "sizes");
  const i64 there = number(sizes, 0);
  f.stride = number(sizes, 1), f.count = number(sizes, 2), f.width = number(sizes, 3);
  if (threads < 1) bad("a call has at least one thread");
  if (f.count < 0 || f.width < 0) bad("sizes must not be negative");
  require_length(arrays, 3, "arrays");
  if (f.count == 0 || f.width == 0) return;
  f.table = address<void>(arrays, 0, "table");
  f.places = address<const i64>(arrays, 1, "places");
  f.rows = address<void>(arrays, 2, "rows");
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  for (i64 i = 0; i < f.count; i++)
    if (f.places[i] < 0 || f.places[i] >= there)
      bad("place " + std::to_string(f.places[i]) + " is none of the table's " + std::to_string(there));
  check(kernels.gathered_rows(f));
}

// Key lists as sets (base/key_lists.h). indices: int32 or int64 [B, heads, M, K], or packed [heads, T, K]; lengths:
// int64 [T], T = B * M; sets: int32 [T, heads, K]; counts: int64 [T, heads]. Returns the first place in sets for an
// index that names nothing and is not -1; -1 where there is none.
i64 key_sets(int threads, i64 block, nb::handle indices, nb::handle lengths, nb::handle sets, nb::handle counts) {
  KeySets f;
  if (threads < 1 || block < 1) bad("a call has at least one thread, and a block one key");
  f.threads = threads, f.block = block;
  const nb::dlpack::dltensor t = borrowed(indices);
  if (t.ndim != 3 && t.ndim != 4) bad("indices must have 3 or 4 dimensions");
  f.wide = t.dtype.bits == 64;
  if (t.device.device_type != 1 || t.dtype.code != kInt || (t.dtype.bits != 32 && !f.wide))
    bad("indices must be int32 or int64, in the CPU's memory");
  const int from = t.ndim - 3;
  f.heads = t.shape[from], f.rows = t.shape[from + 1], f.width = t.shape[from + 2];
  for (int d = 0; d < 3; d++) f.strides[d + 1] = t.strides[from + d];
  if (from == 1) f.batch = t.shape[0], f.strides[0] = t.strides[0];
  f.indices = static_cast<const char*>(t.data) + t.byte_offset;
  f.lengths = integers<const i64>(lengths, "lengths", f.batch * f.rows);
  f.sets = integers<std::int32_t>(sets, "sets", f.batch * f.rows * f.heads * f.width);
  f.counts = integers<i64>(counts, "counts", f.batch * f.rows * f.heads);
  if (f.batch * f.rows * f.heads == 0) return -1;
  nb::gil_scoped_release release;
  check(make_sets(f));
  return f.wrong;
}

// Where the keys of sets lie (base/key_lists.h). sizes: block, keys of a page, all keys of a head, keys of a page of
// the table. steps: outer, head, page. sets, counts: of key_sets; item, lengths: int64 [T]; starts: int64 [items] or
// None; table: int32 [items, columns] or None; numbers: int32 [T, Hk, many]; key_lengths: int32 [T, Hk]; keys: int64,
// as numbers, or None.
void key_pages(int threads, nb::tuple sizes, nb::tuple steps, nb::handle sets, nb::handle counts, nb::handle item,
               nb::handle lengths, nb::handle starts, nb::handle table, nb::handle numbers, nb::handle key_lengths,
               nb::handle keys) {
  KeyPages f;
  f.threads = threads;
  require_length(sizes, 4, "sizes");
  require_length(steps, 3, "steps");
  f.block = number(sizes, 0), f.size = number(sizes, 1), f.total = number(sizes, 2), f.page_size = number(sizes, 3);
  f.outer = number(steps, 0), f.head = number(steps, 1), f.page = number(steps, 2);
  if (threads < 1 || f.block < 1 || f.size < 1 || f.block % f.size != 0 || f.page_size < 1)
    bad("a call has at least one thread, and a page some keys, which divide a block");
  const nb::dlpack::dltensor s = borrowed(sets), n = borrowed(numbers);
  if (s.ndim != 3 || n.ndim != 3) bad("sets and numbers must have 3 dimensions");
  f.lists = s.shape[0], f.set_heads = s.shape[1], f.width = s.shape[2], f.heads = n.shape[1];
  if (f.set_heads != 1 && f.set_heads != f.heads) bad("sets are of one head or of all");
  const i64 many = f.lists * f.heads * f.width * (f.block / f.size);
  f.sets = integers<const std::int32_t>(sets, "sets", f.lists * f.set_heads * f.width);
  f.counts = integers<const i64>(counts, "counts", f.lists * f.set_heads);
  f.item = integers<const i64>(item, "item", f.lists);
  f.lengths = integers<const i64>(lengths, "lengths", f.lists);
  f.numbers = integers<std::int32_t>(numbers, "numbers", many);
  f.key_lengths = integers<std::int32_t>(key_lengths, "key_lengths", f.lists * f.heads);
  if (!keys.is_none()) f.keys = integers<i64>(keys, "keys", many);
  i64 items = std::numeric_limits<i64>::max();
  if (!starts.is_none()) f.starts = integers<const i64>(starts, "starts", items = borrowed(starts).shape[0]);
  if (!table.is_none()) {
    const nb::dlpack::dltensor t = borrowed(table);
    if (t.ndim != 2) bad("a block table must have 2 dimensions");
    items = t.shape[0], f.columns = t.shape[1];
    f.table = integers<const std::int32_t>(table, "a block table", items * f.columns);
  }
  nb::gil_scoped_release release;
  for (i64 i = 0; i < f.lists; i++) {
    if (f.item[i] < 0 || f.item[i] >= items) bad("a list's item is none of those that there are");
    if (f.table && std::max<i64>(f.lengths[i] - 1, 0) / f.page_size >= f.columns)
      bad("a sequence has more keys than its block table has pages for");
  }
  check(find_pages(f));
}

// What neighbouring rows read together (base/key_lists.h). sets: int32 [all rows, heads, K], of key_sets; first, rows,
// limits: int64 [groups], the places of groups of at most 16 rows, how many these are, and the blocks of their
// sequence. Either sizes: int64 [groups, heads, 5]; or blocks and readers: int32 [groups, heads, wide].
void key_unions(int threads, nb::handle sets, nb::handle first, nb::handle rows, nb::handle limits, nb::handle sizes,
                nb::handle blocks, nb::handle readers) {
  KeyUnions f;
  if (threads < 1) bad("a call has at least one thread");
  f.threads = threads;
  const nb::dlpack::dltensor s = borrowed(sets), g = borrowed(first);
  if (s.ndim != 3 || g.ndim != 1) bad("sets must have 3 dimensions, and first 1");
  const i64 all = s.shape[0];
  f.heads = s.shape[1], f.width = s.shape[2], f.groups = g.shape[0];
  f.sets = integers<const std::int32_t>(sets, "sets", all * f.heads * f.width);
  f.first = integers<const i64>(first, "first", f.groups);
  f.rows = integers<const i64>(rows, "rows", f.groups);
  f.limits = integers<const i64>(limits, "limits", f.groups);
  if (!sizes.is_none()) {
    f.sizes = integers<i64>(sizes, "sizes", f.groups * f.heads * KeyUnions::kSizes);
  } else {
    const nb::dlpack::dltensor b = borrowed(blocks);
    if (b.ndim != 3) bad("blocks must have 3 dimensions");
    f.wide = b.shape[2];
    f.blocks = integers<std::int32_t>(blocks, "blocks", f.groups * f.heads * f.wide);
    f.readers = integers<std::int32_t>(readers, "readers", f.groups * f.heads * f.wide);
  }
  nb::gil_scoped_release release;
  for (i64 i = 0; i < f.groups; i++) {
    if (f.rows[i] < 0 || f.rows[i] > KeyUnions::kRows || f.first[i] < 0 || f.first[i] > all - f.rows[i])
      bad("a group has at most 16 rows, of those that there are");
    if (f.limits[i] < 0 || f.limits[i] > std::numeric_limits<std::int32_t>::max())
      bad("a sequence has at most 2147483647 blocks");
    f.longest = std::max(f.longest, f.limits[i]);
  }
  check(unite(f));
}

// Asks the system for large pages behind memory that nobody has touched yet: a fault for 2 MB in place of 4 KB. Where
// it has none, nothing changes.
void large_pages(std::uintptr_t address, std::size_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t page = 4096;
  const std::uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

// sizes: batch, heads, rows, width, centred, rotated, interleaved. strides: batch, head and row of x, grad and out,
// then head of the weights, batch and row of the angles. arrays: x, grad or 0, out, weight or 0, bias or 0, grad_weight
// or 0, grad_bias or 0, cos, sin.
void head_rows(int dtype, int threads, nb::tuple sizes, nb::tuple strides, nb::tuple arrays, double eps) {
  HeadRows f;
  f.dtype = dtype_of(dtype);
  f.threads = threads;
  require_length(sizes, 7, "sizes");
  i64* numbers[] = {&f.batch, &f.heads, &f.rows, &f.width};
  for (int i = 0; i < 4; i++)
    if ((*numbers[i] = number(sizes, i)) < 0) bad("sizes must not be negative");
  f.centred = number(sizes, 4) != 0, f.rotated = number(sizes, 5), f.interleaved = number(sizes, 6) != 0;
  if (threads < 1) bad("a call has at least one thread");
  if (f.rotated < 0 || f.rotated > f.width || f.rotated % 2 != 0) bad("rotated channels are an even part of the width");
  i64 elements = 0;
  if (__builtin_mul_overflow(f.batch, f.heads, &elements) || __builtin_mul_overflow(elements, f.rows, &elements) ||
      __builtin_mul_overflow(elements, f.width, &elements) || elements > (i64{1} << 56))
    bad("sizes are too large: B * H * M * D overflows");
  require_length(strides, 12, "strides");
  require_length(arrays, 9, "arrays");
  if (elements == 0) return;
  View* views[] = {&f.x, &f.grad, &f.out};
  for (int i = 0; i < 3; i++) {
    View& v = *views[i];
    v.data = i == 1 ? reinterpret_cast<const void*>(static_cast<std::uintptr_t>(number(arrays, 1)))
                    : address<const void>(arrays, i, "x or out");
    v.batch = number(strides, 3 * i), v.head = number(strides, 3 * i + 1), v.row = number(strides, 3 * i + 2);
  }
  f.weight_head = number(strides, 9), f.angle_batch = number(strides, 10), f.angle_row = number(strides, 11);
  const auto maybe = [&](i64 i) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number(arrays, i))); };
  f.weight = maybe(3), f.bias = maybe(4);
  f.grad_weight = static_cast<double*>(maybe(5)), f.grad_bias = static_cast<double*>(maybe(6));
  if ((f.grad_weight == nullptr) != (f.grad_bias == nullptr)) bad("weights and biases have their gradients together");
  f.cos = maybe(7), f.sin = maybe(8);
  if (f.rotated > 0 && (f.cos == nullptr || f.sin == nullptr)) bad("angles are needed where channels are rotated");
  f.eps = eps;
  const Kernels& kernels = active();
  nb::gil_scoped_release release;
  check(kernels.head_rows(f));
}

std::vector<std::string> isa_available() {
  int count;
  const Kernels* const* kernels = available(count);
  std::vector<std::string> names;
  for (int i = 0; i < count; i++) names.emplace_back(kernels[i]->name);
  return names;
}

void set_isa(const std::string& name) {
  if (choose(name.c_str())) return;
  std::string known;
  for (const std::string& each : isa_available()) known += (known.empty() ? "" : ", ") + each;
  bad("instruction set '" + name + "' cannot run here; this machine and build have: " + known);
}

// Processor time of this thread; wall time on Windows, which counts the other in steps longer than the loop.
double cpu_seconds() {
#if defined(_WIN32)
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
#else
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
#endif
}

// Operations per second of the bare multiply-add loop, all threads together; 0 where the instruction set has no
// such operation. By "cpu" time each thread counts only the time that it ran; by "wall" time the team's start and
// wait count too.
double peak(const std::string& kind, int threads, const std::string& clock) {
  if (kind != "fma" && kind != "bf16") bad("peak: kind must be 'fma' or 'bf16', got '" + kind + "'");
  if (clock != "cpu" && clock != "wall") bad("peak: clock must be 'cpu' or 'wall', got '" + clock + "'");
  double (*loop)(i64) = kind == "fma" ? active().fma_flops : active().bf16_flops;
  if (loop == nullptr) return 0;
  struct Shared {
    double (*loop)(i64);
    std::atomic<i64> operations{0};
    std::atomic<i64> rate{0};
  } shared{loop};
  auto body = [](void* context) {
    Shared& s = *static_cast<Shared*>(context);
    s.loop(200'000);
    const double begin = cpu_seconds();
    const double operations = s.loop(4'000'000);
    s.rate += static_cast<i64>(operations / (cpu_seconds() - begin));
    s.operations += static_cast<i64>(operations);
  };
  nb::gil_scoped_release release;
  const auto begin = std::chrono::steady_clock::now();
  run_team(threads, body, &shared);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  if (clock == "cpu") return static_cast<double>(shared.rate);
  return static_cast<double>(shared.operations) / elapsed.count();
}

// Wall seconds of one team that shares that many operations of the bare loop: what a call of this size costs
// when nothing but starting and joining the threads stands beside the arithmetic.
double team_seconds(const std::string& kind, int threads, double operations, int repeats) {
  if (kind != "fma" && kind != "bf16") bad("team_seconds: kind must be 'fma' or 'bf16', got '" + kind + "'");
  if (threads < 1 || repeats < 1 || !(operations > 0)) bad("team_seconds: give positive numbers");
  struct Shared {
    double (*loop)(i64);
    i64 iterations;
  } shared{kind == "fma" ? active().fma_flops : active().bf16_flops, 0};
  if (shared.loop == nullptr) return 0;
  constexpr i64 kProbe = 1000;
  shared.iterations = static_cast<i64>(operations / threads / (shared.loop(kProbe) / kProbe)) + 1;
  auto body = [](void* context) {
    const Shared& s = *static_cast<Shared*>(context);
    s.loop(s.iterations);
  };
  nb::gil_scoped_release release;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; i++) run_team(threads, body, &shared);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / repeats;
}

}  // namespace

NB_MODULE(_core, m) {
  m.attr("MAX_DIM") = kMaxDim;
  m.attr("MAX_MASK") = kMaxMask;
  m.attr("MAX_SCORE") = kMaxScore;
  m.attr("MAX_NODES") = kMaxNodes;
  m.attr("MAX_LOADS") = kMaxLoads;
  m.attr("MAX_RANK") = kMaxRank;
  m.doc() = "The compiled attention kernels: pointers, strides and sizes in, results written in place.";
  nb::set_leak_warnings(false);  // cached plans hold kernels until the process ends
  // The same core may be in the process already, in another package (scripts/hf_kernel.py): nanobind knows its class.
  if (const nb::handle known = nb::type<Kernel>(); known.is_valid()) {
    m.attr("Kernel") = known;
  } else {
    nb::class_<Kernel>(m, "Kernel")
        .def(nb::init<int, nb::tuple, double, double, bool>(), nb::arg("dtype"), nb::arg("dims"), nb::arg("scale"),
             nb::arg("dropout"), nb::arg("varlen"))
        .def("add_mask", &Kernel::add_mask)
        .def("add_score", &Kernel::add_score)
        .def("add_mask_expr", &Kernel::add_mask_expr)
        .def("add_score_expr", &Kernel::add_score_expr)
        .def("set_score_derivative", &Kernel::set_score_derivative)
        .def("set_compiler", &Kernel::set_compiler);
  }
  m.def("set_tensor_type", &set_tensor_type, nb::arg("type"));
  m.def("signature", &signature);
  m.def("set_compile_exprs", &set_compile_exprs, nb::arg("wanted"));
  m.def("set_float_tiles", [](bool wanted) { float_tiles = wanted; }, nb::arg("wanted"));
  m.def("expr_code", [] { return std::string(kExprCode); });
  m.def("forward", &forward);
  m.def("output", &output);
  m.def("backward", &backward);
  m.def("key_delta", &key_delta);
  m.def("bias_backward", &bias_backward);
  m.def("load_backward", &load_backward);
  m.def("covers", &covers);
  m.def("cross_entropy", &cross_entropy);
  m.def("gathered_rows", &gathered_rows);
  m.def("key_sets", &key_sets);
  m.def("key_pages", &key_pages, nb::arg("threads"), nb::arg("sizes"), nb::arg("steps"), nb::arg("sets"),
        nb::arg("counts"), nb::arg("item"), nb::arg("lengths"), nb::arg("starts").none(), nb::arg("table").none(),
        nb::arg("numbers"), nb::arg("key_lengths"), nb::arg("keys").none());
  m.def("key_unions", &key_unions, nb::arg("threads"), nb::arg("sets"), nb::arg("first"), nb::arg("rows"),
        nb::arg("limits"), nb::arg("sizes").none(), nb::arg("blocks").none(), nb::arg("readers").none());
  m.def("head_rows", &head_rows);
  m.def("large_pages", &large_pages);
  m.def("isa_available", &isa_available);
  m.def("isa_active", [] { return std::string(active().name); });
  m.def("isa_description", [] { return std::string(active().description); });
  m.def("tiles_refused", &tiles_refused);
  m.def("set_isa", &set_isa, nb::arg("name"));
  m.def("fork_loses_team", &fork_loses_team);
  m.def("openmp_runtime", [] { return std::string(openmp_runtime()); });
  m.def("peak", &peak, nb::arg("kind"), nb::arg("threads"), nb::arg("clock") = "cpu");
  m.def("team_seconds", &team_seconds, nb::arg("kind"), nb::arg("threads"), nb::arg("operations"), nb::arg("repeats"));
}
