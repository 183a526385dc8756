// Tests of the core without Python: every kernel of every instruction set that this machine can run, against a naive
// implementation, in memory that cannot be overrun unseen.
//
//   core_test [--every N] [--draws N] [--isa NAME] [PART_OF_A_NAME]
//
// One case of N (slow machines), N random problems, one instruction set alone.
#include <chrono>
#include <functional>

#include "cover_tests.h"
#include "decode_tests.h"
#include "elementary_tests.h"
#include "expr_tests.h"
#include "special_tests.h"

namespace tilewise::test {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
int draws = 60;
int share = 0, shares = 1;  // of the tests: every shares-th, from this one on

// Everything at once, drawn at random.
Case draw(u64 seed) {
  u64 state = seed * 1000;
  const auto pick = [&](auto... choices) {
    const double all[] = {static_cast<double>(choices)...};
    return all[scramble(state++) % sizeof...(choices)];
  };
  const auto layout = [&] { return static_cast<Layout>(scramble(state++) % 6); };
  Case c;
  c.seed = seed;
  c.dtype = kTypes[scramble(state++) % 4];
  c.batch = static_cast<i64>(pick(1, 1, 2, 3));
  c.kv_heads = static_cast<i64>(pick(1, 1, 2));
  c.heads = c.kv_heads * static_cast<i64>(pick(1, 2, 3));
  c.queries = static_cast<i64>(pick(1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 129));
  c.keys = static_cast<i64>(pick(1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 191, 193));
  c.head_dim = static_cast<int>(pick(1, 2, 5, 8, 13, 16, 24, 33));
  c.value_dim = static_cast<int>(pick(1, 3, 4, 8, 12, 16, 21, 32));
  if (pick(0, 0, 1) != 0) {
    for (i64 b = 0; b < c.batch; b++) {
      c.query_lengths.push_back(static_cast<i64>(pick(0, 1, 17, 64, 70)));
      c.key_lengths.push_back(static_cast<i64>(pick(0, 1, 17, 64, 130)));
    }
  }
  for (int parts = static_cast<int>(pick(0, 1, 1, 2, 3)), i = 0; i < parts; i++) {
    const int leaf = static_cast<int>(pick(0, 0, 0, 1, 2, 3, 4));
    if (leaf == 0)
      c.mask.push_back(
          band(static_cast<i64>(pick(-1, -1, 0, 9, 64)), static_cast<i64>(pick(-1, 0, 0, 5)), pick(0, 1) != 0));
    if (leaf == 1) c.mask.push_back(below(static_cast<i64>(pick(0, 5, 16, 100))));
    if (leaf == 2) c.mask.push_back(lengths());
    if (leaf == 3) c.mask.push_back(documents(static_cast<i64>(pick(0, 1, 2, 5)), static_cast<int>(pick(0, 1))));
    if (leaf == 4) c.mask.push_back(dense(static_cast<int>(scramble(state++) % 16), pick(0.1, 0.5, 0.95), layout()));
    if (pick(0, 0, 1) != 0) c.mask.push_back(kNot);
    if (i > 0) c.mask.push_back(pick(0, 1, 1) != 0 ? kAnd : kOr);
  }
  for (int steps = static_cast<int>(pick(0, 0, 1, 2, 3)), i = 0; i < steps; i++) {
    const int step = static_cast<int>(pick(0, 1, 2, 2));
    if (step == 0) c.score = {alibi(static_cast<int>(pick(0, 1)))};  // one set of slopes: it starts the chain
    if (step == 1) c.score.push_back(softcap(pick(1, 5, 50)));
    if (step == 2) c.score.push_back(bias(static_cast<int>(scramble(state++) % 16), layout(), pick(0, 1) != 0));
  }
  c.q = layout(), c.k = layout(), c.v = layout();
  c.out = static_cast<Layout>(pick(0, 1, 2, 5));
  c.scale = pick(-99, -99, -99, -0.5, 0, 2);
  c.dropout = pick(0, 0, 0.25, 0.8);
  c.sinks = pick(0, 0, 1) != 0;
  c.grad_lse = pick(0, 1) != 0;
  c.statistics = pick(0, 0, 1) != 0;
  return c;
}

struct Test {
  std::string name;
  std::function<void()> run;
};

std::vector<Test> tests() {
  std::vector<Test> all = {
      {"philox known answers", test_philox_words},
      {"partial loads", test_partial_loads},
      {"exp2 float32", [] { test_exp2<float, 5>(3e-7), test_exp2<float, 6>(2.5e-7); }},
      {"exp2 bfloat16 and float16", [] { test_exp2<float, 3>(1.2e-4), test_exp2<float, 4>(4e-6); }},
      {"exp2 float64", [] { test_exp2<double, 5>(6e-16); }},
      {"log", [] { test_log<float>(), test_log<double>(); }},
      {"tanh", [] { test_tanh<float>(), test_tanh<double>(); }},
      {"softcap", [] { test_softcap<float>(), test_softcap<double>(); }},
      {"half conversions", test_half},
      {"bfloat16 conversions", test_bfloat}};
  const std::pair<const char*, void (*)(DType)> numeric[] = {{"sizes", test_sizes},
                                                             {"depths", test_depths},
                                                             {"heads", test_heads},
                                                             {"masks", test_masks},
                                                             {"dense masks", test_dense_masks},
                                                             {"scores", test_scores},
                                                             {"biases", test_biases},
                                                             {"layouts", test_layouts},
                                                             {"options", test_options},
                                                             {"dropout", test_dropout},
                                                             {"poisoned padding", test_poisoned_padding},
                                                             {"statistics", test_statistics},
                                                             {"extreme scores", test_extreme_scores},
                                                             {"NaN spreads", test_nan_spreads},
                                                             {"varlen", test_varlen},
                                                             {"few queries", test_few_queries},
                                                             {"few queries, variants", test_few_queries_variants},
                                                             {"few queries, alone", test_few_queries_alone},
                                                             {"few queries, short", test_few_queries_short},
                                                             {"few queries, fetched", test_few_queries_fetched},
                                                             {"8 bits", test_eight_bits},
                                                             {"int8 rows", test_int8_rows},
                                                             {"batch mates", test_batch_mates},
                                                             {"tables", test_covers}};
  for (const auto& each : numeric)
    for (DType dtype : kTypes)
      all.push_back({std::string(each.first) + " " + name_of(dtype), [dtype, run = each.second] { run(dtype); }});
  all.push_back({"8 bits, NaN", test_eight_bits_nan});
  all.push_back({"few queries by dot products and widened", [] {
                   for (int dots : {0, 1}) {
                     forward_dots = dots;
                     test_few_queries(DType::bf16), test_few_queries_variants(DType::bf16);
                   }
                   forward_dots = -1;
                 }});
  all.push_back({"few queries, keys fetched ahead and not", [] {
                   for (int fetch : {0, 1, 2}) {
                     forward_fetch = fetch;
                     for (DType dtype : kTypes) test_few_queries(dtype), test_few_queries_alone(dtype);
                   }
                   forward_fetch = -1;
                 }});
  all.push_back({"expressions: checks", test_expr_checks});
  all.push_back({"order of tasks", test_order});
  const std::pair<const char*, void (*)(DType)> expressions[] = {
      {"graphs", test_expr_graphs},       {"extents", test_expr_extents}, {"covers", test_expr_cover},
      {"functions", test_expr_functions}, {"powers", test_expr_powers},   {"specials", test_expr_specials}};
  for (const auto& each : expressions)
    for (DType dtype : {DType::f32, DType::f64})
      all.push_back({std::string("expressions: ") + each.first + " " + name_of(dtype),
                     [dtype, run = each.second] { run(dtype); }});
  for (DType dtype : {DType::bf16, DType::f16})
    all.push_back({std::string("every value ") + name_of(dtype), [=] { test_every_value(dtype); }});
  all.push_back({"drawn problems", [] {
                   for (int i = 0; i < draws; i++) check(draw(static_cast<u64>(i) + 1));
                 }});
  return all;
}

int run_all(const char* part) {
  int passed = 0, failed = 0;
  std::printf("core_test: on");
  for (const Kernels* kernels : instruction_sets()) std::printf(" %s", kernels->name);
  std::printf("\n");
  int number = 0;
  for (const Test& test : tests()) {
    if (test.name.find(part) == std::string::npos || number++ % shares != share) continue;
    report = {};
    const auto begin = std::chrono::steady_clock::now();
    test.run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    (report.failures ? failed : passed)++;
    std::printf("%s %-32s %6.2f s", report.failures ? "FAIL" : "ok  ", test.name.c_str(), took.count());
    if (report.worst > 0)
      std::printf("   largest error %.2f of the allowed (%s)", report.worst, report.worst_case.c_str());
    if (report.failures) std::printf("   %d failures", report.failures);
    std::printf("\n");
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace tilewise::test

int main(int argc, char** argv) {
  const char* part = "";
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--draws") == 0 && i + 1 < argc)
      tilewise::test::draws = std::atoi(argv[++i]);
    else if (std::strcmp(argv[i], "--share") == 0 && i + 2 < argc)
      tilewise::test::share = std::atoi(argv[++i]), tilewise::test::shares = std::max(1, std::atoi(argv[++i]));
    else if (std::strcmp(argv[i], "--every") == 0 && i + 1 < argc)
      tilewise::test::every = std::max(1, std::atoi(argv[++i]));
    else if (std::strcmp(argv[i], "--isa") == 0 && i + 1 < argc)
      tilewise::test::only_isa = argv[++i];
    else
      part = argv[i];
  }
  if (tilewise::test::instruction_sets().empty()) {
    std::fprintf(stderr, "core_test: --isa %s: this machine does not run it\n", tilewise::test::only_isa.c_str());
    return 2;
  }
  return tilewise::test::run_all(part);
}
