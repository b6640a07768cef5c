#include "partial_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace hybridgen {
namespace {

constexpr std::int64_t kLine = 16;  // floats of a cache line

// Of the calling thread; grows as needed, so that in steady state nothing is allocated.
float* scratch(std::int64_t size) {
  static thread_local std::vector<float> memory;
  if (static_cast<std::int64_t>(memory.size()) < size) memory.resize(static_cast<std::size_t>(size));
  return memory.data();
}

}  // namespace

void Parts::resize(std::int64_t count, std::int64_t group, std::int64_t head_dim) {
  const std::int64_t size = count * group * (head_dim + 2);
  if (size > size_) {
    memory_ = nullptr;
    size_ = 0;
    memory_.reset(new float[static_cast<std::size_t>(size + size / 2)]);
    size_ = size + size / 2;
  }
  count_ = count;
  group_ = group;
  head_dim_ = head_dim;
}

void attend_part(const IsaKernels& isa, KeyType key_type, ScanBlock keys, KeyType value_type, WeighBlock values,
                 const Parts& parts, std::int64_t part) {
  const std::int64_t stride = (keys.rows + kLine - 1) / kLine * kLine;
  float* logits = scratch(keys.group * stride);
  keys.out = logits;
  keys.out_stride = stride;
  keys.next = values.values;  // the last keys are scored while the first values are on their way
  (key_type == KeyType::Int8 ? isa.weighing_int8 : isa.scan[static_cast<int>(key_type)])(keys);

  for (std::int64_t g = 0; g < keys.group; ++g) {
    float* row = logits + g * stride;
    const float top = isa.maximum(row, keys.rows);
    parts.top(part)[g] = top;
    parts.sum(part)[g] = isa.exponentials(row, top, row, keys.rows);
  }

  values.weights = logits;
  values.weight_stride = stride;
  values.out = parts.context(part);
  std::fill(values.out, values.out + values.group * values.head_dim, 0.0f);
  isa.weigh[static_cast<int>(value_type)](values);
}

void merge_parts(const IsaKernels& isa, const Parts& parts, std::int64_t first, std::int64_t count, float* context,
                 float* log_sum) {
  const std::int64_t group = parts.group(), dim = parts.head_dim();
  float* factors = scratch(count);
  for (std::int64_t g = 0; g < group; ++g) {
    float top = -std::numeric_limits<float>::infinity();
    for (std::int64_t i = first; i < first + count; ++i) top = std::max(top, parts.top(i)[g]);
    double total = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
      factors[i] = std::exp(parts.top(first + i)[g] - top);
      total += static_cast<double>(factors[i]) * parts.sum(first + i)[g];
    }
    for (std::int64_t i = 0; i < count; ++i) factors[i] = static_cast<float>(factors[i] / total);
    isa.combine(parts.context(first) + g * dim, group * dim, factors, count, context + g * dim, dim);
    log_sum[g] = top + static_cast<float>(std::log(total));
  }
}

}  // namespace hybridgen
