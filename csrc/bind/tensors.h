// Tensors as torch hands them to C: by the exchange functions of DLPack 1.3, which torch.Tensor has in a capsule.
// Reading one costs no Python object, where its address and strides as Python's numbers cost half a microsecond.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "base/args.h"

namespace tilewise {

namespace nb = nanobind;

// The start of the capsule's table, and of it what is called here; null where a version does not have it.
struct ExchangeTable {
  std::uint32_t major, minor;
  const ExchangeTable* older;
  void *allocate, *export_owned, *import_owned;
  int (*borrow)(void* tensor, nb::dlpack::dltensor* to);  // 0, or -1 and Python's error is set
};

struct Exchange {
  PyTypeObject* type = nullptr;  // torch.Tensor, which is there as long as this module is
  const ExchangeTable* table = nullptr;
};
inline Exchange exchange;

inline void set_tensor_type(nb::type_object type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__");
  auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw nb::python_error();
  while (table != nullptr && table->major > 1) table = table->older;
  if (table == nullptr || table->borrow == nullptr)
    throw std::invalid_argument("tilewise._core: torch.Tensor has no exchange functions of DLPack 1");
  exchange = {reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()), table};
}

// Valid as long as the tensor is.
inline nb::dlpack::dltensor borrowed(nb::handle tensor) {
  if (exchange.type == nullptr || !PyObject_TypeCheck(tensor.ptr(), exchange.type))
    throw nb::type_error("tilewise._core: this is no torch.Tensor");
  nb::dlpack::dltensor t;
  if (exchange.table->borrow(tensor.ptr(), &t) != 0) throw nb::python_error();
  return t;
}

// A tensor [batch, head, row, col], or a packed one [row, head, col].
inline View view_of(const nb::dlpack::dltensor& t) {
  View v;
  v.data = static_cast<const char*>(t.data) + t.byte_offset;
  if (t.ndim == 3)
    v.row = t.strides[0], v.head = t.strides[1], v.col = t.strides[2];
  else if (t.ndim == 4)
    v.batch = t.strides[0], v.head = t.strides[1], v.row = t.strides[2], v.col = t.strides[3];
  else
    throw std::invalid_argument("tilewise._core: a tensor has 3 or 4 dimensions");
  return v;
}

// Dtypes, devices and sizes of q, k and v: two calls with the same bytes are for the same kernel, as far as tensors
// say.
inline nb::bytes signature(nb::handle q, nb::handle k, nb::handle v) {
  constexpr int kMostDims = 8;
  std::int64_t words[3 * (3 + kMostDims)];
  int count = 0;
  for (nb::handle tensor : {q, k, v}) {
    const nb::dlpack::dltensor t = borrowed(tensor);
    if (t.ndim > kMostDims) throw nb::type_error("tilewise._core: a tensor of more dimensions than any call takes");
    words[count++] = std::int64_t{t.device.device_type} << 32 | static_cast<std::uint32_t>(t.device.device_id);
    words[count++] = std::int64_t{t.dtype.code} << 32 | t.dtype.bits << 16 | t.dtype.lanes;
    words[count++] = t.ndim;
    for (int d = 0; d < t.ndim; d++) words[count++] = t.shape[d];
  }
  return nb::bytes(words, static_cast<std::size_t>(count) * sizeof words[0]);
}

}  // namespace tilewise
