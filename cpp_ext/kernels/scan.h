// What a scan kernel is given, and the table that every ISA fills in.
//
// A kernel works on one block: some token rows of one KV head of one sequence, scored for all query heads of the
// group. Batches, heads, threads and job queues are the worker's business (scan_worker.h), so an ISA is one file of
// plain loops. This header holds declarations only: kernel files include it before their target region.
#pragma once

#include <cstdint>

namespace hybridgen {

// How keys are stored. The value indexes IsaKernels::scan.
enum class KeyType : int { Float32 = 0, Float16 = 1, BFloat16 = 2 };
constexpr int kKeyTypes = 3;

// out[g * out_stride + j] = scale * sum_c query[g * head_dim + c] * keys[j * key_stride + c]
// for g < group, j < rows, c < head_dim; strides in elements. Sums are fp32. Nothing outside these elements is read
// or written, and no pointer is aligned to more than its element.
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
};

using ScanFn = void (*)(const ScanBlock&);

struct IsaKernels {
  const char* name;
  bool (*usable)();  // do this CPU and this OS run it?
  ScanFn scan[kKeyTypes];
};

extern const IsaKernels kScalar;
#if defined(__x86_64__)
extern const IsaKernels kAvx512;
#endif

}  // namespace hybridgen
