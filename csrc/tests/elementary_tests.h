// The elementary functions and the storage conversions of the core, at the portable vector width.
#pragma once

#define TILEWISE_ISA test_vectors
#define TILEWISE_VECTOR_BYTES 16
#include "base/elementary.h"

#include "report.h"

namespace tilewise::test {

namespace core = tilewise::test_vectors;

template <class T, class F>
T one(const F& f, T x) {
  return f(core::set(x))[0];
}

// The i-th random point of [low, high]. Not inlined: fused into two expressions it would round in two ways.
template <class T>
TW_NOINLINE T point(double low, double high, u64 i) {
  return static_cast<T>(low + (high - low) * (uniform(17, i) + 1) / 2);
}

// The largest error of f over `count` points of [low, high], in units of the last place of the true value.
template <class T, class F, class G>
double worst_ulp(const F& f, const G& truth, double low, double high, int count) {
  double worst = 0;
  for (int i = 0; i < count; i++) {
    const T x = point<T>(low, high, static_cast<u64>(i));
    const double y = truth(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(y) - (sizeof(T) == 4 ? 23 : 52));
    worst = std::fmax(worst, std::fabs(static_cast<double>(one(f, x)) - y) / ulp);
  }
  return worst;
}

template <class T, int kDegree>
void test_exp2(double largest_error) {
  const auto f = [](core::Vec<T> x) { return core::exp2<kDegree>(x, T{}); };
  const T infinity = static_cast<T>(INFINITY), lowest = sizeof(T) == 4 ? -127 : -1023;
  expect(one(f, T{0}) == 1, "exp2(0) is 1");
  expect(one(f, -T{0}) == 1, "exp2(-0) is 1");
  for (T x : {-infinity, lowest, lowest - 1, lowest * 100, static_cast<T>(sizeof(T) == 4 ? -3.4e38 : -1.7e308)}) {
    expect(one(f, x) == 0 && !std::signbit(one(f, x)),
           "exp2 is +0 from the smallest exponent down, at " + std::to_string(x));
  }
  // What is too small for a whole mantissa would slow down every product with it.
  for (T x = lowest; x > lowest - 30; x -= static_cast<T>(0.37)) {
    expect(one(f, x) == 0, "exp2 has no subnormal results, at " + std::to_string(x));
  }
  expect(std::isnan(one(f, static_cast<T>(NAN))), "exp2(NaN) is NaN");
  for (int n = -126; n < 127; n++) expect(one(f, static_cast<T>(n)) == std::ldexp(T{1}, n), "exp2 of whole numbers");
  double worst = 0, abrupt = 0;
  for (int i = 0; i < 40000; i++) {
    const T x = point<T>(-125, 0, static_cast<u64>(i));
    const double truth = std::exp2(static_cast<double>(x));
    worst = std::fmax(worst, std::fabs(static_cast<double>(one(f, x)) - truth) / truth);
    abrupt = std::fmax(abrupt, static_cast<double>(one(f, point<T>(lowest, lowest + 1, static_cast<u64>(i)))));
  }
  expect(worst <= largest_error, "exp2 degree " + std::to_string(kDegree) + ": relative error " + number(worst));
  expect(abrupt <= std::ldexp(1.0, sizeof(T) == 4 ? -125 : -1021), "exp2 just above the smallest exponent is tiny");
}

template <class T>
void test_log() {
  const auto f = [](core::Vec<T> x) { return core::log(x, T{}); };
  expect(one(f, T{1}) == 0, "log(1) is 0");
  expect(std::isnan(one(f, static_cast<T>(NAN))), "log(NaN) is NaN");
  const auto truth = [](double x) { return std::log(x); };
  for (auto [low, high] :
       {std::pair{1e-37, 1e-30}, {0.01, 0.7}, {0.7, 0.999}, {1.001, 1.5}, {1.5, 2.5}, {1.0, 1e5}, {1e30, 1e38}}) {
    const double ulp = worst_ulp<T>(f, truth, low, high, 4000);
    expect(ulp <= 3, "log on " + number(low) + " .. " + number(high) + ": " + number(ulp) + " ulp");
  }
}

template <class T>
void test_tanh() {
  core::Vec<T> slope;
  const auto f = [&](core::Vec<T> x) { return core::tanh(x, slope, T{}); };
  const auto derivative = [&](core::Vec<T> x) {
    f(x);
    return slope;
  };
  const T infinity = static_cast<T>(INFINITY);
  expect(one(f, T{0}) == 0 && one(derivative, T{0}) == 1, "tanh at 0");
  for (T x : {static_cast<T>(30), static_cast<T>(1e30), infinity})
    expect(one(f, x) == 1 && one(f, -x) == -1 && one(derivative, x) < 1e-20, "tanh saturates at " + std::to_string(x));
  expect(std::isnan(one(f, static_cast<T>(NAN))), "tanh(NaN) is NaN");
  const auto truth = [](double x) { return std::tanh(x); };
  for (auto [low, high] : {std::pair{1e-30, 1e-20},
                           {1e-9, 1e-5},
                           {1e-5, 1e-2},
                           {0.01, 0.3},
                           {0.3, 1.0},
                           {-1.0, -0.3},
                           {1.0, 4.0},
                           {4.0, 20.0}}) {
    const double ulp = worst_ulp<T>(f, truth, low, high, 4000);
    expect(ulp <= 4, "tanh on " + number(low) + " .. " + number(high) + ": " + number(ulp) + " ulp");
    const double bent =
        worst_ulp<T>(derivative, [](double x) { return 1 / (std::cosh(x) * std::cosh(x)); }, low, high, 4000);
    expect(bent <= 40, "derivative of tanh on " + number(low) + " .. " + number(high) + ": " + number(bent) + " ulp");
  }
}

template <class T>
void test_softcap() {
  for (auto [scale, cap] : {std::pair{0.125, 30.0},
                            {0.0625, 400.0},
                            {0.125, 5000.0},
                            {1.0, 1e-5},
                            {1.0, 1e30},
                            {1.0, 1e-30},
                            {1e-25, 30.0},
                            {-0.5, 20.0},
                            {0.0, 30.0}}) {
    const core::Softcap<T> softcap(scale, cap);
    const std::string which = " of scale " + number(scale) + ", cap " + number(cap);
    const auto both = [&](T x) {
      core::Vec<T> z[1] = {core::set(x)}, slope;
      softcap(z);
      const T first = z[0][0], second = softcap.with_slope(core::set(x), slope)[0];
      expect(first == second || (std::isnan(first) && std::isnan(second)), "softcap with and without a slope" + which);
      return first;
    };
    expect(both(0) == 0, "softcap of 0" + which);
    expect(std::isnan(both(static_cast<T>(NAN))), "softcap of NaN" + which);
    if (scale != 0) {
      const double end = scale < 0 ? -cap : cap, limit = static_cast<double>(both(static_cast<T>(INFINITY)));
      expect(std::fabs(limit - end) <= 1e-6 * cap, "softcap of infinity" + which);
    }
    for (double part : {1e-6, 0.01, 0.3, 0.68, 0.69, 2.0, 30.0}) {
      const T x = static_cast<T>(scale == 0 ? part : part * cap / scale);
      const double truth = cap * std::tanh(scale * static_cast<double>(x) / cap);
      const double error = std::fabs(static_cast<double>(both(x)) - truth);
      expect(error <= (sizeof(T) == 4 ? 6e-7 : 1e-15) * std::fabs(truth), "softcap of " + number(part) + which);
    }
  }
}

inline void test_half() {
  std::vector<float> inputs = {65519.996f, 65520.0f, 1e10f, INFINITY, 2.9802322e-8f, 2.9802326e-8f, 1e-30f, 1e-40f};
  for (int bits = 0; bits < 65536; bits++) {
    const core::Half half{static_cast<u16>(bits)};
    const float wide = core::widen_one(&half);
    const double truth = half_value(half.bits);
    expect(std::isnan(truth) ? std::isnan(wide)
                             : static_cast<double>(wide) == truth && std::signbit(wide) == (bits >= 32768),
           "half " + std::to_string(bits) + " widened");
    if (bits >= 31743) continue;  // between each number and the next: the middle and its neighbours
    const float middle = static_cast<float>((half_value(half.bits) + half_value(static_cast<u16>(bits + 1))) / 2);
    for (float x : {wide, middle, std::nextafterf(middle, 0), std::nextafterf(middle, 1e6f)}) inputs.push_back(x);
  }
  for (float x : inputs) {
    for (float y : {x, -x}) {
      core::Half got[core::kLanes<float>] = {};
      core::narrow(got, 1, core::set(y));
      expect(got[0].bits == half_of(y) && got[1].bits == 0, "narrowed to half: " + number(y));
    }
  }
  core::Half nan{};
  core::narrow(&nan, 1, core::set(NAN));
  expect(std::isnan(half_value(nan.bits)), "NaN stays NaN as half");
}

inline void test_bfloat() {
  for (int bits = 0; bits < 65536; bits++) {
    const core::Bf16 b{static_cast<u16>(bits)};
    const float wide = core::widen_one(&b);
    const double truth = bfloat_value(b.bits);
    expect(std::isnan(truth) ? std::isnan(wide) : static_cast<double>(wide) == truth,
           "bfloat16 " + std::to_string(bits) + " widened");
    for (u32 low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const u32 word = static_cast<u32>(bits) << 16 | low;
      float x;
      std::memcpy(&x, &word, 4);
      core::Bf16 got{};
      core::narrow(&got, 1, core::set(x));
      const bool same = std::isnan(x) ? std::isnan(bfloat_value(got.bits)) : got.bits == bfloat_of(x);
      expect(same, "narrowed to bfloat16: word " + std::to_string(word));
    }
  }
}

inline void test_partial_loads() {
  for (Place place : {Place::end, Place::start}) {
    for (i64 count = 0; count <= core::kLanes<float>; count++) {
      const Array<float> x(std::vector<float>(static_cast<std::size_t>(count), 3.0f), place);
      const core::Vec<float> v = core::load_first(x.data(), count);
      for (int i = 0; i < core::kLanes<float>; i++) expect(v[i] == (i < count ? 3.0f : 0.0f), "load_first");
      core::store_first(x.data(), count, core::set(5.0f));
      for (i64 i = 0; i < count; i++) expect(x.data()[i] == 5.0f, "store_first");
    }
  }
}

inline void test_philox_words() {
  struct Known {
    Counter counter;
    u32 key[2];
    Counter word;
  };
  const Known known[] = {{{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
                         {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
                          {0xffffffff, 0xffffffff},
                          {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
                         {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
                          {0xa4093822, 0x299f31d0},
                          {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}};
  for (const Known& x : known) {
    const Counter got = philox(x.counter, x.key[0], x.key[1]);
    for (int i = 0; i < 4; i++) expect(got.word[i] == x.word.word[i], "known answer of Philox4x32-10");
  }
}

}  // namespace tilewise::test
