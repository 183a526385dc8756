// Interval arithmetic on expressions, and from it the cover of a tile.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "expressions/program.h"

namespace tilewise {
namespace {

using Range = ExprRange;

constexpr i64 kLeast = INT64_MIN, kMost = INT64_MAX;
constexpr i64 kScanned = 512;  // elements of a tensor that are looked at for one box

Range whole(i64 least, i64 most) {
  Range r{};
  r.least = least, r.most = most;
  return r;
}
Range any_integer() { return whole(kLeast, kMost); }

// Ranges of one program over one box.
class Ranges {
 public:
  Ranges(const ExprProgram& program, const ExprBox& box, bool proof, Range* out)
      : p_(program), box_(box), proof_(proof), out_(out), limit_(program.wide_floats ? 1.7e308 : 3.4e38) {}

  void run() {
    for (int at = 0; at < p_.begin[kExtents]; at++) {
      const ExprValue& x = p_.values[at];
      out_[at] = x.op == ExprOp::load || x.count == 0 ? stored(x)
                 : x.op == ExprOp::where              ? where(x)
                                                      : of(x, arg(x, 0), arg(x, x.count - 1));
    }
  }

 private:
  const Range& arg(const ExprValue& x, int i) const { return out_[x.arg[i]]; }

  // Finite bounds moved outwards by more than rounding and the functions' errors can be.
  Range real(double low, double high) const {
    Range r{};
    r.low = low - std::fabs(low) * 1e-6 - 1e-37;
    r.high = high + std::fabs(high) * 1e-6 + 1e-37;
    if (!(r.low >= -limit_)) r.low = -limit_, r.minus_infinity = true;
    if (!(r.high <= limit_)) r.high = limit_, r.infinity = true;
    r.low = std::min(r.low, limit_), r.high = std::max(r.high, -limit_);
    return r;
  }
  Range any_real() const {
    Range r{};
    r.low = -limit_, r.high = limit_;
    r.nan = r.infinity = r.minus_infinity = true;
    return r;
  }
  static bool finite(const Range& a) { return !a.nan && !a.infinity && !a.minus_infinity; }

  Range stored(const ExprValue& x) const {
    switch (x.op) {
      case ExprOp::batch:
        return whole(box_.b[0], box_.b[1]);
      case ExprOp::head:
        return whole(box_.h[0], box_.h[1]);
      case ExprOp::query:
        return whole(box_.m[0], box_.m[1]);
      case ExprOp::key:
        return whole(box_.n[0], box_.n[1]);
      case ExprOp::queries:
        return whole(box_.queries[0], box_.queries[1]);
      case ExprOp::keys:
        return whole(box_.keys[0], box_.keys[1]);
      case ExprOp::constant:
        if (x.kind != ExprKind::real) return whole(x.integer, x.integer);
        if (!std::isfinite(x.real)) return any_real();
        return real(x.real, x.real);
      case ExprOp::load:
        return load(x);
      default:
        return any_real();
    }
  }

  Range load(const ExprValue& x) const {
    const ExprTensor& t = p_.tensors[x.slot];
    i64 low[kMaxRank], high[kMaxRank], count = 1;
    for (int d = 0; d < t.rank; d++) {
      const i64 last = t.size[d] - 1;
      if (last < 0) return whole(0, 0);
      low[d] = std::clamp<i64>(arg(x, d).least, 0, last);
      high[d] = t.stride[d] == 0 ? low[d] : std::clamp<i64>(arg(x, d).most, 0, last);
      count = std::min(count, 2 * kScanned) * std::min(high[d] - low[d] + 1, 2 * kScanned);
    }
    if (proof_ || count > kScanned) {
      if (x.kind == ExprKind::boolean) return whole(0, 1);
      return x.kind == ExprKind::real ? any_real() : whole(p_.held[x.slot].least, p_.held[x.slot].most);
    }
    Range r{};
    r.least = kMost, r.most = kLeast, r.low = INFINITY, r.high = -INFINITY;
    scan(t, x.kind, low, high, 0, 0, r);
    if (x.kind == ExprKind::real && r.low > r.high) r.low = r.high = 0;
    return r;
  }
  void scan(const ExprTensor& t, ExprKind kind, const i64* low, const i64* high, int d, i64 at, Range& r) const {
    if (d < t.rank) {
      for (i64 i = low[d]; i <= high[d]; i++) scan(t, kind, low, high, d + 1, at + i * t.stride[d], r);
      return;
    }
    if (kind == ExprKind::real) {
      const double x = p_.wide_floats ? static_cast<const double*>(t.data)[at] : static_cast<const float*>(t.data)[at];
      r.nan |= std::isnan(x);
      r.infinity |= x == INFINITY;
      r.minus_infinity |= x == -INFINITY;
      if (!std::isfinite(x)) return;
      r.low = std::min(r.low, x);
      r.high = std::max(r.high, x);
      return;
    }
    const i64 x = kind == ExprKind::integer ? static_cast<const i64*>(t.data)[at]
                                            : static_cast<const unsigned char*>(t.data)[at] != 0;
    r.least = std::min(r.least, x);
    r.most = std::max(r.most, x);
  }

  static Range hull(const Range& a, const Range& b) {
    Range r{};
    r.least = std::min(a.least, b.least), r.most = std::max(a.most, b.most);
    r.low = std::min(a.low, b.low), r.high = std::max(a.high, b.high);
    r.nan = a.nan || b.nan, r.infinity = a.infinity || b.infinity;
    r.minus_infinity = a.minus_infinity || b.minus_infinity;
    return r;
  }
  Range where(const ExprValue& x) const {
    const Range& c = arg(x, 0);
    return c.least == 1 ? arg(x, 1) : c.most == 0 ? arg(x, 2) : hull(arg(x, 1), arg(x, 2));
  }

  // The range of an operation's value from those of its arguments.
  Range of(const ExprValue& x, const Range& a, const Range& b) const {
    const bool real_args = x.arg_kind == ExprKind::real;
    switch (x.op) {
#define TILEWISE_CASE(op, name, arity, takes, gives, code, whole_range, real_range) \
  case ExprOp::op:                                                                  \
    return real_args ? real_range : whole_range;
      TILEWISE_OPERATIONS(TILEWISE_CASE)
#undef TILEWISE_CASE
      case ExprOp::to_float:
        return real_args ? a : real(static_cast<double>(a.least), static_cast<double>(a.most));
      case ExprOp::to_int:
        return real_args ? to_int(a) : a;
      case ExprOp::difference:
        return whole_difference(a, b);
      case ExprOp::shr_by:
        return whole(a.least >> x.integer, a.most >> x.integer);
      case ExprOp::bits_of:
        return remainder(a, whole(x.integer + 1, x.integer + 1));
      case ExprOp::power_by:
        return std::isfinite(x.real) ? power(a, real(x.real, x.real)) : any_real();
      default:
        return any_real();
    }
  }

  // ---- booleans and integers

  // The least and the largest of f at the corners; anything when one of them does not fit.
  template <class F>
  static Range corners(const Range& a, const Range& b, const F& f) {
    Range r = whole(kMost, kLeast);
    for (i64 x : {a.least, a.most}) {
      for (i64 y : {b.least, b.most}) {
        i64 value;
        if (f(x, y, value)) return any_integer();
        r.least = std::min(r.least, value);
        r.most = std::max(r.most, value);
      }
    }
    return r;
  }

  static Range whole_sum(const Range& a, const Range& b) {
    return corners(a, b, [](i64 p, i64 q, i64& to) { return __builtin_add_overflow(p, q, &to); });
  }
  static Range whole_difference(const Range& a, const Range& b) {
    return corners(a, b, [](i64 p, i64 q, i64& to) { return __builtin_sub_overflow(p, q, &to); });
  }
  static Range whole_product(const Range& a, const Range& b) {
    return corners(a, b, [](i64 p, i64 q, i64& to) { return __builtin_mul_overflow(p, q, &to); });
  }
  static Range lesser(const Range& a, const Range& b) {
    return whole(std::min(a.least, b.least), std::min(a.most, b.most));
  }
  static Range greater(const Range& a, const Range& b) {
    return whole(std::max(a.least, b.least), std::max(a.most, b.most));
  }
  static Range whole_negative(const Range& a) { return a.least == kLeast ? any_integer() : whole(-a.most, -a.least); }
  static Range whole_magnitude(const Range& a) {
    if (a.least == kLeast) return any_integer();
    return whole(a.least > 0 ? a.least : a.most < 0 ? -a.most : 0, std::max(-a.least, a.most));
  }
  static Range whole_sign(const Range& a) {
    return whole(a.least > 0 ? 1 : a.least == 0 ? 0 : -1, a.most > 0 ? 1 : a.most == 0 ? 0 : -1);
  }
  static Range flipped(ExprKind kind, const Range& a) {
    return kind == ExprKind::boolean ? whole(1 - a.most, 1 - a.least) : whole(~a.most, ~a.least);
  }
  static Range comparison(ExprOp op, const Range& a, const Range& b) {
    return compared(op, a.most<b.least, a.most <= b.least, a.least >= b.most, a.least> b.most,
                    a.least == a.most && b.least == b.most && a.least == b.least, a.most < b.least || b.most < a.least);
  }

  // What a comparison says, from what is certain.
  static Range compared(ExprOp op, bool less, bool not_more, bool not_less, bool more, bool same, bool apart) {
    const bool yes = op == ExprOp::lt ? less : op == ExprOp::le ? not_more : op == ExprOp::eq ? same : apart;
    const bool no = op == ExprOp::lt ? not_less : op == ExprOp::le ? more : op == ExprOp::eq ? apart : same;
    return whole(yes, !no);
  }

  static i64 floor_divide(i64 a, i64 b) {
    const i64 q = a / b;
    return q - (a % b != 0 && (a < 0) != (b < 0));
  }
  Range divided(const Range& a, const Range& b) const {
    if ((!proof_ && b.least <= 0 && b.most >= 0) || a.least == kLeast) return any_integer();
    Range r = whole(kMost, kLeast);
    // Divisors on both sides of zero, which itself is left out.
    for (const Range& side : {whole(b.least, std::min<i64>(b.most, -1)), whole(std::max<i64>(b.least, 1), b.most)}) {
      if (side.least > side.most) continue;
      const Range part = corners(a, side, [](i64 p, i64 q, i64& to) { return to = floor_divide(p, q), false; });
      r.least = std::min(r.least, part.least), r.most = std::max(r.most, part.most);
    }
    return r.least > r.most ? whole(0, 0) : r;
  }
  Range remainder(const Range& a, const Range& b) const {
    if (!proof_ && b.least <= 0 && b.most >= 0) return any_integer();
    if (b.least == b.most && b.least > 0 && a.least > kLeast / 2) {
      const i64 first = floor_divide(a.least, b.least);
      if (first == floor_divide(a.most, b.least)) return whole(a.least - first * b.least, a.most - first * b.least);
    }
    Range r = whole(b.least < 0 ? (b.least == kLeast ? kLeast : b.least + 1) : 0, b.most > 0 ? b.most - 1 : 0);
    if (a.least >= 0 && b.least > 0) r.most = std::min(r.most, a.most);
    return r;
  }
  Range shifted(ExprOp op, const Range& a, Range by) const {
    if (!proof_ && (by.least < 0 || by.most > 63)) return any_integer();
    by.least = std::clamp<i64>(by.least, 0, 63), by.most = std::clamp<i64>(by.most, 0, 63);
    if (op == ExprOp::shr) return corners(a, by, [](i64 p, i64 q, i64& to) { return to = p >> q, false; });
    if (by.most > 62) return any_integer();
    return corners(a, by, [](i64 p, i64 q, i64& to) { return __builtin_mul_overflow(p, i64{1} << q, &to); });
  }
  // 2^k - 1 for the k bits that x needs besides its sign.
  static i64 ones(i64 x) {
    const std::uint64_t bits = static_cast<std::uint64_t>(x < 0 ? ~x : x);
    return bits == 0 ? 0 : static_cast<i64>(~std::uint64_t{0} >> __builtin_clzll(bits));
  }
  static Range bits(ExprOp op, const Range& a, const Range& b) {
    if (a.least == a.most && b.least == b.most) {
      const i64 p = a.least, q = b.least, value = op == ExprOp::all ? p & q : op == ExprOp::any ? p | q : p ^ q;
      return whole(value, value);
    }
    const i64 most = std::max(std::max(ones(a.least), ones(a.most)), std::max(ones(b.least), ones(b.most)));
    Range r = whole(-most - 1, most);
    if (op == ExprOp::all) {
      if (a.least >= 0) r = whole(0, a.most);
      if (b.least >= 0) r = whole(0, std::min(r.most, b.most));
    } else if (a.least >= 0 && b.least >= 0) {
      r.least = op == ExprOp::any ? std::max(a.least, b.least) : 0;
    }
    return r;
  }

  // ---- floats

  // `r` with what infinite and undefined arguments make of an operation that passes them on.
  static Range passing(Range r, const Range& a, const Range& b) {
    r.nan |= a.nan || b.nan;
    return r;
  }

  Range sign(const Range& a) const {
    return real(a.low > 0 && !a.nan && !a.minus_infinity ? 1 : -1, a.high < 0 && !a.nan && !a.infinity ? -1 : 1);
  }
  static Range magnitude(const Range& a) {
    Range r = a;
    r.low = a.low > 0 ? a.low : a.high < 0 ? -a.high : 0;
    r.high = std::max(-a.low, a.high);
    r.infinity |= a.minus_infinity;
    r.minus_infinity = false;
    return r;
  }
  Range real_remainder(const Range& a, const Range& b) const {
    return finite(a) && finite(b) && b.low > 0 ? real(0, b.high) : any_real();
  }
  static Range negative(const Range& a) {
    Range r = a;
    r.low = -a.high, r.high = -a.low;
    std::swap(r.infinity, r.minus_infinity);
    return r;
  }
  Range sum(const Range& a, const Range& b) const {
    Range r = passing(real(a.low + b.low, a.high + b.high), a, b);
    r.infinity |= a.infinity || b.infinity;
    r.minus_infinity |= a.minus_infinity || b.minus_infinity;
    r.nan |= (a.infinity && b.minus_infinity) || (a.minus_infinity && b.infinity);
    return r;
  }
  static bool infinite(const Range& a) { return a.infinity || a.minus_infinity; }
  static void four(const Range& a, const Range& b, double (*f)(double, double), double& low, double& high) {
    low = INFINITY, high = -INFINITY;
    for (double p : {a.low, a.high}) {
      for (double q : {b.low, b.high}) {
        low = std::fmin(low, f(p, q));
        high = std::fmax(high, f(p, q));
      }
    }
  }
  Range product(const Range& a, const Range& b) const {
    double low, high;
    four(a, b, [](double p, double q) { return p * q; }, low, high);
    Range r = passing(real(low, high), a, b);
    if (infinite(a) || infinite(b)) r.nan = r.infinity = r.minus_infinity = true;
    return r;
  }
  Range quotient(const Range& a, const Range& b) const {
    if (b.low <= 0 && b.high >= 0) return any_real();
    double low, high;
    four(a, b, [](double p, double q) { return p / q; }, low, high);
    if (infinite(b)) low = std::min(low, 0.0), high = std::max(high, 0.0);
    Range r = passing(real(low, high), a, b);
    if (infinite(a)) r.nan = r.infinity = r.minus_infinity = true;
    return r;
  }
  static Range larger(const Range& a, const Range& b) {
    Range r = hull(a, b);
    // Where one of them is minus infinity, the other is the larger one.
    r.low = a.minus_infinity ? (b.minus_infinity ? std::min(a.low, b.low) : b.low)
                             : (b.minus_infinity ? a.low : std::max(a.low, b.low));
    r.low = std::min(r.low, r.high);
    r.minus_infinity = a.minus_infinity && b.minus_infinity;
    return r;
  }
  Range power(const Range& a, const Range& b) const {
    if (!finite(a) || !finite(b) || a.low <= 0) return any_real();
    double low, high;
    four(a, b, [](double p, double q) { return std::pow(p, q); }, low, high);
    return real(low, high);
  }
  Range to_int(const Range& a) const {
    if (!proof_ && !finite(a)) return any_integer();
    if (!(a.low > -9e18 && a.high < 9e18)) return any_integer();
    return whole(static_cast<i64>(std::trunc(a.low)), static_cast<i64>(std::trunc(a.high)));
  }
  static Range real_comparison(ExprOp op, const Range& a, const Range& b) {
    const double a_low = a.minus_infinity ? -INFINITY : a.low, a_high = a.infinity ? INFINITY : a.high;
    const double b_low = b.minus_infinity ? -INFINITY : b.low, b_high = b.infinity ? INFINITY : b.high;
    const bool nan = a.nan || b.nan;
    const bool apart = a_high < b_low || b_high < a_low;
    // With NaN the first three are false, `ne` is true.
    Range r = compared(op, a_high<b_low, a_high <= b_low, a_low >= b_high, a_low> b_high,
                       a_low == a_high && b_low == b_high && a_low == b_low, apart);
    if (nan && op == ExprOp::ne) r.most = 1;
    if (nan && op != ExprOp::ne) r.least = 0;
    return r;
  }

  Range increasing(const Range& a, double (*f)(double), double below, double above) const {
    Range r = real(a.minus_infinity ? below : f(a.low), a.infinity ? above : f(a.high));
    r.nan |= a.nan;
    return r;
  }
  Range logarithm(const Range& a, double (*f)(double)) const {
    const double tiny = p_.wide_floats ? 4e-324 : 1e-45;
    Range r = real(f(std::max(a.low, tiny)), f(std::max(a.high, tiny)));
    r.nan |= a.nan || a.low < 0 || a.minus_infinity;
    r.minus_infinity |= a.low <= 0;
    r.infinity |= a.infinity;
    return r;
  }
  static double logistic(double x) { return 1 / (1 + std::exp(-x)); }
  Range root(const Range& a) const {
    Range r = real(std::sqrt(std::max(a.low, 0.0)), std::sqrt(std::max(a.high, 0.0)));
    r.nan |= a.nan || a.low < 0 || a.minus_infinity;
    r.infinity |= a.infinity;
    return r;
  }
  Range inverse_root(const Range& a) const {
    if (!(a.low > 0) || !finite(a)) return any_real();
    return real(1 / std::sqrt(a.high), 1 / std::sqrt(a.low));
  }
  Range wave(const Range& a) const {
    Range r = real(-1, 1);
    r.nan = !finite(a);
    return r;
  }
  static Range rounded(const Range& a, double (*f)(double)) {
    Range r = a;
    r.low = f(a.low), r.high = f(a.high);
    return r;
  }

  const ExprProgram& p_;
  const ExprBox& box_;
  bool proof_;
  Range* out_;
  double limit_;
};

}  // namespace

void expr_ranges(const ExprProgram& program, const ExprBox& box, bool proof, ExprRange* ranges) {
  Ranges(program, box, proof, ranges).run();
}

int expr_cover(const ExprProgram& program, const ExprBox& box) {
  ExprRange ranges[kMaxNodes];
  expr_ranges(program, box, false, ranges);
  const ExprRange& result = ranges[program.output[0]];
  return result.most == 0 ? 0 : result.least == 1 ? 2 : 1;
}

}  // namespace tilewise
