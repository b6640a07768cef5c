// What the kernels are given, and the table that every ISA fills in.
//
// A kernel works on one block: some token rows of one KV head of one sequence, for all query heads of the group.
// Batches, heads, threads and job queues are the business of scan_worker.h and attention.h, so an ISA is one file of
// plain loops. This header holds declarations only: kernel files include it before their target region.
#pragma once

#include <cstdint>

namespace hybridgen {

// How keys and values are stored. The number indexes IsaKernels::scan and ::weigh.
enum class KeyType : int { Float32 = 0, Float16 = 1, BFloat16 = 2 };
constexpr int kKeyTypes = 3;

// out[g * out_stride + j] = scale * sum_c query[g * head_dim + c] * keys[j * key_stride + c]
// for g < group, j < rows, c < head_dim; with a list, row list[j] of the keys instead of row j: in any order, repeated
// or not. Strides in elements. Sums are fp32. Nothing outside these elements is read or written, and no pointer is
// aligned to more than its element.
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
};

using ScanFn = void (*)(const ScanBlock&);

// out[g * head_dim + c] += sum_j weights[g * weight_stride + j] * values[list[j] * value_stride + c]
// under the same conditions.
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
};

using WeighFn = void (*)(const WeighBlock&);

struct IsaKernels {
  const char* name;
  bool (*usable)();  // do this CPU and this OS run it?
  ScanFn scan[kKeyTypes];
  WeighFn weigh[kKeyTypes];
  // The largest x[i], i < n; -inf if there is none.
  float (*maximum)(const float* x, std::int64_t n);
  // out[i] = exp(x[i] - shift), within 2 ulp and the same for equal x; returns their sum. `out` may be x, or null.
  float (*exponentials)(const float* x, float shift, float* out, std::int64_t n);
  // out[i] = sum_g factors[g] * x[g * stride + i], i < n
  void (*combine)(const float* x, std::int64_t stride, const float* factors, std::int64_t group, float* out,
                  std::int64_t n);
};

extern const IsaKernels kScalar;
#if defined(__x86_64__)
extern const IsaKernels kAvx512;
#endif

}  // namespace hybridgen
