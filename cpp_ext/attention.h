// Decode attention on the CPU, for one layer and micro-batch: which host tokens are kept, and attention over the device
// rows and these. Done by the calling thread; the kernels come from an IsaKernels.
//
// A sequence's device rows are those slots that `empty` does not name; what an empty slot holds is not read. Query
// heads are grouped: KV head h serves heads h * G up to (h + 1) * G, G = num_heads / num_kv_heads.
// Strides are in elements, channels are contiguous. std::invalid_argument names the argument that cannot be.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/scan.h"

namespace hybridgen {

// Query heads [batch, num_heads, head_dim], or logits [batch, num_heads, tokens].
struct HeadRows {
  const float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
};

// Keys or values [batch, num_kv_heads, rows, head_dim].
struct KvRows {
  const void* data = nullptr;
  KeyType type = KeyType::Float32;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
};

// Whether a slot holds no token: [batch, device_rows].
struct EmptySlots {
  const bool* data = nullptr;
  std::int64_t batch_stride = 0;
};

struct AttentionShape {
  std::int64_t batch = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t device_rows = 0;
  std::int64_t host_rows = 0;
};

// p_j = mean over a group's heads of each head's softmax over device rows and host rows (contracts.md, "What is kept").
// The host rows are those that were scored; which rows of the tier they are is the caller's business. Of sequence b are
// kept, best first and of equal ones the lower row first, min(scored[b], ceil(number * extra_thousandths / 1000)) rows.
// The number is most[b], or, where mass < 1, min(max(n, least[b]), most[b]) with n the fewest rows that together with
// the device rows hold `mass` of p; where all that were scored hold less, most[b].
struct ChooseRequest {
  AttentionShape shape;
  HeadRows query;
  KvRows keys;
  EmptySlots empty;
  HeadRows host_logits;  // of sequence b, the first scored[b]
  float scale = 1.0f;
  // [batch]. scored <= host_rows; least and most are about the whole tier and may be more than was scored.
  std::vector<std::int64_t> scored, least, most;
  double mass = 1.0;
  std::int64_t extra_thousandths = 1000;  // at least 1000
  // Written. rows, padding: room for [batch, num_kv_heads, widest], widest being what `most` for all gives;
  // [batch, num_kv_heads, K], contiguous, is used, where K is what choose() returns: the largest of the counts. Padding
  // is row 0.
  std::int64_t* rows = nullptr;
  bool* padding = nullptr;
  std::int64_t* counts = nullptr;  // [batch, num_kv_heads]
  float* masses = nullptr;         // [batch, num_kv_heads]: what device rows and kept rows hold
  // [batch, num_kv_heads, host_rows], contiguous: p of every scored row, 0 beyond. Null: not wanted.
  float* probabilities = nullptr;
};

std::int64_t choose(const ChooseRequest& request, const IsaKernels& isa);

// One softmax over the device rows and, of the host rows, rows[b, h, :counts[b, h]].
struct AttendRequest {
  AttentionShape shape;
  HeadRows query;
  KvRows keys, values;
  EmptySlots empty;
  KvRows host_keys, host_values;
  std::int64_t kept = 0;               // the width of rows; with 0 the host is left out
  const std::int64_t* rows = nullptr;  // [batch, num_kv_heads, kept], contiguous
  const std::int64_t* counts = nullptr;  // [batch, num_kv_heads]
  float scale = 1.0f;
  // Written: [batch, num_heads, head_dim], and, unless null, log sum exp(logit) [batch, num_heads].
  // A sequence without any row gets 0 and -inf.
  float* context = nullptr;
  float* log_sum = nullptr;
};

void attend(const AttendRequest& request, const IsaKernels& isa);

}  // namespace hybridgen
