// Operands in guarded memory: they end where an unreadable page begins (or begin where one ends), so that one
// element too many crashes; what lies between their elements is NaN, so that it shows.
#pragma once

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#undef near  // names of ours that it defines away
#undef far
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "formats.h"

namespace tilewise::test {

// Pages of the system: kept without access, opened, given back.
#if defined(_WIN32)
inline i64 page_bytes() {
  SYSTEM_INFO system;
  GetSystemInfo(&system);
  return system.dwPageSize;
}
inline char* keep_pages(i64 bytes) {
  return static_cast<char*>(VirtualAlloc(nullptr, static_cast<std::size_t>(bytes), MEM_RESERVE, PAGE_NOACCESS));
}
inline bool open_pages(char* from, i64 bytes) {
  return VirtualAlloc(from, static_cast<std::size_t>(bytes), MEM_COMMIT, PAGE_READWRITE) != nullptr;
}
inline void give_back_pages(char* from, i64) { VirtualFree(from, 0, MEM_RELEASE); }
#else
inline i64 page_bytes() { return sysconf(_SC_PAGESIZE); }
inline char* keep_pages(i64 bytes) {
  void* pages = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
}
inline bool open_pages(char* from, i64 bytes) {
  return mprotect(from, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE) == 0;
}
inline void give_back_pages(char* from, i64 bytes) { munmap(from, static_cast<std::size_t>(bytes)); }
#endif

enum class Place { end, start };

class Guarded {
 public:
  Guarded() = default;
  Guarded(i64 bytes, Place place) : bytes_(bytes) {
    const i64 page = page_bytes(), body = (bytes + page - 1) / page * page;
    mapped_ = body + 2 * page;
    base_ = keep_pages(mapped_);
    if (base_ == nullptr || (body > 0 && !open_pages(base_ + page, body))) {
      std::perror("core_test: guarded memory");
      std::exit(2);
    }
    data_ = base_ + page + (place == Place::end ? body - bytes : 0);
    clear();
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~Guarded() {
    if (base_ != nullptr) give_back_pages(base_, mapped_);
  }

  void clear() {  // to NaN in every floating type
    if (bytes_ > 0) std::memset(data_, 0xff, static_cast<std::size_t>(bytes_));
  }
  char* data() const { return data_; }
  i64 bytes() const { return bytes_; }

 private:
  char *base_ = nullptr, *data_ = nullptr;
  i64 bytes_ = 0, mapped_ = 0;
};

// Guarded numbers one after the other.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const std::vector<T>& values, Place place) : memory_(static_cast<i64>(values.size() * sizeof(T)), place) {
    if (!values.empty()) std::memcpy(memory_.data(), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  Guarded memory_;
};

enum class Layout {
  plain,
  heads_inside,  // a transposed [batch, row, head, col]
  odd_rows,      // an odd distance between rows
  odd_columns,   // a distance of two between the elements of a row
  transposed,    // the rows of [col, row]
  shifted,       // one element off the start: 16-bit pairs are not aligned
  expanded,      // one head for all, in every batch
};

using Size = std::array<i64, 4>;  // batch, heads, rows, columns

// A 4-D tensor; a dimension of size 1 has stride 0.
class Tensor {
 public:
  View view;

  Tensor() = default;
  Tensor(DType dtype, Size size, Layout layout, Place place) : dtype_(dtype), size_(size) {
    const auto [batch, heads, rows, columns] = size;
    i64 col = 1, row = columns, pad = 0;
    if (layout == Layout::odd_rows) row = columns % 2 ? columns + 2 : columns + 1;
    if (layout == Layout::odd_columns) col = 2, row = 2 * columns + 1;
    if (layout == Layout::transposed) col = rows, row = 1;
    if (layout == Layout::shifted) pad = 1;
    i64 head = layout == Layout::transposed ? rows * columns : rows * row, block = heads * head;
    if (layout == Layout::heads_inside) head = columns, row = heads * columns, block = rows * row;
    if (layout == Layout::expanded) head = block = 0;
    view = {nullptr, batch > 1 ? block : 0, heads > 1 ? head : 0, rows > 1 ? row : 0, columns > 1 ? col : 0};
    const bool none = batch == 0 || heads == 0 || rows == 0 || columns == 0;
    const i64 extent = none ? 0 : 2 * pad + at(batch - 1, heads - 1, rows - 1, columns - 1) + 1;
    memory_ = Guarded(extent * size_of(dtype), place);
    view.data = memory_.data() + (none ? 0 : pad * size_of(dtype));
    if (columns == 1) view.col = 1;
  }
  // As one operand of an attention call has it: a single column has a distance like any other, a bias has none.
  void broadcast_columns() {
    if (size_[3] == 1) view.col = 0;
  }

  DType dtype() const { return dtype_; }
  const Size& size() const { return size_; }
  i64 at(i64 b, i64 h, i64 r, i64 c) const { return b * view.batch + h * view.head + r * view.row + c * view.col; }
  double get(i64 b, i64 h, i64 r, i64 c) const { return test::get(dtype_, view.data, at(b, h, r, c)); }
  void put(i64 b, i64 h, i64 r, i64 c, double x) { test::put(dtype_, const_cast<void*>(view.data), at(b, h, r, c), x); }

  template <class F>
  void each(const F& f) const {
    for (i64 b = 0; b < size_[0]; b++)
      for (i64 h = 0; h < size_[1]; h++)
        for (i64 r = 0; r < size_[2]; r++)
          for (i64 c = 0; c < size_[3]; c++) f(b, h, r, c);
  }
  void fill(u64 seed, double amplitude) {
    each([&](i64 b, i64 h, i64 r, i64 c) {
      put(b, h, r, c, amplitude * uniform(seed, static_cast<u64>(at(b, h, r, c))));
    });
  }
  void zero() {
    each([&](i64 b, i64 h, i64 r, i64 c) { put(b, h, r, c, 0); });
  }
  void clear() { memory_.clear(); }
  std::vector<double> values() const {
    std::vector<double> all;
    all.reserve(static_cast<std::size_t>(size_[0] * size_[1] * size_[2] * size_[3]));
    each([&](i64 b, i64 h, i64 r, i64 c) { all.push_back(get(b, h, r, c)); });
    return all;
  }
  // Whether nothing was written between the elements.
  bool gaps_untouched() const {
    const i64 width = size_of(dtype_), first = (static_cast<const char*>(view.data) - memory_.data()) / width;
    std::vector<bool> ours(static_cast<std::size_t>(memory_.bytes() / width));
    each([&](i64 b, i64 h, i64 r, i64 c) { ours[static_cast<std::size_t>(first + at(b, h, r, c))] = true; });
    for (std::size_t i = 0; i < ours.size(); i++)
      for (i64 x = 0; x < width && !ours[i]; x++)
        if (memory_.data()[static_cast<i64>(i) * width + x] != '\xff') return false;
    return true;
  }

 private:
  DType dtype_ = DType::f32;
  Size size_{};
  Guarded memory_;
};

}  // namespace tilewise::test
