// What the kernels are given, and the table that every ISA fills in.
//
// A kernel works on one block: some token rows of one KV head of one sequence, for all query heads of the group.
// Batches, heads, threads and job queues are the business of scan_worker.h and attention.h, so an ISA is one file of
// plain loops. This header holds declarations and constants only: kernel files include it before their target region.
#pragma once

#include <cstdint>

namespace hybridgen {

// How keys are stored. The number indexes IsaKernels::scan; of the first kValueTypes, IsaKernels::weigh, too.
// Int8: symmetric, a scale for each row, about a mean for each channel.
// Int4 and Int2 are sketches: blocks of 64 tokens, asymmetric, a scale and a zero for each channel and block. A block
// is one run of bytes without gaps: codes, then fp16 scale[head_dim], then fp16 zero[head_dim].
// Only whole blocks exist.
// Channels go in quads; byte 4 * lane + k, lane < 16, of a vector of 64 codes' bytes is of channel 4 * quad + k.
//   Int2: vector quad; bits 2t and 2t + 1 of the byte are the code of token 16 * t + lane, t < 4
//   Int4: vectors 2 * quad + v, v < 2; its low nibble is of token 32 * v + lane, its high one of 32 * v + 16 + lane
// hybridgen/kv_cache/quantize.py makes them and says the same in Python.
enum class KeyType : int { Float32 = 0, Float16 = 1, BFloat16 = 2, Int8 = 3, Int4 = 4, Int2 = 5 };
constexpr int kKeyTypes = 6;
constexpr int kValueTypes = 3;
constexpr int kRowTypes = 4;  // those of rows, not of a sketch's blocks

constexpr bool is_sketch(KeyType type) { return type == KeyType::Int4 || type == KeyType::Int2; }

constexpr std::int64_t kSketchTokens = 64;  // of a block
constexpr std::int64_t kMaxSketchDim = 1024;  // largest head_dim of a sketch's kernel: its weights lie on the stack
constexpr std::int64_t sketch_code_bytes(int bits, std::int64_t head_dim) { return 8 * head_dim * bits; }
constexpr std::int64_t sketch_bytes(int bits, std::int64_t head_dim) { return (8 * bits + 4) * head_dim; }

// out[g * out_stride + j] = scale * (sum_c query[g * head_dim + c] * key(j, c) + shifts[g])
// for g < group, j < rows, c < head_dim; with a list, key(list[j], c) instead: in any order, repeated or not.
//   floats: key(j, c) = keys[j * key_stride + c], and no shifts
//   int8:   key(j, c) = row_scales[j] * keys[j * key_stride + c]; a shift is the query times the mean of the keys
//           An ISA may round the query to 16 bits a channel, with one step a head: int8_query512.h says how far that
//           can move a logit, and who does; the others multiply by the query as it is.
//   sketch: key(j, c) = scale(c) * code(j, c) + zero(c), of block j / 64 at byte j / 64 * key_stride of keys; as above.
//           The query times scale(c), less what a rounding to int8 with one step a block and head takes away, meets the
//           codes in integers, which are the same for every ISA. A sorted list visits each block once.
// Strides in elements. Sums of floats are fp32. Nothing outside these elements is read or written (of a sketch, the
// blocks of these rows), and no pointer is aligned to more than its element.
struct ScanBlock {
  const float* query;
  const void* keys;
  float* out;
  std::int64_t rows;
  std::int64_t key_stride;
  std::int64_t out_stride;
  std::int64_t group;     // query heads of this KV head, >= 1
  std::int64_t head_dim;  // a positive multiple of 8
  float scale;
  const std::int32_t* list = nullptr;  // [rows]: a tier has fewer than 2^31
  const float* row_scales = nullptr;   // int8 only
  const float* shifts = nullptr;       // [group], of int8 and sketches
  const void* next = nullptr;  // without a list: where the thread's next block begins, to be prefetched; null: unknown
};

// Where rows are read in order, they are asked for twice: `far` ahead into L2, and again, `near` ahead, into L1. Either
// alone is 10 % slower: what is under way from memory holds the buffers that loads from L2 wait for.
struct Ahead {
  std::int64_t near;
  std::int64_t far;
};
constexpr Ahead kAheadBytes = {4 << 10, 12 << 10};

// Bytes to what is prefetched beside each of the rows (a sketch's: blocks) up to `end`, of which `step` are worked on at
// a time. At the end of the block's `count` rows it goes on in the block that the thread scans next (or so nearly: what
// is asked for is never read here, and may be anything). 0, which asks for nothing new, where that is not known, and
// where there is one row, whose stride means nothing.
static inline Ahead bytes_ahead(const void* start, const void* next, std::int64_t count, std::int64_t stride_bytes,
                                std::int64_t end, std::int64_t step) {
  const auto ahead = [&](std::int64_t bytes) -> std::int64_t {
    if (stride_bytes <= 0) return 0;
    const std::int64_t distance = (bytes + step * stride_bytes - 1) / (step * stride_bytes) * step;  // whole steps
    if (end + distance <= count) return distance * stride_bytes;
    if (!next) return 0;
    const auto* behind = static_cast<const char*>(start) + count * stride_bytes;
    return static_cast<const char*>(next) - behind + distance * stride_bytes;
  };
  return {ahead(kAheadBytes.near), ahead(kAheadBytes.far)};
}

static inline Ahead bytes_ahead(const ScanBlock& block, std::int64_t count, std::int64_t stride_bytes, std::int64_t end,
                                std::int64_t step) {
  return bytes_ahead(block.keys, block.next, count, stride_bytes, end, step);
}

// Asks for what lies ahead of `at`: first for what is needed first, which else waits for a buffer behind the other.
static inline __attribute__((always_inline)) void prefetch(const void* at, Ahead ahead) {
  __builtin_prefetch(static_cast<const char*>(at) + ahead.near, 0, 3);
  __builtin_prefetch(static_cast<const char*>(at) + ahead.far, 0, 2);
}

#if defined(__x86_64__)
// Whether rows that one query head meets had best be read one after the other, as they lie in memory, not several
// together: on an AMD EPYC that reaches 0.93 to 0.95 of the memory's rate in place of 0.75 to 0.82 (int8: 0.89 in place
// of 0.82). On Intel's cores 8 together were 10 to 20 % faster than 16; one by one has not been measured there.
static inline bool reads_in_turn() { return __builtin_cpu_is("amd"); }
#endif

using ScanFn = void (*)(const ScanBlock&);

// out[g * head_dim + c] += sum_j weights[g * weight_stride + j] * values[list[j] * value_stride + c]
// under the same conditions; without a list, values[j * value_stride + c].
struct WeighBlock {
  const float* weights;
  const void* values;
  const std::int32_t* list;
  float* out;
  std::int64_t rows;
  std::int64_t value_stride;
  std::int64_t weight_stride;
  std::int64_t group;
  std::int64_t head_dim;
  const void* next = nullptr;  // as in ScanBlock
};

constexpr std::int64_t kLinkTokens = 256;  // that have one maximum
constexpr float kLargestDrop = 60000.0f;   // below it; what fp16 holds

using WeighFn = void (*)(const WeighBlock&);

struct IsaKernels {
  const char* name;
  bool (*usable)();  // do this CPU and this OS run it?
  ScanFn scan[kKeyTypes];
  WeighFn weigh[kValueTypes];
  // The largest x[i], i < n; -inf if there is none.
  float (*maximum)(const float* x, std::int64_t n);
  // out[i] = exp(x[i] - shift), within 2 ulp and the same for equal x; returns their sum. `out` may be x, or null.
  float (*exponentials)(const float* x, float shift, float* out, std::int64_t n);
  // out[i] = sum_g factors[g] * x[g * stride + i], i < n
  void (*combine)(const float* x, std::int64_t stride, const float* factors, std::int64_t group, float* out,
                  std::int64_t n);
  // For the link to a GPU: out[i] = fp16(max(x[i] - top, -kLargestDrop)), i < n, rounded to nearest; returns top, the
  // largest x[i]. x is finite; n >= 1. What it has written is there after `finish_shrinking`.
  float (*shrink)(const float* x, std::int64_t n, std::uint16_t* out);
  void (*finish_shrinking)();
  // scan[Int8] with the query in float32 on every ISA, where logits do not only choose but weigh.
  ScanFn weighing_int8;
  // Asks the system for what the kernels need, where that has to be done; false: it refuses (errno).
  bool (*enable)() = nullptr;
};

extern const IsaKernels kScalar;
#if defined(__x86_64__)
extern const IsaKernels kAvx2;
extern const IsaKernels kAvx512;
extern const IsaKernels kAvx512Vnni;  // kAvx512 with other kernels for int8 keys and sketches
extern const IsaKernels kAmx;         // kAvx512Vnni with another kernel for int8 keys of grouped queries
extern const IsaKernels kAmxEmulated;  // which it tells apart from their instructions; for tests
IsaKernels with_integers(IsaKernels kernels);  // avx512_vnni.cpp's in their place
#endif

}  // namespace hybridgen
