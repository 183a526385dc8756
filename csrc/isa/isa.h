// The kernels of one instruction set. Each isa_*.cc defines TILEWISE_ISA and TILEWISE_VECTOR_BYTES, includes this
// file and is compiled with its own flags; nothing else is.
#pragma once

#include "passes/backward.h"
#include "passes/bias_backward.h"
#include "passes/cross_entropy.h"
#include "variants/cover.h"
#include "passes/forward.h"
#include "passes/gathered_rows.h"
#include "passes/head_rows.h"
#include "passes/key_delta.h"
#include "passes/load_backward.h"
#if defined(TW_PAIRS) && defined(__aarch64__)
#include "products/matrix.h"
#endif

namespace tilewise::TILEWISE_ISA {

#if defined(TW_PAIRS) && defined(__aarch64__)
using PassMode = MatrixMode;  // of bfloat16, where there are many queries
#else
using PassMode = Bf16Mode;
#endif

bool few_queries(const Forward& f);  // decode_*.cc
// Each takes the sequences that the other leaves.
static bool forward(const Forward& f) { return (f.for_backward || few_queries(f)) && run<ForwardKernel, PassMode>(f); }
static bool backward(const Backward& f) { return run<BackwardKernel, PassMode>(f); }
static bool key_delta(const Backward& f) { return run<KeyDeltaKernel, PassMode>(f); }
static bool bias_backward(const BiasBackward& f) { return run<BiasKernel, PassMode>(f); }
static bool load_backward(const LoadBackward& f) { return run<LoadKernel, PassMode>(f); }

static bool cross_entropy(const CrossEntropy& f) { return run<CrossEntropyKernel>(f); }
static bool head_rows(const HeadRows& f) { return run<HeadRowsKernel>(f); }
static bool gathered_rows(const GatheredRows& f) { return run<GatheredRowsKernel>(f); }

static bool covers(const Covers& f) { return CoverKernel(f).run(); }

template <class C>
static void run_piece(const ExprPiece& f, char* room, C* s) {
  ExprRun<C> run(*f.program, room);
  run.open(f.b, f.h, f.queries, f.keys);
  run.tile(f.m0, f.rows);
  const int width = run.width();
  for (int j = 0; j < f.count; j++)
    for (int i = 0; i < width; i++) s[j * width + i] = static_cast<C>(f.s[j * f.rows + (i < f.rows ? i : 0)]);
  run.piece(s, f.n0, f.count);
  double* out = f.out;
  for (int x = 0; x < f.program->outputs; x++) {
    const ExprKind kind = f.program->values[f.program->output[x]].kind;
    const Operand from = run.output(x);
    for (int j = 0; j < f.count; j++) {
      for (int i = 0; i < f.rows; i++, out++) {
        if (kind == ExprKind::real) {
          *out = static_cast<double>(*from.at<C>(j, i));
          continue;
        }
        const bool narrow = sizeof(C) == 4 && (kind == ExprKind::boolean || !f.program->wide);
        const i64 whole = narrow ? i64{*from.at<i32>(j, i)} : *from.at<i64>(j, i);
        std::memcpy(out, &whole, sizeof whole);
      }
    }
  }
}
static bool expr_piece(const ExprPiece& f) {
  const i64 size = kSubKeys * kTileQueries * 8;
  char* room = static_cast<char*>(scratch(static_cast<std::size_t>(size + f.program->room + f.program->bytes)));
  if (room == nullptr) return false;
  if (f.program->wide_floats)
    run_piece(f, room + size, reinterpret_cast<double*>(room));
  else
    run_piece(f, room + size, reinterpret_cast<float*>(room));
  return true;
}

// A bare loop of independent multiply-adds, as many as hide the latency: the ceiling to compare with.
template <class Dot>
TW_NOINLINE static double multiply_add_flops(i64 iterations) {
#if TILEWISE_VECTOR_BYTES == 64 || defined(__aarch64__)
  constexpr int chains = 24;
#else
  constexpr int chains = 12;
#endif
  constexpr int lanes = kLanes<float>;
  using Word = typename Dot::Word;
  Vec<float> acc[chains];
  TW_UNROLL(24)
  for (int c = 0; c < chains; c++) acc[c] = set(static_cast<float>(c));
  auto word = Dot::broadcast(Word{});
  Vec<Word> row{};
  for (i64 i = 0; i < iterations; i++) {
    // Hides the word's value and adds no instruction: a move to another kind of register would take the place of a
    // multiply-add on processors that have two ports for vectors.
#if defined(__aarch64__)
    __asm__ volatile("" : "+w"(word));
#elif TILEWISE_VECTOR_BYTES == 64
    __asm__ volatile("" : "+v"(word));
#elif defined(__SSE2__)
    __asm__ volatile("" : "+x"(word));
#else
    __asm__ volatile("" : "+m"(word));
#endif
    TW_UNROLL(24)
    for (int c = 0; c < chains; c++) acc[c] = Dot::multiply_add(acc[c], word, row);
  }
  TW_UNROLL(24)
  for (int c = 1; c < chains; c++) acc[0] += acc[c];
  volatile float keep = acc[0][0];
  (void)keep;
  return 2.0 * Dot::per_word * lanes * chains * static_cast<double>(iterations);
}

}  // namespace tilewise::TILEWISE_ISA
