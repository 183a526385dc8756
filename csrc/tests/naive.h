// Attention pair by pair in double precision, forward and backward, with a bound for the error of each result:
// the sums of absolute values times what the storage and the computing type may lose.
#pragma once

#include "problem.h"

namespace tilewise::test {

using Numbers = std::vector<double>;

// What one operation may lose, relative: `probability` one probability (its exponential, its rounding to pairs of
// bfloat16 where the products take those), `unit` one float (double), `store` one result.
struct Precision {
  double probability, unit, store, smallest;
  Precision(DType dtype, bool paired) {
    unit = std::ldexp(1.0, dtype == DType::f64 ? -53 : -24);
    store = dtype == DType::bf16 ? std::ldexp(1.0, -8) : dtype == DType::f16 ? std::ldexp(1.0, -11) : unit;
    probability = dtype == DType::f64 ? 2e-15 : dtype == DType::f32 ? 5e-7 : 6e-6;
    if (paired && dtype == DType::bf16) probability = std::ldexp(1.0, -8) + 3e-4;
    smallest = dtype == DType::f16 ? 6e-8 : dtype == DType::f64 ? 1e-300 : 1e-36;
  }
};

class Naive {
 public:
  Numbers out, lse, keys_lse, row_max, row_sink, delta, grad_q, grad_k, grad_v;  // keys_lse: without the sink
  double units = 1;                                                              // natural ones of one unit of row_max
  Numbers out_room, lse_room, logit_room, row_room, delta_room, grad_q_room, grad_k_room, grad_v_room;
  Numbers max_logit, entropy, row_mean, entropy_room;
  std::vector<std::vector<bool>> tops;  // per row: which keys may be on top; none in a dead row
  std::vector<Numbers> grad_bias, grad_bias_room;

  Naive(const Instance& given, bool paired)
      : g_(given),
        c_(given.c),
        precision_(given.c.dtype, paired),
        q_(given.q.values()),
        k_(given.k.values()),
        v_(given.v.values()),
        grad_(given.grad_out.values()) {
    const auto like = [](const Tensor& t) { return Numbers(t.values().size()); };
    for (Numbers* x : {&out, &out_room}) *x = like(g_.out);
    for (Numbers* x : {&lse, &keys_lse, &row_max, &row_sink, &delta, &lse_room, &logit_room, &row_room, &delta_room})
      *x = like(g_.lse);
    for (Numbers* x : {&max_logit, &entropy, &row_mean, &entropy_room}) *x = like(g_.lse);
    tops.resize(lse.size());
    for (Numbers* x : {&grad_q, &grad_q_room}) *x = like(g_.q);
    for (Numbers* x : {&grad_k, &grad_k_room}) *x = like(g_.k);
    for (Numbers* x : {&grad_v, &grad_v_room}) *x = like(g_.v);
    for (const Tensor& t : g_.bias) {
      grad_bias.push_back(t.view.data ? like(t) : Numbers());
      grad_bias_room.push_back(grad_bias.back());
    }
    i64 query = 0, key = 0;
    for (i64 b = 0; b < c_.batch; b++) {
      for (i64 h = 0; h < c_.heads; h++)
        for (i64 m = 0; m < g_.queries(b); m++) row(b, h, m, c_.varlen() ? query : 0, c_.varlen() ? key : 0);
      query += g_.queries(b);
      key += g_.keys(b);
    }
    finish(out, out_room);
    finish(grad_q, grad_q_room);
    finish(grad_k, grad_k_room);
    finish(grad_v, grad_v_room);
  }

  // Whether query m may attend to key n: the mask program, by its definition in base/args.h.
  bool sees(i64 b, i64 h, i64 m, i64 n) const {
    if (g_.args.mask_length == 0) return true;
    bool stack[kMaxMask];
    int top = 0;
    for (int i = 0; i < g_.args.mask_length; i++) {
      const MaskInstr& x = g_.args.mask[i];
      const i64 a = x.bottom_right ? g_.keys(b) - g_.queries(b) : 0;
      if (x.op == MaskOp::band) {
        stack[top++] = (x.left < 0 || a + m - x.left <= n) && (x.right < 0 || n <= a + m + x.right);
      } else if (x.op == MaskOp::below) {
        stack[top++] = n < (x.lengths ? x.lengths[b] : x.length);
      } else if (x.op == MaskOp::same_document) {
        stack[top++] = x.query_ids[b * x.query_batch + m] == x.key_ids[b * x.key_batch + n];
      } else if (x.op == MaskOp::dense) {
        const View& t = x.tensor;
        stack[top++] = static_cast<const char*>(t.data)[b * t.batch + h * t.head + m * t.row + n * t.col] != 0;
      } else if (x.op == MaskOp::negate) {
        stack[top - 1] = !stack[top - 1];
      } else {
        const bool last = stack[--top];
        stack[top - 1] = x.op == MaskOp::all ? stack[top - 1] && last : stack[top - 1] || last;
      }
    }
    return stack[0];
  }

 private:
  // The score of one pair; gains[i] becomes the derivative of step i, `size` the size of what was added up.
  double score(i64 b, i64 h, i64 m, i64 n, const double* q, const double* k, Numbers& gains, double& size) const {
    double s = 0;
    size = 0;
    for (int d = 0; d < c_.head_dim; d++) {
      s += q[d] * k[d];
      size += std::fabs(q[d] * k[d]);
    }
    s *= c_.factor();
    size *= std::fabs(c_.factor());
    for (std::size_t i = 0; i < c_.score.size(); i++) {
      gains[i] = 1;
      double change = 0;
      if (c_.score[i].op == ScoreOp::alibi) {
        const double distance = std::fabs(static_cast<double>(m + g_.keys(b) - g_.queries(b) - n));
        change = -g_.slopes.get(b, h, 0, 0) * distance;
      } else if (c_.score[i].op == ScoreOp::softcap) {
        const double t = std::tanh(s / c_.score[i].cap);
        gains[i] = 1 - t * t;
        change = c_.score[i].cap * t - s;
        size += 2 * std::fabs(c_.score[i].cap * t);  // a tanh is good to a few units of the last place
      } else {
        change = g_.bias[i].get(b, h, m, n);
        if (change != -INFINITY) change = std::max(change, c_.dtype == DType::f64 ? -1e307 : -1e38);
      }
      s += change;
      if (std::isfinite(change)) size += std::fabs(change);
    }
    return s;
  }

  static std::size_t place(const Tensor& t, i64 b, i64 h, i64 r) {
    return static_cast<std::size_t>(((b * t.size()[1] + h) * t.size()[2] + r) * t.size()[3]);
  }

  void row(i64 b, i64 h, i64 m, i64 first_query, i64 first_key) {
    const i64 block = c_.varlen() ? 0 : b, keys = g_.keys(b), kv = h / (c_.heads / c_.kv_heads);
    const std::size_t q_at = place(g_.q, block, h, first_query + m), o_at = place(g_.out, block, h, first_query + m);
    const std::size_t r_at = place(g_.lse, block, h, 0) + static_cast<std::size_t>(first_query + m);
    const std::size_t steps = c_.score.size(), dv = static_cast<std::size_t>(c_.value_dim);
    const double keep = 1 / (1 - c_.dropout), unit = precision_.unit;
    const double grad_lse = c_.grad_lse ? g_.grad_lse.get(block, h, 0, first_query + m) : 0;

    Numbers s(static_cast<std::size_t>(keys), -INFINITY), p(s.size()), gains(s.size() * steps), gain(steps);
    std::vector<bool> drop(s.size());
    double top = -INFINITY, size = 0, total = 0;
    for (std::size_t n = 0; n < s.size(); n++) {
      const i64 key = static_cast<i64>(n);
      if (!sees(b, h, m, key)) continue;
      double one;
      s[n] = score(b, h, m, key, &q_[q_at], &k_[place(g_.k, block, kv, first_key + key)], gain, one);
      std::copy(gain.begin(), gain.end(), gains.begin() + static_cast<i64>(n * steps));
      if (s[n] == -INFINITY) continue;
      size = std::max(size, one);
      top = std::max(top, s[n]);
      drop[n] = c_.dropout > 0 && !kept(g_.args.seed, c_.dropout, b, h, m, key);
    }
    const double sink = c_.sinks ? test::get(g_.wide(), g_.sinks.data(), h) : -INFINITY, shift = std::max(top, sink);
    for (std::size_t n = 0; n < s.size(); n++)
      if (s[n] != -INFINITY) total += p[n] = std::exp(s[n] - shift);
    keys_lse[r_at] = top == -INFINITY ? top : shift + std::log(total);
    if (sink != -INFINITY) total += std::exp(sink - shift);
    // In the units of the scores: those of q.k where the pass leaves the scale to the softmax.
    units = steps == 0 && c_.factor() > 1e-30 ? c_.factor() : 1;
    row_max[r_at] = top / units, row_sink[r_at] = sink;
    lse[r_at] = shift == -INFINITY ? shift : shift + std::log(total);
    const double loss = 2 * precision_.probability + 6 * unit * (size + std::fabs(sink == -INFINITY ? 0 : sink));
    logit_room[r_at] = 8 * unit * (size + 1), row_room[r_at] = logit_room[r_at] / units;
    lse_room[r_at] = loss + 4 * unit * std::fabs(shift == -INFINITY ? 0 : lse[r_at]);

    max_logit[r_at] = top;
    if (top != -INFINITY)
      for (double x : s) tops[r_at].push_back(x >= top - logit_room[r_at]);
    double mean = 0, spread = 0;  // of the logits less the largest: how far they are from their mean
    for (double x : s) mean += x == -INFINITY ? 0 : std::exp(x - shift) / total * (x - shift);
    if (sink != -INFINITY) mean += std::exp(sink - shift) / total * (sink - shift);
    for (double x : s) spread += x == -INFINITY ? 0 : std::exp(x - shift) / total * std::fabs(x - shift - mean);
    if (shift != -INFINITY) row_mean[r_at] = mean / std::log(2.0), entropy[r_at] = std::log(total) - mean;
    entropy_room[r_at] = loss * (2 + std::fabs(mean) + spread) + 8 * unit * (1 + std::fabs(entropy[r_at]));

    for (std::size_t n = 0; n < s.size(); n++) {
      p[n] = p[n] == 0 ? 0 : p[n] / total;
      if (p[n] == 0 || drop[n]) continue;
      const double* v = &v_[place(g_.v, block, kv, first_key + static_cast<i64>(n))];
      for (std::size_t d = 0; d < dv; d++) {
        out[o_at + d] += p[n] * keep * v[d];
        out_room[o_at + d] += loss * p[n] * keep * std::fabs(v[d]);
      }
    }

    double sum = 0, sum_size = 0, sum_room = 0;
    for (std::size_t d = 0; d < dv; d++) {
      const double o = out[o_at + d], g = grad_[o_at + d];
      sum += o * g;
      sum_size += std::fabs(o * g);
      sum_room += std::fabs(g) * (out_room[o_at + d] + precision_.store * std::fabs(o) + precision_.smallest);
    }
    delta[r_at] = sum;
    delta_room[r_at] = sum_room + 8 * unit * sum_size;
    sum_size += std::fabs(grad_lse);
    if (top == -INFINITY) return;

    for (std::size_t n = 0; n < s.size(); n++) {
      if (p[n] == 0) continue;
      const std::size_t k_at = place(g_.k, block, kv, first_key + static_cast<i64>(n));
      const std::size_t v_at = place(g_.v, block, kv, first_key + static_cast<i64>(n));
      double dp = 0, dp_size = 0;
      for (std::size_t d = 0; d < dv && !drop[n]; d++) {
        const double term = grad_[o_at + d] * v_[v_at + d] * keep;
        dp += term;
        dp_size += std::fabs(term);
        grad_v[v_at + d] += p[n] * keep * grad_[o_at + d];
        grad_v_room[v_at + d] += loss * p[n] * keep * std::fabs(grad_[o_at + d]);
      }
      double ds = p[n] * (dp - sum + grad_lse);
      double room = p[n] * (loss * (dp_size + sum_size) + delta_room[r_at]);
      if (c_.statistics) {
        const double away = s[n] - shift - mean, grad = g_.grad_entropy.get(block, h, 0, first_query + m);
        ds -= p[n] * grad * away;
        room += p[n] * std::fabs(grad) * (loss * std::fabs(away) + 2 * entropy_room[r_at]);
      }
      for (std::size_t i = steps; i-- > 0;) {
        if (c_.score[i].op == ScoreOp::bias) {
          const Tensor& t = g_.bias[i];
          const i64 key = static_cast<i64>(n);
          const auto at = [&](i64 x, int dim) { return t.size()[static_cast<std::size_t>(dim)] == 1 ? 0 : x; };
          const std::size_t to = place(t, at(b, 0), at(h, 1), at(m, 2)) + static_cast<std::size_t>(at(key, 3));
          grad_bias[i][to] += ds;
          grad_bias_room[i][to] += room;
        }
        ds *= gains[n * steps + i];
      }
      const double factor = c_.factor();
      for (std::size_t d = 0; d < static_cast<std::size_t>(c_.head_dim); d++) {
        grad_q[q_at + d] += factor * ds * k_[k_at + d];
        grad_q_room[q_at + d] += std::fabs(factor * room * k_[k_at + d]);
        grad_k[k_at + d] += factor * ds * q_[q_at + d];
        grad_k_room[k_at + d] += std::fabs(factor * room * q_[q_at + d]);
      }
    }
  }

  void finish(const Numbers& x, Numbers& room) const {
    for (std::size_t i = 0; i < x.size(); i++) room[i] += precision_.store * std::fabs(x[i]) + precision_.smallest;
  }

  const Instance& g_;
  const Case& c_;
  Precision precision_;
  Numbers q_, k_, v_, grad_;
};

}  // namespace tilewise::test
