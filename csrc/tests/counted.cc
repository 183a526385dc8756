// What cachegrind counts (lab/src/tilelab/counted), and qemu (scripts/cross_count.sh): one attention, ours or plain,
// with nothing else in the process.
//
//   counted NAME=VALUE...     what=core|plain|nothing|compare pass=forward|backward isa=avx2 heads=1 kv_heads=1
//                             queries=512 keys=512 head_dim=64 threads=1 causal=0 listed=0 flush=0
//                             dtype=float32|bfloat16
//
// listed=K: what=core pass=forward reads K keys of each query's list, as a call with key lists does: a list is the
// block table of pages of one key, and the query's heads, which share a key head, are its rows.
//
// One batch item; bfloat16 with what=core and what=nothing alone. Operands are made and then pushed out of a cache of
// `flush` / 2 bytes; what=nothing stops there, so that the difference of two runs is the attention alone, from cold
// memory. `compare` runs both natively and prints how far they are apart. The team has one thread however many it is
// asked for, as no OpenMP runtime is loaded: `threads` only says how small the kernel cuts its tasks.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "isa/dispatch.h"
#include "formats.h"
#include "plain_passes.h"

namespace tilewise::test {
namespace {

// Lines of their own, not touched before they are used.
class Room {
 public:
  explicit Room(i64 count) : count_(count) {
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 4095) / 4096 * 4096;
    data_ = static_cast<float*>(allocate(4096, std::max<std::size_t>(bytes, 4096)));
    if (data_ == nullptr) std::exit(2);
  }
  ~Room() { release(data_); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  float* data() const { return data_; }
  // In bfloat16 the second half of the room stays as it is.
  void draw(std::uint32_t seed, DType dtype = DType::f32) {
    for (i64 i = 0; i < count_; i++) {
      seed = seed * 1664525u + 1013904223u;
      const float x = static_cast<float>(seed >> 8) * (2.0f / (1 << 24)) - 1;
      if (dtype == DType::f32)
        data_[i] = x;
      else
        put(dtype, reinterpret_cast<char*>(data_), i, x);
    }
  }
  void fill(float value) { std::fill(data_, data_ + count_, value); }
  double distance(const Room& other) const {
    double most = 0;
    for (i64 i = 0; i < count_; i++) most = std::max(most, static_cast<double>(std::fabs(data_[i] - other.data_[i])));
    return most;
  }

 private:
  i64 count_;
  float* data_;
};

using Options = std::map<std::string, std::string>;

i64 number(const Options& options, const char* name, i64 otherwise) {
  const auto found = options.find(name);
  return found == options.end() ? otherwise : std::atoll(found->second.c_str());
}

struct Operands {
  PlainSizes n;
  i64 kv_heads, threads;
  bool causal;
  DType dtype;
  i64 rows, matrix;
  Room q, k, v, out, grad_out, grad_q, grad_k, grad_v, lse, row_max, row_sum, delta;

  explicit Operands(const Options& o)
      : n{number(o, "heads", 1),
          number(o, "queries", 512),
          number(o, "keys", 512),
          static_cast<int>(number(o, "head_dim", 64)),
          static_cast<int>(number(o, "head_dim", 64)),
          0},
        kv_heads(number(o, "kv_heads", n.heads)),
        threads(number(o, "threads", 1)),
        causal(number(o, "causal", 0) != 0),
        dtype(o.count("dtype") != 0 && o.at("dtype") == "bfloat16" ? DType::bf16 : DType::f32),
        rows(n.heads * n.queries),
        matrix(n.heads * n.queries * n.keys),
        q(rows * n.head_dim),
        k(kv_heads * n.keys * n.head_dim),
        v(kv_heads * n.keys * n.value_dim),
        out(rows * n.value_dim),
        grad_out(rows * n.value_dim),
        grad_q(rows * n.head_dim),
        grad_k(kv_heads * n.keys * n.head_dim),
        grad_v(kv_heads * n.keys * n.value_dim),
        lse(rows),
        row_max(rows),
        row_sum(rows),
        delta(rows) {
    n.scale = 1 / std::sqrt(n.head_dim);
    q.draw(1, dtype), k.draw(2, dtype), v.draw(3, dtype), grad_out.draw(4, dtype);
  }

  template <class Call>
  Call call() const {
    Call f;
    f.dtype = dtype;
    f.batch = 1, f.heads = n.heads, f.kv_heads = kv_heads, f.queries = n.queries, f.keys = n.keys;
    f.head_dim = n.head_dim, f.value_dim = n.value_dim, f.scale = n.scale, f.threads = static_cast<int>(threads);
    f.q = view(q, n.queries, n.head_dim), f.k = view(k, n.keys, n.head_dim), f.v = view(v, n.keys, n.value_dim);
    f.out = view(out, n.queries, n.value_dim);
    f.row_max = statistic(row_max), f.row_sum = statistic(row_sum);
    if (causal) {
      f.mask_length = 1;
      f.mask[0].op = MaskOp::band, f.mask[0].right = 0, f.mask[0].bounds = f.mask[0].bottom_right = true;
    }
    return f;
  }

  bool forward(const Kernels& kernels) const {
    Forward f = call<Forward>();
    f.lse = statistic(lse);
    return kernels.forward(f);
  }
  // No key comes again before all have gone by, and those of a list lie in all sets of a cache.
  bool forward_by_lists(const Kernels& kernels, i64 listed) const {
    std::vector<std::int32_t> table, lengths(static_cast<std::size_t>(n.queries), static_cast<std::int32_t>(listed));
    constexpr i64 kApart = 387;  // odd: in steps of it each of 2^n keys is met once
    for (i64 x = 0; x < n.queries * listed; x++) table.push_back(static_cast<std::int32_t>(x * kApart % n.keys));
    Forward f = call<Forward>();
    f.batch = n.queries, f.heads = f.kv_heads = 1, f.queries = n.heads, f.keys = listed;
    const auto by_lists = [&](const Room& room, int width) {
      return View{room.data(), width, 0, n.queries * width, 1};
    };
    f.q = by_lists(q, n.head_dim), f.out = by_lists(out, n.value_dim);
    f.k = View{k.data(), n.head_dim, 0, n.head_dim, 1}, f.v = View{v.data(), n.value_dim, 0, n.value_dim, 1};
    const auto numbers = [&](const Room& room) { return Rows{room.data(), n.heads, 0}; };
    f.lse = numbers(lse), f.row_max = numbers(row_max), f.row_sum = numbers(row_sum);
    f.page_size = 1, f.page_slots = listed, f.block_table = table.data(), f.key_lengths = lengths.data();
    return kernels.forward(f);
  }
  bool backward(const Kernels& kernels) const {
    Backward f = call<Backward>();
    f.grad_out = view(grad_out, n.queries, n.value_dim);
    f.delta = statistic(delta);
    f.grad_q = view(grad_q, n.queries, n.head_dim), f.grad_k = view(grad_k, n.keys, n.head_dim);
    f.grad_v = view(grad_v, n.keys, n.value_dim);
    return kernels.backward(f);
  }

 private:
  static View view(const Room& room, i64 rows, int width) { return {room.data(), 0, rows * width, width, 1}; }
  Rows statistic(const Room& room) const { return {room.data(), 0, n.queries}; }
};

// The matrices that plain attention goes through.
struct Matrices {
  Room s, p, grad_p, grad_s;
  explicit Matrices(i64 size) : s(size), p(size), grad_p(size), grad_s(size) {}
};

void plain(const Operands& x, const Matrices& m, bool backward) {
  if (backward)
    plain_backward(x.n, x.q.data(), x.k.data(), x.v.data(), m.p.data(), x.grad_out.data(), m.grad_p.data(),
                   m.grad_s.data(), x.grad_q.data(), x.grad_k.data(), x.grad_v.data());
  else
    plain_forward(x.n, x.q.data(), x.k.data(), x.v.data(), m.s.data(), m.p.data(), x.out.data());
}

int compare(const Options& options, const Kernels& kernels) {
  Operands ours(options), other(options);
  const Matrices matrices(other.matrix);
  if (!ours.forward(kernels) || !ours.backward(kernels)) return 2;
  plain(other, matrices, false);
  plain(other, matrices, true);
  const std::pair<const char*, double> found[] = {{"out", ours.out.distance(other.out)},
                                                  {"grad_q", ours.grad_q.distance(other.grad_q)},
                                                  {"grad_k", ours.grad_k.distance(other.grad_k)},
                                                  {"grad_v", ours.grad_v.distance(other.grad_v)}};
  bool close = true;
  for (const auto& [name, distance] : found) {
    std::printf("%s %.2e\n", name, distance);
    close &= distance < 1e-4;
  }
  return close ? 0 : 1;
}

int run(const Options& options) {
  const auto text = [&](const char* name, const char* otherwise) {
    const auto found = options.find(name);
    return found == options.end() ? std::string(otherwise) : found->second;
  };
  const std::string what = text("what", "nothing"), isa = text("isa", "avx2");
  const bool backward = text("pass", "forward") == "backward";
  if (!choose(isa.c_str())) return std::fprintf(stderr, "this processor or build has no %s\n", isa.c_str()), 3;
  if (what != "core" && what != "plain" && what != "nothing" && what != "compare")
    return std::fprintf(stderr, "counted: what=%s is unknown\n", what.c_str()), 2;
  const bool plain_too = what == "plain" || what == "compare";
  if (plain_too && text("dtype", "float32") != "float32")
    return std::fprintf(stderr, "counted: plain attention is in float32\n"), 2;
  if (what == "compare") return compare(options, active());

  Operands x(options);
  if (what == "plain" && (x.kv_heads != x.n.heads || x.causal))
    return std::fprintf(stderr, "counted: plain attention has no groups of heads and no mask\n"), 2;
  const i64 listed = number(options, "listed", 0);
  if (listed > 0 &&
      (backward || x.kv_heads != 1 || x.causal || x.n.keys % listed != 0 || (x.n.keys & (x.n.keys - 1)) != 0))
    return std::fprintf(stderr, "counted: lists are of one key head, forward, without a mask, and divide keys 2^n\n"),
           2;
  Matrices matrices(x.matrix);
  if (backward) {  // what a forward pass would have left; any numbers move the same bytes
    x.out.draw(5, x.dtype), x.row_max.fill(0), x.row_sum.fill(1);
    matrices.p.fill(1.0f / static_cast<float>(x.n.keys));
  }
  const i64 flush = number(options, "flush", 0);
  Room others(flush / static_cast<i64>(sizeof(float)));
  others.fill(0);
  if (what == "plain") plain(x, matrices, backward);
  if (what == "core" && listed > 0) return x.forward_by_lists(active(), listed) ? 0 : 2;
  if (what == "core" && !(backward ? x.backward(active()) : x.forward(active()))) return 2;
  return 0;
}

}  // namespace
}  // namespace tilewise::test

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  for (int i = 1; i < argc; i++) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr) return std::fprintf(stderr, "counted: %s is not NAME=VALUE\n", argv[i]), 2;
    options[std::string(argv[i], static_cast<std::size_t>(equals - argv[i]))] = equals + 1;
  }
  return tilewise::test::run(options);
}
