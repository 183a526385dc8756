// What bind/bind.cc looks at before a number becomes an index, a size or a pointer: whatever Python hands over, the
// core raises an error that says what is wrong and never reads beside its arrays. Addresses alone it has to believe.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "expressions/compile.h"
#include "bind/tensors.h"

namespace tilewise {

[[noreturn]] inline void bad(const std::string& what) { throw std::invalid_argument("tilewise._core: " + what); }

// The element of a tuple; `what`: the tuple, for the error.
inline nb::handle item(nb::handle tuple, i64 index, const char* what) {
  if (!PyTuple_Check(tuple.ptr())) bad(std::string(what) + " must be a tuple");
  const i64 size = NB_TUPLE_GET_SIZE(tuple.ptr());
  if (index < 0 || index >= size)
    bad(std::string(what) + " has " + std::to_string(size) + " elements; element " + std::to_string(index) +
        " was asked for");
  return NB_TUPLE_GET_ITEM(tuple.ptr(), index);
}

inline i64 number(nb::handle tuple, i64 index, const char* what = "a tuple of numbers") {
  const i64 value = static_cast<i64>(PyLong_AsLongLong(item(tuple, index, what).ptr()));
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

inline i64 length(nb::handle tuple, const char* what) {
  if (!PyTuple_Check(tuple.ptr())) bad(std::string(what) + " must be a tuple");
  return NB_TUPLE_GET_SIZE(tuple.ptr());
}

inline void require_length(nb::handle tuple, i64 size, const char* what) {
  if (length(tuple, what) != size) bad(std::string(what) + " must have " + std::to_string(size) + " elements");
}

template <class T>
T* address(nb::handle tuple, i64 index, const char* what) {
  T* p = reinterpret_cast<T*>(static_cast<std::uintptr_t>(number(tuple, index, what)));
  if (p == nullptr) bad(std::string(what) + " has no address where one is needed");
  return p;
}

inline DType dtype_of(i64 code) {
  if (code < 0 || code > 3) bad("dtype codes are 0 to 3, not " + std::to_string(code));
  return static_cast<DType>(code);
}

inline DType computing(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

inline int bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline void check_problem(const Problem& p) {
  for (i64 size : {p.batch, p.heads, p.kv_heads, p.queries, p.keys})
    if (size < 0) bad("sizes must not be negative");
  i64 rows = 0;
  if (__builtin_mul_overflow(p.batch, p.heads, &rows) || __builtin_mul_overflow(rows, p.queries, &rows) ||
      rows > (i64{1} << 56))
    bad("sizes are too large: B * Hq * M overflows");
  if (p.heads > 0 && (p.kv_heads == 0 || p.heads % p.kv_heads != 0)) bad("Hq must be a multiple of Hk");
  if (!(p.dropout >= 0 && p.dropout <= 1)) bad("dropout must be from 0 to 1");
}

// Values on the stack behind a mask's instruction, from those before it.
inline int stacked(MaskOp op, int before) {
  const int takes = op == MaskOp::all || op == MaskOp::any ? 2 : op == MaskOp::negate || op == MaskOp::tiles ? 1 : 0;
  if (before < takes) bad("a mask's connective comes before its operands");
  return before - takes + 1;
}

// Whether the slots of a mask's instruction are those that it reads.
inline void check_mask_slots(MaskOp op, int first, int second) {
  const bool tensor = op == MaskOp::dense || op == MaskOp::blocks || op == MaskOp::tiles;
  if ((tensor || op == MaskOp::same_document) && first < 0) bad("a mask's instruction reads a tensor and has no slot");
  if (op == MaskOp::same_document && second < 0) bad("same_document reads two tensors and has one slot");
}

// What an expression gives: kinds of its outputs, and their number, are checked by the caller.
inline void check_places(const std::vector<ExprNode>& nodes, const std::vector<int>& outputs,
                         const std::vector<int>& loads) {
  const int count = static_cast<int>(nodes.size());
  if (outputs.empty() || outputs.size() > kMaxOutputs)
    bad("an expression has 1 to " + std::to_string(kMaxOutputs) + " outputs, not " + std::to_string(outputs.size()));
  for (int output : outputs)
    if (output < 0 || output >= count)
      bad("an expression's output " + std::to_string(output) + " is none of its " + std::to_string(count) + " nodes");
  if (loads.size() > kMaxLoads)
    bad("gradients of at most " + std::to_string(kMaxLoads) + " loads can be asked for, not " +
        std::to_string(loads.size()));
  for (int load : loads)
    if (load < 0 || load >= count || nodes[static_cast<std::size_t>(load)].op != ExprOp::load)
      bad("a gradient is asked for what is no load");
}

constexpr std::uint8_t kInt = 0, kFloat = 2, kBfloat = 4, kFloat8 = 10;  // codes of DLPack; kFloat8: e4m3fn

inline Stored stored_as(nb::handle tensor) {
  const nb::dlpack::dltensor t = borrowed(tensor);
  if (t.dtype.bits != 8) return Stored::plain;
  return t.dtype.code == kInt ? Stored::int8 : t.dtype.code == kFloat8 ? Stored::e4m3 : Stored::plain;
}

// A tensor of a call as a view. `rows` and `width`: -1 where any size will do.
inline View operand(nb::handle tensor, const char* name, const Problem& p, bool packed, i64 batch, i64 heads, i64 rows,
                    i64 width, Stored stored = Stored::plain) {
  const nb::dlpack::dltensor t = borrowed(tensor);
  const std::string who(name);
  const bool plain = stored == Stored::plain;
  const int bytes = plain ? bytes_of(p.dtype) : 1;
  const std::uint8_t code = stored == Stored::int8   ? kInt
                            : stored == Stored::e4m3 ? kFloat8
                            : p.dtype == DType::bf16 ? kBfloat
                                                     : kFloat;
  if (t.dtype.code != code || t.dtype.bits != 8 * bytes) bad(who + " has another dtype than the kernel");
  if (t.device.device_type != 1) bad(who + " is not in the CPU's memory");
  if (t.ndim != (packed ? 3 : 4)) bad(who + " must have " + (packed ? "3" : "4") + " dimensions");
  const i64 wanted[] = {batch, heads, rows, width}, packed_wanted[] = {rows, heads, width};
  for (int d = 0; d < t.ndim; d++) {
    const i64 size = packed ? packed_wanted[d] : wanted[d];
    if (size >= 0 && t.shape[d] != size)
      bad(who + " has size " + std::to_string(t.shape[d]) + " in dimension " + std::to_string(d) +
          " where the kernel is for " + std::to_string(size));
  }
  const View v = view_of(t);
  if (!plain && v.col != 1) bad(who + " in 8 bits must have its columns next to one another");
  if (reinterpret_cast<std::uintptr_t>(v.data) % static_cast<std::uintptr_t>(bytes) != 0)
    bad(who + " is not aligned to its elements; pass a copy (clone())");
  return v;
}

// The numbers of a contiguous tensor of integers: so many of them, in the CPU's memory.
template <class T>
T* integers(nb::handle tensor, const char* name, i64 count) {
  const nb::dlpack::dltensor t = borrowed(tensor);
  const std::string who(name);
  if (t.dtype.code != kInt || t.dtype.bits != 8 * sizeof(T)) bad(who + " has another dtype than is read");
  if (t.device.device_type != 1) bad(who + " is not in the CPU's memory");
  i64 step = 1;
  for (int d = t.ndim - 1; d >= 0; d--) {
    if (t.shape[d] != 1 && t.strides[d] != step && t.shape[d] != 0) bad(who + " must be contiguous");
    step *= t.shape[d];
  }
  if (step != count)
    bad(who + " has " + std::to_string(step) + " numbers where " + std::to_string(count) + " are needed");
  return reinterpret_cast<T*>(static_cast<char*>(t.data) + t.byte_offset);
}

// The scales of rows in 8 bits, [pages, heads, page size].
inline View scales_of(nb::handle tensor, const char* name, const Problem& p) {
  const nb::dlpack::dltensor t = borrowed(tensor);
  const std::string who(name);
  if (t.dtype.code != kFloat || t.dtype.bits != 32 || t.device.device_type != 1)
    bad(who + " must be in float32, in the CPU's memory");
  if (t.ndim != 3 || t.shape[1] != p.kv_heads || t.shape[2] != p.page_size)
    bad(who + " must have a number for each row of a page");
  View v;
  v.data = static_cast<const char*>(t.data) + t.byte_offset;
  v.batch = t.strides[0], v.head = t.strides[1], v.row = t.strides[2];
  return v;
}

}  // namespace tilewise
