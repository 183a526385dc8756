// Storage types, random numbers and dropout words, each written once more and differently from the core: what the
// tests compare with must not share its mistakes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/args.h"

namespace tilewise::test {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline double half_value_of(u16 bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline double half_value(u16 bits) {
  static const std::vector<double> all = [] {
    std::vector<double> values(65536);
    for (int i = 0; i < 65536; i++) values[static_cast<std::size_t>(i)] = half_value_of(static_cast<u16>(i));
    return values;
  }();
  return all[bits];
}

// To nearest, ties to even.
inline u16 half_of(double x) {
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (x >= 65520) return sign | 0x7c00;
  if (x == 0) return sign;
  const int exponent = std::ilogb(x) < -14 ? -14 : std::ilogb(x);
  const double units = std::nearbyint(std::ldexp(x, 10 - exponent));  // 1024 is the first normal fraction
  return static_cast<u16>(
      sign | (units < 1024 ? static_cast<int>(units) : (exponent + 15) * 1024 + static_cast<int>(units) - 1024));
}

inline double bfloat_value(u16 bits) {
  const u32 word = u32{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// To nearest, ties to even, by trying the two neighbours.
inline u16 bfloat_of(float x) {
  u32 word;
  std::memcpy(&word, &x, 4);
  const u16 below = static_cast<u16>(word >> 16), above = static_cast<u16>(below + 1);
  if (std::isnan(x)) return below | 0x40;
  if (std::isinf(x)) return below;
  const double low = std::fabs(x - bfloat_value(below));
  const double next = std::isinf(bfloat_value(above)) ? std::copysign(std::ldexp(1, 128), x) : bfloat_value(above);
  const double high = std::fabs(next - x);
  return low < high || (low == high && below % 2 == 0) ? below : above;
}

inline double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 127) == 127) return NAN;
  return std::ldexp(exponent ? 8 + fraction : fraction, (exponent ? exponent : 1) - 10) * (code & 128 ? -1 : 1);
}

inline const char* name_of(DType dtype) {
  const char* names[] = {"float32", "float64", "bfloat16", "float16"};
  return names[static_cast<int>(dtype)];
}

inline double get(DType dtype, const void* data, i64 index) {
  const char* p = static_cast<const char*>(data) + index * size_of(dtype);
  double wide = 0;
  float single = 0;
  u16 bits = 0;
  switch (dtype) {
    case DType::f64:
      std::memcpy(&wide, p, 8);
      return wide;
    case DType::f32:
      std::memcpy(&single, p, 4);
      return single;
    default:
      std::memcpy(&bits, p, 2);
      return dtype == DType::f16 ? half_value(bits) : bfloat_value(bits);
  }
}

inline void put(DType dtype, void* data, i64 index, double x) {
  char* p = static_cast<char*>(data) + index * size_of(dtype);
  const float single = static_cast<float>(x);
  u16 bits = 0;
  switch (dtype) {
    case DType::f64:
      std::memcpy(p, &x, 8);
      return;
    case DType::f32:
      std::memcpy(p, &single, 4);
      return;
    default:
      bits = dtype == DType::f16 ? half_of(x) : bfloat_of(single);
      std::memcpy(p, &bits, 2);
  }
}

// splitmix64 (Steele et al. 2014): a hash of a number.
inline u64 scramble(u64 x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline double uniform(u64 seed, u64 index) {  // in [-1, 1)
  return static_cast<double>(static_cast<i64>(scramble(seed * 0x10001 + index)) >> 11) / 4503599627370496.0;
}

// Philox4x32-10 on one counter, as in the paper (Salmon et al. 2011).
struct Counter {
  u32 word[4];
};
inline Counter philox(Counter c, u32 k0, u32 k1) {
  for (int round = 0; round < 10; round++) {
    const u64 first = u64{0xD2511F53} * c.word[0], second = u64{0xCD9E8D57} * c.word[2];
    c = {{static_cast<u32>(second >> 32) ^ c.word[1] ^ k0, static_cast<u32>(second),
          static_cast<u32>(first >> 32) ^ c.word[3] ^ k1, static_cast<u32>(first)}};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}
inline bool kept(u64 seed, double dropout, i64 b, i64 h, i64 m, i64 n) {
  const Counter at = {{static_cast<u32>(n / 4), static_cast<u32>(m), static_cast<u32>(h), static_cast<u32>(b)}};
  const u32 word = philox(at, static_cast<u32>(seed), static_cast<u32>(seed >> 32)).word[n % 4];
  return static_cast<double>(word) >= std::nearbyint(dropout * 4294967296.0);
}

}  // namespace tilewise::test
