// From the nodes of an expression to the program that kernels run, once per call.
#pragma once

#include <string>
#include <vector>

#include "expressions/program.h"

namespace tilewise {

// One node as it is given. `kind` counts for constants and loads; `integer` is also the slot of a load.
struct ExprNode {
  ExprOp op = ExprOp::constant;
  ExprKind kind = ExprKind::boolean;
  int count = 0;
  int arg[kMaxRank] = {};
  i64 integer = 0;
  double real = 0;
};

// The operation of that name in variants/operations.py or of a leaf, with its kind if the name has one; false when
// there is none.
bool expr_op(const std::string& name, ExprNode& node);

// The name of what a program's value does: as above, or "constant", "load", "shr_by", "bits_of".
const char* expr_name(ExprOp op);

// Checks the nodes of an expression and gives their kinds; what is wrong with them, or "".
std::string check_nodes(const std::vector<ExprNode>& nodes, std::vector<ExprKind>& kinds);

// What one call makes of an expression. Kernels keep pointers into it, so it stays where it was made.
class CompiledExpr {
 public:
  // Nodes that check_nodes has passed, outputs and loads among them. `loads`: nodes of which a gradient is wanted.
  // Each load's tensor has its rank and kind. The program's scratch memory is appended to the problem's.
  CompiledExpr(const std::vector<ExprNode>& nodes, const std::vector<ExprKind>& kinds, const std::vector<int>& outputs,
               const std::vector<int>& loads, const std::vector<ExprTensor>& tensors, Problem& problem);
  // The same expression with queries and keys in each other's place: for few queries, whose lanes are keys. It is to
  // be run with both exchanged too. It has the outputs of `straight`, and no loads of which a gradient is wanted.
  CompiledExpr(const CompiledExpr& straight, std::vector<ExprNode> nodes, const std::vector<ExprKind>& kinds,
               const std::vector<int>& outputs, Problem& problem);
  CompiledExpr(const CompiledExpr&) = delete;
  CompiledExpr& operator=(const CompiledExpr&) = delete;
  const ExprProgram& program() const { return program_; }
  void run_by(ExprCompiled compiled) { program_.compiled = compiled; }

 private:
  void select(const std::vector<ExprNode>& nodes, const std::vector<ExprKind>& kinds, const std::vector<int>& outputs,
              const std::vector<int>& loads);
  void find_room(Problem& problem);
  void look_at_tensors();
  void choose_width(const Problem& problem);
  void assign_registers();
  void plan_tail();

  std::vector<ExprValue> values_;
  std::vector<ExprTensor> tensors_;
  std::vector<ExprRange> held_;
  ExprProgram program_;
};

}  // namespace tilewise
