#include "expressions/compile.h"

#include <algorithm>
#include <cstdint>

namespace tilewise {
namespace {

// What an operation takes and gives, as variants/operations.py says it: letters of "bif" per argument, '=' for the kind
// of the last argument.
struct Row {
  const char* name;
  ExprOp op;
  int count;
  const char* takes;  // of every argument; of `where` the last two
  char gives;
};
constexpr Row kRows[] = {{"s", ExprOp::score, 0, "", 'f'},
                         {"b", ExprOp::batch, 0, "", 'i'},
                         {"h", ExprOp::head, 0, "", 'i'},
                         {"m", ExprOp::query, 0, "", 'i'},
                         {"n", ExprOp::key, 0, "", 'i'},
                         {"M", ExprOp::queries, 0, "", 'i'},
                         {"N", ExprOp::keys, 0, "", 'i'},
#define TILEWISE_ROW(op, name, arity, takes, gives, code, whole, real) {#name, ExprOp::op, arity, takes, gives},
                         TILEWISE_OPERATIONS(TILEWISE_ROW)
#undef TILEWISE_ROW
                             {"where", ExprOp::where, 3, "bif", '='},
                         {"to_float", ExprOp::to_float, 1, "bif", 'f'},
                         {"to_int", ExprOp::to_int, 1, "bif", 'i'}};
constexpr const char* kStored[] = {"bool", "int", "float"};

const Row* row_of(ExprOp op) {
  for (const Row& row : kRows)
    if (row.op == op) return &row;
  return nullptr;
}

char letter(ExprKind kind) { return "bif"[static_cast<int>(kind)]; }
ExprKind kind_of(char letter) {
  return letter == 'b' ? ExprKind::boolean : letter == 'i' ? ExprKind::integer : ExprKind::real;
}

bool fits(const Row& row, const ExprNode& node, const std::vector<ExprKind>& kinds) {
  if (node.count != row.count) return false;
  const int first = node.op == ExprOp::where ? 1 : 0;
  if (first == 1 && kinds[static_cast<std::size_t>(node.arg[0])] != ExprKind::boolean) return false;
  for (int i = first; i < node.count; i++) {
    const ExprKind kind = kinds[static_cast<std::size_t>(node.arg[i])];
    if (std::string(row.takes).find(letter(kind)) == std::string::npos) return false;
    if (kind != kinds[static_cast<std::size_t>(node.arg[first])]) return false;
  }
  return true;
}

int power_of_two(const ExprNode& node) {
  if (node.op != ExprOp::constant || node.kind != ExprKind::integer || node.integer <= 0) return -1;
  return (node.integer & (node.integer - 1)) == 0 ? __builtin_ctzll(static_cast<std::uint64_t>(node.integer)) : -1;
}

int extent_of_leaf(ExprOp op) {
  if (op == ExprOp::score) return per_pair;
  return op == ExprOp::query ? per_query : op == ExprOp::key ? per_key : whole_tile;
}

// Of an expression whose queries and keys change places.
ExprOp exchanged(ExprOp op) {
  if (op == ExprOp::query) return ExprOp::key;
  if (op == ExprOp::key) return ExprOp::query;
  if (op == ExprOp::queries) return ExprOp::keys;
  return op == ExprOp::keys ? ExprOp::queries : op;
}

i64 elements(const ExprTensor& t) {
  i64 count = 1;
  for (int d = 0; d < t.rank; d++) count *= t.size[d];
  return count;
}

constexpr i64 kMostScanned = i64{1} << 26;

// The least and the largest of an integer tensor, dimensions of distance 0 looked at once.
void scan(const ExprTensor& t, int dim, const i64* data, ExprRange& range) {
  if (dim == t.rank) {
    range.least = std::min(range.least, *data);
    range.most = std::max(range.most, *data);
    return;
  }
  const i64 size = t.stride[dim] == 0 ? std::min<i64>(t.size[dim], 1) : t.size[dim];
  if (dim + 1 < t.rank) {
    for (i64 i = 0; i < size; i++) scan(t, dim + 1, data + i * t.stride[dim], range);
    return;
  }
  for (i64 i = 0; i < size; i++) {
    const i64 x = data[i * t.stride[dim]];
    range.least = x < range.least ? x : range.least;
    range.most = x > range.most ? x : range.most;
  }
}

// Finds sums of a position and what holds for the tile, and the difference of two such.
void follow(ExprValue& value, const std::vector<ExprValue>& before) {
  if (value.op == ExprOp::query || value.op == ExprOp::key) value.follows = value.op == ExprOp::query ? 1 : 2;
  if (value.kind != ExprKind::integer || (value.op != ExprOp::add && value.op != ExprOp::sub)) return;
  const ExprValue &a = before[static_cast<std::size_t>(value.arg[0])],
                  &b = before[static_cast<std::size_t>(value.arg[1])];
  if (b.extent == whole_tile) value.follows = a.follows;
  if (a.extent == whole_tile && value.op == ExprOp::add) value.follows = b.follows;
  if (value.op == ExprOp::sub && a.follows + b.follows == 3 && a.follows != 0 && b.follows != 0)
    value.op = ExprOp::difference;
}

// A node as a value whose arguments are still nodes; `before`: the values of all nodes before it.
ExprValue described(const std::vector<ExprNode>& nodes, const std::vector<ExprKind>& kinds, std::size_t at,
                    const std::vector<ExprValue>& before) {
  const ExprNode& node = nodes[at];
  ExprValue value{};
  value.op = node.op, value.kind = kinds[at], value.count = static_cast<unsigned char>(node.count);
  value.reg = -1, value.slot = static_cast<short>(node.op == ExprOp::load ? node.integer : -1);
  value.integer = node.integer, value.real = node.real;
  if (node.op == ExprOp::floordiv || node.op == ExprOp::mod) {
    // By a power of two both are exact without a division, also of negative numbers.
    const ExprNode& divisor = nodes[static_cast<std::size_t>(node.arg[1])];
    const int power = power_of_two(divisor);
    if (power >= 0) {
      value.op = node.op == ExprOp::floordiv ? ExprOp::shr_by : ExprOp::bits_of;
      value.integer = node.op == ExprOp::floordiv ? power : divisor.integer - 1;
      value.count = 1;
    }
  }
  if (node.op == ExprOp::pow && nodes[static_cast<std::size_t>(node.arg[1])].op == ExprOp::constant) {
    value.op = ExprOp::power_by;
    value.real = nodes[static_cast<std::size_t>(node.arg[1])].real;
    value.count = 1;
  }
  int extent = extent_of_leaf(value.op);
  for (int i = 0; i < value.count; i++) {
    value.arg[i] = static_cast<short>(node.arg[i]);
    const int other = before[static_cast<std::size_t>(node.arg[i])].extent;
    // Two different ones together depend on the pair.
    extent = other == whole_tile || other == extent ? extent : extent == whole_tile ? other : int{per_pair};
  }
  follow(value, before);
  if (value.op == ExprOp::difference) extent = per_diagonal;
  value.extent = static_cast<unsigned char>(extent);
  if (value.count > 0) value.arg_kind = kinds[static_cast<std::size_t>(node.arg[value.count - 1])];
  return value;
}

}  // namespace

bool expr_op(const std::string& name, ExprNode& node) {
  for (const Row& row : kRows) {
    if (name != row.name) continue;
    node.op = row.op;
    return true;
  }
  for (int kind = 0; kind < 3; kind++) {
    const bool constant = name == std::string("const_") + kStored[kind];
    if (!constant && name != std::string("load_") + kStored[kind]) continue;
    node.op = constant ? ExprOp::constant : ExprOp::load;
    node.kind = static_cast<ExprKind>(kind);
    return true;
  }
  return false;
}

const char* expr_name(ExprOp op) {
  if (op == ExprOp::shr_by) return "shr_by";
  if (op == ExprOp::bits_of) return "bits_of";
  if (op == ExprOp::power_by) return "power_by";
  if (op == ExprOp::difference) return "difference";
  if (op == ExprOp::constant) return "constant";
  const Row* row = row_of(op);
  return row ? row->name : "load";
}

std::string check_nodes(const std::vector<ExprNode>& nodes, std::vector<ExprKind>& kinds) {
  kinds.clear();
  for (const ExprNode& node : nodes) {
    const std::string place = "node " + std::to_string(kinds.size());
    if (node.count > kMaxRank) return place + " has too many arguments";
    for (int i = 0; i < node.count; i++)
      if (node.arg[i] < 0 || node.arg[i] >= static_cast<int>(kinds.size())) return place + " has a later argument";
    if (node.op == ExprOp::load) {
      for (int i = 0; i < node.count; i++)
        if (kinds[static_cast<std::size_t>(node.arg[i])] != ExprKind::integer)
          return place + " has an index that is no integer";
    }
    if (node.op == ExprOp::load || node.op == ExprOp::constant) {
      kinds.push_back(node.kind);
      continue;
    }
    const Row* row = row_of(node.op);
    if (row == nullptr || !fits(*row, node, kinds)) return place + " has arguments that its operation does not take";
    kinds.push_back(row->gives == '=' ? kinds[static_cast<std::size_t>(node.arg[node.count - 1])]
                                      : kind_of(row->gives));
  }
  return "";
}

CompiledExpr::CompiledExpr(const std::vector<ExprNode>& nodes, const std::vector<ExprKind>& kinds,
                           const std::vector<int>& outputs, const std::vector<int>& loads,
                           const std::vector<ExprTensor>& tensors, Problem& problem)
    : tensors_(tensors) {
  select(nodes, kinds, outputs, loads);
  look_at_tensors();
  choose_width(problem);
  find_room(problem);
}

CompiledExpr::CompiledExpr(const CompiledExpr& straight, std::vector<ExprNode> nodes,
                           const std::vector<ExprKind>& kinds, const std::vector<int>& outputs, Problem& problem)
    : tensors_(straight.tensors_), held_(straight.held_) {
  for (ExprNode& node : nodes) node.op = exchanged(node.op);
  select(nodes, kinds, outputs, {});
  program_.held = held_.data();
  program_.wide = straight.program_.wide, program_.wide_floats = straight.program_.wide_floats;
  find_room(problem);
}

void CompiledExpr::find_room(Problem& problem) {
  assign_registers();
  plan_tail();
  program_.room = problem.expr_room;
  problem.expr_room += program_.bytes;
}

// Finds the values that the outputs and loads need, and orders them by extent.
void CompiledExpr::select(const std::vector<ExprNode>& nodes, const std::vector<ExprKind>& kinds,
                          const std::vector<int>& outputs, const std::vector<int>& loads) {
  std::vector<ExprValue> all;
  for (std::size_t at = 0; at < nodes.size(); at++) all.push_back(described(nodes, kinds, at, all));
  std::vector<char> needed(nodes.size(), 0);
  for (int output : outputs) needed[static_cast<std::size_t>(output)] = 1;
  const auto need_arguments = [&](const ExprValue& value) {
    for (int i = 0; i < value.count; i++) needed[static_cast<std::size_t>(value.arg[i])] = 1;
  };
  for (int load : loads) need_arguments(all[static_cast<std::size_t>(load)]);
  for (std::size_t at = nodes.size(); at-- > 0;)
    if (needed[at]) need_arguments(all[at]);

  std::vector<short> place(nodes.size(), -1);
  const auto moved = [&](ExprValue value) {
    for (int i = 0; i < value.count; i++) value.arg[i] = place[static_cast<std::size_t>(value.arg[i])];
    return value;
  };
  // Arguments stand before what uses them, and never have more extent.
  for (int extent = 0; extent < kExtents; extent++) {
    program_.begin[extent] = static_cast<int>(values_.size());
    for (std::size_t at = 0; at < nodes.size(); at++) {
      if (!needed[at] || all[at].extent != extent) continue;
      place[at] = static_cast<short>(values_.size());
      values_.push_back(moved(all[at]));
    }
  }
  program_.begin[kExtents] = static_cast<int>(values_.size());
  program_.outputs = static_cast<int>(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); i++) program_.output[i] = place[static_cast<std::size_t>(outputs[i])];
  program_.loads = static_cast<int>(loads.size());
  program_.compiled = nullptr;
  for (std::size_t i = 0; i < loads.size(); i++) program_.load[i] = moved(all[static_cast<std::size_t>(loads[i])]);
  program_.values = values_.data();
  program_.tensors = tensors_.data();
}

void CompiledExpr::look_at_tensors() {
  held_.resize(tensors_.size());
  std::vector<char> seen(tensors_.size(), 0);
  for (const ExprValue& value : values_) {
    if (value.op != ExprOp::load || value.kind != ExprKind::integer) continue;
    if (seen[static_cast<std::size_t>(value.slot)]++) continue;
    const ExprTensor& tensor = tensors_[static_cast<std::size_t>(value.slot)];
    ExprRange& range = held_[static_cast<std::size_t>(value.slot)];
    const i64 count = elements(tensor);
    range.least = INT64_MIN, range.most = INT64_MAX;
    if (count == 0) {
      range.least = range.most = 0;
    } else if (count <= kMostScanned) {
      range.least = INT64_MAX, range.most = INT64_MIN;
      scan(tensor, 0, static_cast<const i64*>(tensor.data), range);
    }
  }
  program_.held = held_.data();
}

// 32-bit integers serve where every integer value, and every distance within a tensor, is proved to fit.
void CompiledExpr::choose_width(const Problem& problem) {
  program_.wide_floats = problem.dtype == DType::f64;
  program_.wide = program_.wide_floats;
  const i64 longest_query = std::max<i64>(problem.queries, 1), longest_key = std::max<i64>(problem.keys, 1);
  const ExprBox box = {{0, std::max<i64>(problem.batch, 1) - 1},
                       {0, std::max<i64>(problem.heads, 1) - 1},
                       {0, longest_query - 1},
                       {0, longest_key - 1},
                       {problem.cu_q ? 0 : problem.queries, problem.queries},
                       {problem.cu_k || problem.page_size ? 0 : problem.keys, problem.keys}};
  std::vector<ExprRange> ranges(values_.size());
  expr_ranges(program_, box, true, ranges.data());
  for (std::size_t at = 0; at < values_.size(); at++)
    if (values_[at].kind == ExprKind::integer && (ranges[at].least < INT32_MIN || ranges[at].most > INT32_MAX))
      program_.wide = true;
  const auto far = [&](const ExprValue& value) {
    if (value.op != ExprOp::load) return;
    const ExprTensor& tensor = tensors_[static_cast<std::size_t>(value.slot)];
    i64 span = 0, count = 1;
    for (int d = 0; d < tensor.rank; d++) {
      const i64 most = std::max<i64>(tensor.size[d] - 1, 0);
      span += most * std::abs(tensor.stride[d]);
      count *= std::max<i64>(tensor.size[d], 1);
    }
    if (std::max(span, count) > INT32_MAX) program_.wide = true;
  };
  for (const ExprValue& value : values_) far(value);
  for (int i = 0; i < program_.loads; i++) far(program_.load[i]);
}

void CompiledExpr::assign_registers() {
  const std::size_t count = values_.size();
  std::vector<int> last(count, -1);
  for (std::size_t at = 0; at < count; at++)
    for (int i = 0; i < values_[at].count; i++)
      last[static_cast<std::size_t>(values_[at].arg[i])] = static_cast<int>(at);
  for (int i = 0; i < program_.outputs; i++) last[static_cast<std::size_t>(program_.output[i])] = INT32_MAX;
  for (int x = 0; x < program_.loads; x++)
    for (int i = 0; i < program_.load[x].count; i++)
      last[static_cast<std::size_t>(program_.load[x].arg[i])] = INT32_MAX;
  std::vector<short> free[kExtents];
  for (int& registers : program_.registers) registers = 0;
  for (std::size_t at = 0; at < count; at++) {
    ExprValue& value = values_[at];
    const auto release = [&] {
      for (int i = 0; i < value.count; i++) {
        const std::size_t arg = static_cast<std::size_t>(value.arg[i]);
        // What holds for a tile is kept for all of its pieces.
        if (values_[arg].extent < per_key || values_[arg].reg < 0 || last[arg] != static_cast<int>(at)) continue;
        last[arg] = -1;
        free[values_[arg].extent].push_back(values_[arg].reg);
      }
    };
    // A result may take the place of an argument only where all elements are of one size.
    if (!program_.wide || program_.wide_floats) release();
    if (value.op != ExprOp::score) {
      std::vector<short>& mine = free[value.extent];
      if (mine.empty()) {
        value.reg = static_cast<short>(program_.registers[value.extent]++);
      } else {
        value.reg = mine.back();
        mine.pop_back();
      }
    }
    release();
  }
  const i64 size = program_.wide ? 8 : 4;
  program_.bytes = kExprHeader;
  for (int extent = 0; extent < kExtents; extent++)
    program_.bytes +=
        program_.registers[extent] * kRegisterElements[extent] * size * (extent == per_query ? kExprTiles : 1);
}

// What it makes in one pass are the program's last values, each taken by the next alone.
void CompiledExpr::plan_tail() {
  // A program without outputs has no tail, and nothing asks for one.
  if (program_.outputs == 0) return;
  const int end = program_.begin[kExtents], first = program_.begin[per_pair], out = program_.output[0];
  const auto value = [&](int place) -> const ExprValue& { return values_[static_cast<std::size_t>(place)]; };
  std::vector<int> uses(values_.size(), 0);
  ExprTail& tail = program_.tail;
  tail.keys = value(out).extent == per_key;
  for (int at = 0; at < end; at++) {
    for (int i = 0; i < value(at).count; i++) {
      uses[static_cast<std::size_t>(value(at).arg[i])]++;
      tail.keys |= at >= first && value(value(at).arg[i]).extent == per_key;
    }
  }
  tail.begin = end, tail.x = out;
  const auto is_score = [&](int place) { return value(place).op == ExprOp::score; };
  const auto used_once = [&](int place) { return uses[static_cast<std::size_t>(place)] == 1; };
  // Of a product (or quotient) with a number that holds for the tile: that number's place, and the other's in `x`.
  const auto factor = [&](int place, int& x) {
    const ExprValue& product = value(place);
    if (product.kind != ExprKind::real || (product.op != ExprOp::mul && product.op != ExprOp::div)) return -1;
    for (int i = product.op == ExprOp::div ? 1 : 0; i < 2; i++) {
      x = product.arg[1 - i];
      if (value(product.arg[i]).extent == whole_tile && value(x).extent == per_pair) return int{product.arg[i]};
    }
    return -1;
  };
  const auto finish = [&] {
    tail.scales = is_score(tail.x) && used_once(tail.x);
    tail.alone = !tail.keys;
    for (int at = first; at < tail.begin; at++) tail.alone &= is_score(at);
  };
  if (out != end - 1 || value(out).extent != per_pair || program_.outputs != 1 || program_.loads > 0) return finish();

  int function = out, after = -1;
  if (value(out).op == ExprOp::mul && out > first && used_once(out - 1)) {
    after = factor(out, function);
    if (after < 0 || function != out - 1) function = out, after = -1;
  }
  const ExprValue& last = value(function);
  if (last.op == ExprOp::tanh || last.op == ExprOp::sigmoid) {
    tail.end = last.op == ExprOp::tanh ? ExprEnd::tanh : ExprEnd::sigmoid;
    tail.begin = function, tail.after = after, tail.x = last.arg[0];
    int x = -1;
    const int before = tail.x == function - 1 && tail.x >= first && used_once(tail.x) ? factor(tail.x, x) : -1;
    if (before >= 0) tail.over = value(tail.x).op == ExprOp::div, tail.before = before, tail.begin--, tail.x = x;
    return finish();
  }
  const ExprValue& op = value(out);
  if (op.kind != ExprKind::real) return finish();
  const int skip = op.op == ExprOp::where ? 1 : 0;
  const bool known = op.op == ExprOp::add || op.op == ExprOp::sub || op.op == ExprOp::mul || op.op == ExprOp::where;
  const auto rank = [&](int place) { return is_score(place) ? 2 : value(place).extent == per_pair ? 1 : 0; };
  if (!known || std::max(rank(op.arg[skip]), rank(op.arg[skip + 1])) == 0) return finish();
  const bool second = rank(op.arg[skip + 1]) > rank(op.arg[skip]);
  tail.x = op.arg[skip + second], tail.before = op.arg[skip + !second], tail.begin = out;
  if (op.op == ExprOp::add) tail.end = ExprEnd::add;
  if (op.op == ExprOp::mul) tail.end = ExprEnd::mul;
  if (op.op == ExprOp::sub) tail.end = second ? ExprEnd::sub_from : ExprEnd::sub;
  if (op.op == ExprOp::where) tail.end = second ? ExprEnd::where_not : ExprEnd::where, tail.after = op.arg[0];
  finish();
}

}  // namespace tilewise
