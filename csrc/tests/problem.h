// One attention problem: what a test asks for (Case), and its operands in guarded memory (Instance).
#pragma once

#include <algorithm>
#include <string>

#include "isa/dispatch.h"
#include "guarded.h"
#include "base/parallel.h"

namespace tilewise::test {

struct MaskSpec {
  MaskOp op;
  i64 left = -1, right = -1;
  bool bottom_right = true;
  i64 length = -1;  // of `below`; -1: one per sequence
  std::vector<i64> lengths = {};
  int broadcast = 0;  // of `dense`: bit 0 batch, 1 head, 2 row, 3 column
  Layout layout = Layout::plain;
  double density = 0.7;  // of `dense`
  i64 documents = 3;     // how many different ids
};

struct ScoreSpec {
  ScoreOp op;
  double cap = 5;
  int broadcast = 0;
  bool narrow = false;  // a bias in the operands' own 16-bit type
  Layout layout = Layout::plain;
  double amplitude = 2, constant = 0;  // a bias is amplitude * noise + constant
};

struct Case {
  DType dtype = DType::f32;
  i64 batch = 1, heads = 2, kv_heads = 1, queries = 33, keys = 49;
  int head_dim = 16, value_dim = 16;
  double scale = -99;  // -99: 1 / sqrt(head_dim)
  double dropout = 0;
  bool sinks = false, grad_lse = true;
  bool statistics = false;  // asked for, and a gradient of the entropy comes back
  double amplitude = 1;
  std::vector<MaskSpec> mask;
  std::vector<ScoreSpec> score;
  Layout q = Layout::plain, k = Layout::plain, v = Layout::plain, out = Layout::plain;
  std::vector<i64> query_lengths, key_lengths;  // of a variable-length call
  bool poison = false;                          // NaN in keys and values beyond the bounding lengths
  u64 seed = 1;

  bool varlen() const { return !query_lengths.empty(); }
  double factor() const { return scale == -99 ? 1 / std::sqrt(head_dim) : scale; }
  std::string text() const {
    std::string s = std::string(name_of(dtype)) + " B" + std::to_string(batch) + " H" + std::to_string(heads) + "/" +
                    std::to_string(kv_heads) + " M" + std::to_string(queries) + " N" + std::to_string(keys) + " D" +
                    std::to_string(head_dim) + " Dv" + std::to_string(value_dim) + " scale " + std::to_string(factor());
    const char* masks[] = {"band", "below", "documents", "dense", "and", "or", "not"};
    const char* scores[] = {"alibi", "softcap", "bias"};
    for (const MaskSpec& m : mask)
      s += std::string(" ") + masks[static_cast<int>(m.op)] + "(" + std::to_string(m.left) + "," +
           std::to_string(m.right) + "," + std::to_string(m.bottom_right) + "," + std::to_string(m.length) + "," +
           std::to_string(m.broadcast) + ")";
    for (const ScoreSpec& x : score)
      s += std::string(" ") + scores[static_cast<int>(x.op)] + "(" + std::to_string(x.broadcast) + ")";
    s += " layouts ";
    for (Layout layout : {q, k, v, out}) s += std::to_string(static_cast<int>(layout));
    if (dropout > 0) s += " dropout " + std::to_string(dropout);
    if (sinks) s += " sinks";
    if (statistics) s += " statistics";
    if (varlen()) s += " varlen";
    return s + " seed " + std::to_string(seed);
  }
};

// The instructions that every visible pair must satisfy: the leaves that reach the result through `and` alone.
inline std::vector<bool> conjuncts(const std::vector<MaskSpec>& mask) {
  std::vector<bool> flags(mask.size());
  // Backwards from the result: each pending value is either a conjunct of the whole or not.
  std::vector<bool> pending = {true};
  for (std::size_t i = mask.size(); i-- > 0;) {
    const bool conjunct = pending.back();
    pending.pop_back();
    const bool both = conjunct && mask[i].op == MaskOp::all;
    if (mask[i].op == MaskOp::all || mask[i].op == MaskOp::any)
      pending.insert(pending.end(), 2, both);
    else if (mask[i].op == MaskOp::negate)
      pending.push_back(false);
    else
      flags[i] = conjunct;
  }
  return flags;
}

inline int forward_dots = -1, forward_fetch = -1;  // see Forward::dots and Forward::fetch

class Instance {
 public:
  Case c;
  Tensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  Tensor row_max, row_sum, lse, delta, grad_lse;  // [B, H, 1, M], packed: [1, H, 1, all queries]
  Tensor max_logit, entropy, row_mean, grad_entropy;
  Array<i64> top_key;
  Tensor slopes;
  std::vector<Tensor> bias, grad_bias;  // one per step of the score chain; empty for other steps
  Array<char> sinks;
  BiasBackward args;

  Instance(const Case& what, Place place) : c(what) {
    const DType acc = wide();
    i64 batch = c.batch, queries = c.queries, keys = c.keys;
    if (c.varlen()) {
      std::vector<i64> cu_q = {0}, cu_k = {0};
      for (i64 n : c.query_lengths) cu_q.push_back(cu_q.back() + n);
      for (i64 n : c.key_lengths) cu_k.push_back(cu_k.back() + n);
      c.batch = static_cast<i64>(c.query_lengths.size());
      c.queries = *std::max_element(c.query_lengths.begin(), c.query_lengths.end());
      c.keys = *std::max_element(c.key_lengths.begin(), c.key_lengths.end());
      batch = 1, queries = cu_q.back(), keys = cu_k.back();
      integers_.push_back(Array<i64>(cu_q, place));
      integers_.push_back(Array<i64>(cu_k, place));
      args.cu_q = integers_[0].data();
      args.cu_k = integers_[1].data();
    }
    q = input({batch, c.heads, queries, c.head_dim}, c.q, place, 1);
    k = input({batch, c.kv_heads, keys, c.head_dim}, c.k, place, 2);
    v = input({batch, c.kv_heads, keys, c.value_dim}, c.v, place, 3);
    grad_out = input({batch, c.heads, queries, c.value_dim}, c.v, place, 4);
    out = Tensor(c.dtype, {batch, c.heads, queries, c.value_dim}, c.out, place);
    grad_q = Tensor(c.dtype, {batch, c.heads, queries, c.head_dim}, c.out, place);
    grad_k = Tensor(c.dtype, {batch, c.kv_heads, keys, c.head_dim}, c.out, place);
    grad_v = Tensor(c.dtype, {batch, c.kv_heads, keys, c.value_dim}, c.out, place);
    for (Tensor* rows : {&row_max, &row_sum, &lse, &delta, &grad_lse, &max_logit, &entropy, &row_mean, &grad_entropy})
      *rows = Tensor(acc, {batch, c.heads, 1, queries}, Layout::plain, place);
    grad_lse.fill(c.seed + 5, 1);
    grad_entropy.fill(c.seed + 7, 1);
    top_key = Array<i64>(std::vector<i64>(static_cast<std::size_t>(batch * c.heads * queries)), place);
    std::vector<char> sink_values(static_cast<std::size_t>(c.heads * size_of(acc)));
    for (i64 h = 0; h < c.heads; h++) put(acc, sink_values.data(), h, 2 * uniform(c.seed + 6, static_cast<u64>(h)));
    sinks = Array<char>(sink_values, place);
    make_masks(place);
    make_scores(place, acc);
    fill_arguments();
  }

  DType wide() const { return c.dtype == DType::f64 ? DType::f64 : DType::f32; }
  i64 queries(i64 b) const { return c.varlen() ? c.query_lengths[static_cast<std::size_t>(b)] : c.queries; }
  i64 keys(i64 b) const { return c.varlen() ? c.key_lengths[static_cast<std::size_t>(b)] : c.keys; }

  std::vector<std::pair<const char*, Tensor*>> results() {
    std::vector<std::pair<const char*, Tensor*>> all = {
        {"out", &out},     {"lse", &lse},       {"row_max", &row_max}, {"row_sum", &row_sum},
        {"delta", &delta}, {"grad_q", &grad_q}, {"grad_k", &grad_k},   {"grad_v", &grad_v}};
    for (Tensor& grad : grad_bias)
      if (grad.view.data != nullptr) all.push_back({"grad_bias", &grad});
    if (c.statistics)
      all.insert(all.end(), {{"max_logit", &max_logit}, {"entropy", &entropy}, {"row_mean", &row_mean}});
    return all;
  }

  // Forward, backward and the gradient of every bias, from NaN-filled results and scratch memory.
  bool run(const Kernels& kernels, int threads) {
    for (auto& [name, tensor] : results()) tensor->clear();
    for (Tensor& grad : grad_bias)
      if (grad.view.data != nullptr) grad.zero();
    constexpr std::size_t soiled = std::size_t{1} << 20;
    std::memset(scratch(soiled), threads == 1 ? 0xff : 0x11, soiled);
    args.threads = threads;
    if (!kernels.forward(forward_args()) || !kernels.backward(args)) return false;
    for (std::size_t i = 0; i < c.score.size(); i++) {
      if (c.score[i].op != ScoreOp::bias) continue;
      args.index = static_cast<int>(i);
      args.grad_bias = grad_bias[i].view;
      if (!kernels.bias_backward(args)) return false;
    }
    return true;
  }

  Forward forward_args() const {
    Forward f;
    static_cast<tilewise::Problem&>(f) = args;
    f.dots = forward_dots;
    f.fetch = forward_fetch;
    f.q = q.view, f.k = k.view, f.v = v.view, f.out = out.view;
    f.lse = rows(lse), f.row_max = rows(row_max), f.row_sum = rows(row_sum);
    if (!c.statistics) return f;
    f.max_logit = rows(max_logit), f.entropy = rows(entropy), f.row_mean = rows(row_mean);
    f.top_key = {const_cast<i64*>(top_key.data()), f.lse.batch, f.lse.head};
    return f;
  }
  static Rows rows(const Tensor& t) { return {const_cast<void*>(t.view.data), t.view.batch, t.view.head}; }

 private:
  Tensor input(Size size, Layout layout, Place place, u64 salt) {
    Tensor t(c.dtype, size, layout, place);
    t.fill(c.seed * 16 + salt, c.amplitude);
    return t;
  }

  void make_masks(Place place) {
    const std::vector<bool> bounds = conjuncts(c.mask);
    for (std::size_t i = 0; i < c.mask.size(); i++) {
      const MaskSpec& spec = c.mask[i];
      MaskInstr& x = args.mask[i];
      x.op = spec.op, x.bounds = bounds[i], x.bottom_right = spec.bottom_right;
      x.left = spec.left, x.right = spec.right, x.length = spec.length;
      if (spec.op == MaskOp::below && spec.length < 0) {
        std::vector<i64> lengths = spec.lengths;
        for (i64 b = static_cast<i64>(lengths.size()); b < c.batch; b++)
          lengths.push_back(
              static_cast<i64>(scramble(c.seed + 77 + static_cast<u64>(b)) % static_cast<u64>(c.keys + 2)));
        integers_.push_back(Array<i64>(lengths, place));
        x.lengths = integers_.back().data();
        if (c.poison && bounds[i]) poison(lengths);
      }
      if (spec.op == MaskOp::same_document) {
        x.query_ids = documents(c.queries, spec, i, place, x.query_batch);
        x.key_ids = documents(c.keys, spec, i + 50, place, x.key_batch);
      }
      if (spec.op == MaskOp::dense) make_dense(spec, x, i, place);
    }
    args.mask_length = static_cast<int>(c.mask.size());
  }

  // Runs of ids, in order, as packed documents have them; one set for all sequences when broadcast.
  const i64* documents(i64 count, const MaskSpec& spec, std::size_t salt, Place place, i64& stride) {
    const i64 batch = spec.broadcast & 1 ? 1 : c.batch;
    std::vector<i64> ids;
    for (i64 b = 0; b < batch; b++)
      for (i64 i = 0; i < count; i++)
        ids.push_back(spec.documents > 0
                          ? (i * spec.documents + b) / std::max<i64>(count, 1)
                          : static_cast<i64>(scramble(c.seed + salt * 999 + static_cast<u64>(b * count + i)) % 3));
    stride = batch > 1 ? count : 0;
    integers_.push_back(Array<i64>(ids, place));
    return integers_.back().data();
  }

  Size pairs(int broadcast) const {
    return {broadcast & 1 ? 1 : c.batch, broadcast & 2 ? 1 : c.heads, broadcast & 4 ? 1 : c.queries,
            broadcast & 8 ? 1 : c.keys};
  }

  void make_dense(const MaskSpec& spec, MaskInstr& x, std::size_t i, Place place) {
    // Laid out as 16-bit numbers, whose lower bytes then are the booleans, at half the distances: a byte tensor.
    const Size size = pairs(spec.broadcast);
    Tensor shape(DType::f16, size, spec.layout, Place::end);
    shape.broadcast_columns();
    const bool none = size[0] * size[1] * size[2] * size[3] == 0;
    const i64 extent = none ? 0 : shape.at(size[0] - 1, size[1] - 1, size[2] - 1, size[3] - 1) + 1;
    std::vector<char> bytes(static_cast<std::size_t>(extent), 0);
    shape.each([&](i64 b, i64 h, i64 r, i64 n) {
      const i64 at = shape.at(b, h, r, n);
      // Whole pieces that are all true or all false, and mixed ones.
      const u64 patch = scramble(c.seed + i * 31 + static_cast<u64>(r / 64 * 40 + n / 32)) % 4;
      const double chance = patch == 0 ? 2 : patch == 1 ? -2 : spec.density;
      bytes[static_cast<std::size_t>(at)] = (uniform(c.seed + i, static_cast<u64>(at)) + 1) / 2 < chance;
    });
    bytes_.push_back(Array<char>(bytes, place));
    x.tensor = shape.view;
    x.tensor.data = bytes_.back().data();
  }

  void make_scores(Place place, DType acc) {
    bias.resize(c.score.size());
    grad_bias.resize(c.score.size());
    for (std::size_t i = 0; i < c.score.size(); i++) {
      const ScoreSpec& spec = c.score[i];
      ScoreInstr& x = args.score[i];
      x.op = spec.op, x.cap = spec.cap, x.dtype = acc;
      if (spec.op == ScoreOp::alibi) {
        slopes = Tensor(acc, {spec.broadcast & 1 ? 1 : c.batch, c.heads, 1, 1}, Layout::plain, place);
        slopes.fill(c.seed + 8, 0.3);
        x.tensor = slopes.view;
      }
      if (spec.op != ScoreOp::bias) continue;
      x.dtype = spec.narrow ? c.dtype : acc;
      bias[i] = Tensor(x.dtype, pairs(spec.broadcast), spec.layout, place);
      grad_bias[i] = Tensor(acc, pairs(spec.broadcast), Layout::plain, place);
      bias[i].broadcast_columns();
      grad_bias[i].broadcast_columns();
      bias[i].fill(c.seed + 9 + i, spec.amplitude);
      if (spec.constant != 0)
        bias[i].each(
            [&](i64 b, i64 h, i64 r, i64 n) { bias[i].put(b, h, r, n, bias[i].get(b, h, r, n) + spec.constant); });
      x.tensor = bias[i].view;
    }
    args.score_length = static_cast<int>(c.score.size());
  }

  void poison(const std::vector<i64>& lengths) {
    for (Tensor* t : {&k, &v})
      t->each([&](i64 b, i64 h, i64 r, i64 d) {
        if (r >= lengths[static_cast<std::size_t>(b)]) t->put(b, h, r, d, NAN);
      });
  }

  void fill_arguments() {
    args.dtype = c.dtype, args.batch = c.batch, args.heads = c.heads, args.kv_heads = c.kv_heads;
    args.queries = c.queries, args.keys = c.keys, args.head_dim = c.head_dim, args.value_dim = c.value_dim;
    args.scale = c.factor(), args.dropout = c.dropout, args.seed = c.seed * 0x123456789abcdefu;
    args.sinks = c.sinks ? sinks.data() : nullptr;
    args.q = q.view, args.k = k.view, args.v = v.view, args.out = out.view, args.grad_out = grad_out.view;
    args.row_max = rows(row_max), args.row_sum = rows(row_sum), args.delta = rows(delta);
    if (c.grad_lse) args.grad_lse = rows(grad_lse);
    if (c.statistics) args.row_mean = rows(row_mean), args.grad_entropy = rows(grad_entropy);
    args.grad_q = grad_q.view, args.grad_k = grad_k.view, args.grad_v = grad_v.view;
  }

  std::vector<Array<i64>> integers_;
  std::vector<Array<char>> bytes_;
};

}  // namespace tilewise::test
