// Attention over all rows of a KV head, cut into parts that threads do side by side: each part is a softmax of its own,
// and parts are merged by what is known of their sums, which is exact.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/scan.h"

namespace hybridgen {

// Results of all parts of a job: of each part, for each query head of its group, the context times its sum, the largest
// logit, and the sum of exp(logit - largest). Memory that only grows.
class Parts {
 public:
  // For parts 0 to count - 1; what they hold does not survive. Not while threads use them.
  void resize(std::int64_t count, std::int64_t group, std::int64_t head_dim);
  float* context(std::int64_t part) const { return memory_.get() + part * group_ * head_dim_; }
  float* top(std::int64_t part) const { return memory_.get() + count_ * group_ * head_dim_ + part * group_; }
  float* sum(std::int64_t part) const { return top(part) + count_ * group_; }
  std::int64_t group() const { return group_; }
  std::int64_t head_dim() const { return head_dim_; }

 private:
  std::unique_ptr<float[]> memory_;
  std::int64_t size_ = 0, count_ = 0, group_ = 0, head_dim_ = 0;
};

// The part of the rows that both blocks are of: keys.out, keys.out_stride and keys.next, values.weights,
// values.weight_stride and values.out are set here.
void attend_part(const IsaKernels& isa, KeyType key_type, ScanBlock keys, KeyType value_type, WeighBlock values,
                 const Parts& parts, std::int64_t part);

// Parts `first` to `first + count - 1` (at least one), all of one KV head: context [group, head_dim] and log sum
// exp(logit) [group].
void merge_parts(const IsaKernels& isa, const Parts& parts, std::int64_t first, std::int64_t count, float* context,
                 float* log_sum);

}  // namespace hybridgen
