// What a kernel is asked: pointers, strides and sizes. No torch, no Python, no ownership.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilewise {

using i64 = std::int64_t;

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };
inline int size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
// How keys and values are stored: in the DType of the call, or in 8 bits with a scale for each row.
enum class Stored : int { plain, int8, e4m3 };

// A strided 4-D tensor; strides in elements. In variable-length calls `batch` is 0 and rows are found
// through the cumulative lengths.
struct View {
  const void* data = nullptr;
  i64 batch = 0, head = 0, row = 0, col = 0;
};

// One instruction of a mask program, in postfix order (the leaves push, the connectives pop).
//   band:          a + m - left <= n <= a + m + right, a = keys - queries when anchored to the bottom
//                  right corner, else 0; a negative left or right is open
//   below:         n < length, or n < lengths[b]
//   same_document: query_ids[b, m] == key_ids[b, n]
//   dense:         a boolean tensor (bytes 0 or 1)
//   expr:          a boolean expression (expressions/program.h)
//   blocks:        a boolean per rectangle of block_queries x block_keys pairs (bytes 0 or 1)
//   tiles:         the value before it, of which a table says rectangle by rectangle whether no pair is visible (0),
//                  or all of them (2); it tells the truth
enum class MaskOp : int { band, below, same_document, dense, all, any, negate, expr, blocks, tiles };

struct ExprProgram;

struct MaskInstr {
  MaskOp op = MaskOp::all;
  bool bounds = false;  // a top-level conjunct: it may narrow the range of keys that is visited at all
  bool bottom_right = false;
  i64 left = -1, right = -1, length = 0;
  const i64* lengths = nullptr;
  const i64* query_ids = nullptr;
  const i64* key_ids = nullptr;
  i64 query_batch = 0, key_batch = 0;  // strides of the ids over the batch
  View tensor;                         // of `dense`; the table of `blocks` and `tiles`
  i64 block_queries = 0, block_keys = 0;
  const ExprProgram* expr = nullptr;
  const ExprProgram* by_keys = nullptr;  // the same with the keys in its lanes, for few queries
};

// One step of the score chain, applied in order to s = scale * q.k (natural units).
//   alibi:   s - slope[b, h] * |m + keys - queries - n|
//   softcap: cap * tanh(s / cap)
//   bias:    s + tensor[b, h, m, n]
//   expr:    an expression of s (expressions/program.h); only the first step can be one
enum class ScoreOp : int { alibi, softcap, bias, expr };

struct ScoreInstr {
  ScoreOp op = ScoreOp::softcap;
  double cap = 0;
  View tensor;  // slopes (batch and head strides) or the bias
  DType dtype = DType::f32;
  const ExprProgram* value = nullptr;    // outputs: the new score
  const ExprProgram* by_keys = nullptr;  // the same with the keys in its lanes, for few queries
  const ExprProgram* slope = nullptr;    // the new score and its derivative; of a backward pass
};

constexpr i64 kFewQueries = 8;  // sequences of no more have kernels of their own in the forward pass
constexpr int kMaxMask = 32;
constexpr int kMaxScore = 8;
constexpr int kMaxDim = 576;    // the backend refuses wider heads; 512 and 64 are those of latent attention
constexpr int kMaxNodes = 256;  // of an expression; its derivatives may have kMaxDerivativeNodes
constexpr int kMaxDerivativeNodes = 8192;
constexpr int kMaxLoads = 16;
constexpr int kMaxRank = 6;  // of a tensor that an expression reads

// What dropout counts from, where the operands are a part of a longer sequence.
struct Origin {
  i64 batch = 0, head = 0, query = 0, key = 0;
};

struct Problem {
  DType dtype = DType::f32;
  i64 batch = 0, heads = 0, kv_heads = 0;
  i64 queries = 0, keys = 0;  // per sequence; the longest when cu_q is set
  int head_dim = 0, value_dim = 0;
  const i64* cu_q = nullptr;  // [batch + 1] cumulative lengths of a variable-length call
  const i64* cu_k = nullptr;
  // Keys in pages of so many rows (0: not); cu_k is null then. Key n of sequence b is row n % page_size of page
  // block_table[b * page_slots + n / page_size]; the batch of a view of keys is the page.
  i64 page_size = 0, page_slots = 0;
  const std::int32_t* block_table = nullptr;
  const std::int32_t* key_lengths = nullptr;  // [batch]
  double scale = 1;
  double dropout = 0;
  std::uint64_t seed = 0;
  Origin origin;
  const void* sinks = nullptr;  // [heads], float (double for f64)
  int mask_length = 0, score_length = 0;
  MaskInstr mask[kMaxMask];
  ScoreInstr score[kMaxScore];
  i64 expr_room = 0;  // bytes of scratch memory that the expressions need
  int threads = 1;
};

// The row statistics have one layout: element (b, h, m) at b * batch + h * head + m.
struct Rows {
  void* data = nullptr;
  i64 batch = 0, head = 0;
};

struct Forward : Problem {
  Forward() = default;
  explicit Forward(const Problem& problem) : Problem(problem) {}

  View q, k, v, out;
  // In 8 bits k and v have bytes, and a row stands for its numbers times its element of these (floats, one column).
  Stored stored = Stored::plain;
  View k_scales, v_scales;
  Rows lse;  // natural log, sink included
  // What a row subtracts from its scores, before the sink: the largest of them, or (by matrix tiles) one that no
  // other is above by more than a factor 2^8 of probability. Natural units, without a score chain those of q.k (not
  // scaled).
  Rows row_max;
  Rows row_sum;  // of exp(score - row_max), before the sink
  // Statistics, together or not at all (data is null): written for whoever asks for them.
  Rows max_logit;  // natural units, before the sink
  Rows entropy;    // of the probabilities, natural units; the sink is one of the outcomes
  Rows row_mean;   // the mean logit, the sink's included, less the larger of row_max and the sink; base-2 units
  Rows top_key;    // i64: the first key with the largest score, -1 for none; data may be null by itself
  // Few queries in bfloat16: by dot products where there are some (1), widened (0), as is faster on this processor
  // (-1).
  int dots = -1;
  // Few queries beside 8 bits: by the kernels with tables of bytes (1), without (0), or as this processor has them
  // (-1). No result depends on it.
  int byte_tables = -1;
  // Few queries: keys and values of the next block are fetched ahead (1), or not (0), or later ones beside each load
  // where they may be (2), or as they seem to lie (-1). No result depends on it.
  int fetch = -1;
  // Whether a backward pass may follow: few queries keep to the ordinary kernel then, whose scores it computes again
  // to the bit. Of others the gradients would show the difference.
  bool for_backward = false;
  bool float_tiles = false;  // float32 by matrix tiles where there are some
};

struct Backward : Problem {
  View q, k, v, out, grad_out;
  Rows row_max, row_sum;
  Rows grad_lse;                // data may be null
  Rows row_mean, grad_entropy;  // data is null without a gradient of the entropy
  // Written by `backward` as rowsum(grad_out * out), refined by `key_delta`, read by the others.
  // Where one block has all keys that a tile may see, the tile refines it for itself.
  Rows delta;
  View grad_q, grad_k, grad_v;
  // The rows see keys beyond these: out and the row statistics are of all of them, and these keys' probabilities add up
  // to less than 1.
  bool partial = false;
  bool float_tiles = false;  // as the forward pass had it: the scores are computed again, to the bit
};

// The gradient of one bias of the score chain, reduced over the dimensions that it was broadcast over.
struct BiasBackward : Backward {
  int index = 0;      // of the bias in the score chain
  View grad_bias;     // zeros on entry; stride 0 where the bias is broadcast
  bool wide = false;  // grad_bias is in double, as it should be where much is added up; else in the computing type
};

// The gradients of what the expression of the score chain loads.
struct LoadBackward : Backward {
  const ExprProgram* loads = nullptr;  // outputs: the derivatives of the new score by each of its loads
  int tensors = 0;
  double* grad[kMaxLoads] = {};  // of each tensor, contiguous; zeros on entry
  i64 size[kMaxLoads] = {};      // in elements
  int tensor[kMaxLoads] = {};    // per load, whose element it is
};

// The table of a mask: of every rectangle of block_queries x block_keys pairs whether the mask hides all (0), some (1)
// or none (2) of its pairs; 0 for those past the end of their sequence.
struct Covers : Problem {
  i64 block_queries = 0, block_keys = 0;
  i64 batches = 0, heads_apart = 0;  // of the table: 1 where one answer serves all
  i64 rows = 0, columns = 0;         // rectangles along queries and keys
  unsigned char* table = nullptr;    // [batches][heads_apart][rows][columns], written
};

// Rows of logits: a block of the words of a vocabulary. Numbers of rows are in the computing type.
struct CrossEntropy {
  DType dtype = DType::f32;  // of the logits
  int threads = 1;
  void* logits = nullptr;  // [rows][stride], of which `columns` are there; where `scales` are, gradients on return
  i64 rows = 0, columns = 0, stride = 0;
  i64 first = 0, words = 0;      // the first word of the block, and all words
  const i64* targets = nullptr;  // [rows]
  void* losses = nullptr;        // [rows], written with `lse`, for blocks of all words; or null
  void* lse = nullptr;           // [rows], else read
  const void* scales = nullptr;  // [rows]: factors of the gradients; or null
  i64 ignore_index = 0;
  double smoothing = 0, z_loss = 0, softcap = 0;  // softcap 0: none
};

// Rows of queries or keys [batch][heads][rows][width], normalised over their channels, of which the first `rotated` are
// then turned in pairs by the angles of their positions. Channels of a row are neighbours in memory. Weights and angles
// are in the computing type.
struct HeadRows {
  DType dtype = DType::f32;  // of x, grad and out
  int threads = 1;
  i64 batch = 0, heads = 0, rows = 0, width = 0;
  View x, grad, out;     // without `grad` out becomes the result, else the gradient of x
  bool centred = false;  // less the mean first; then by the root of the mean square
  double eps = 0;
  const void *weight = nullptr, *bias = nullptr;        // [heads or 1][width]; or null
  i64 weight_head = 0;                                  // stride of their heads; 0 where one row serves all
  double *grad_weight = nullptr, *grad_bias = nullptr;  // of their shape; both are added to, or both are null
  bool interleaved = false;                             // pairs are neighbours, else the halves of `rotated`
  i64 rotated = 0;
  const void *cos = nullptr, *sin = nullptr;  // [batch or 1][rows][rotated / 2]; interleaved each is there twice
  i64 angle_batch = 0, angle_row = 0;         // strides
};

// Rows of a table: copied out, or added to. A table that is added to is in the computing type.
struct GatheredRows {
  DType dtype = DType::f32;  // of `rows`, and of a table that is copied from
  int threads = 1;
  bool add = false;
  void* table = nullptr;  // rows of `width` neighbours in memory
  i64 stride = 0;
  const i64* places = nullptr;  // [count]: rows of the table; to add to, some may be the same
  void* rows = nullptr;         // [count][width]
  i64 count = 0, width = 0;
};

// One piece of an expression, by itself: for tests.
struct ExprPiece {
  const ExprProgram* program = nullptr;
  i64 b = 0, h = 0, queries = 0, keys = 0, m0 = 0, n0 = 0;
  int rows = 0, count = 0;
  const double* s = nullptr;  // [count][rows]
  double* out = nullptr;      // [outputs][count][rows]; integers as bits
};

// What one instruction set offers. A function returns false when memory ran out.
struct Kernels {
  const char* name;
  const char* description;
  bool (*supported)();
  bool (*forward)(const Forward&);
  bool (*backward)(const Backward&);
  bool (*key_delta)(const Backward&);
  bool (*bias_backward)(const BiasBackward&);
  bool (*load_backward)(const LoadBackward&);
  bool (*covers)(const Covers&);
  bool (*cross_entropy)(const CrossEntropy&);
  bool (*head_rows)(const HeadRows&);
  bool (*gathered_rows)(const GatheredRows&);
  bool (*expr_piece)(const ExprPiece&);
  double (*fma_flops)(i64 iterations);   // runs a bare multiply-add loop, returns its operations
  double (*bf16_flops)(i64 iterations);  // the same for bfloat16 products; null where there are none
};

}  // namespace tilewise
