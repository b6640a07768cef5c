// The reference: plain C++ that every CPU runs and that the other ISAs are compared with.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "scan.h"

namespace hybridgen {
namespace {

constexpr int kLanes = 8;     // independent partial sums of a dot product; head_dim is a multiple of it
constexpr int kMaxHeads = 8;  // query heads that share one conversion of a key
constexpr std::int64_t kAhead = 24;  // rows from a listed one to the one that is prefetched meanwhile

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Float32 {
  using Element = float;
  static float load(float key) { return key; }
};

struct BFloat16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t key) { return float_of(std::uint32_t{key} << 16); }
};

struct Float16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t key) {
    const std::uint32_t sign = (key & 0x8000u) << 16;
    const std::uint32_t magnitude = (key & 0x7fffu) << 13;  // exponent and fraction at fp32's places
    std::uint32_t bits = magnitude + (112u << 23);          // rebias the exponent, 15 -> 127
    if (magnitude >= 0x7c00u << 13) {
      bits += 112u << 23;  // infinity and NaN: all exponent bits set
    } else if (magnitude < 0x0400u << 13) {
      // Subnormal: fraction * 2^-24, as a difference of two normal numbers, so flush-to-zero modes cannot touch it.
      const float value = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
      std::memcpy(&bits, &value, sizeof bits);
    }
    return float_of(bits | sign);
  }
};

template <class Key>
void scan(const ScanBlock& block) {
  const auto* keys = static_cast<const typename Key::Element*>(block.keys);
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const auto* row = keys + (block.list ? std::int64_t{block.list[j]} : j) * block.key_stride;
    if (block.list && j + kAhead < block.rows) {  // the hardware foresees rows in order only
      const auto* later = keys + block.list[j + kAhead] * block.key_stride;
      constexpr std::int64_t kLine = 64 / sizeof(typename Key::Element);
      for (std::int64_t c = 0; c < block.head_dim; c += kLine) __builtin_prefetch(later + c);
    }
    for (std::int64_t first = 0; first < block.group; first += kMaxHeads) {
      const std::int64_t rest = block.group - first;
      const int heads = rest < kMaxHeads ? static_cast<int>(rest) : kMaxHeads;
      const float* query = block.query + first * block.head_dim;
      float sums[kMaxHeads][kLanes] = {};
      for (std::int64_t c = 0; c < block.head_dim; c += kLanes) {
        float key[kLanes];
        for (int i = 0; i < kLanes; ++i) key[i] = Key::load(row[c + i]);
        for (int g = 0; g < heads; ++g) {
          const float* q = query + g * block.head_dim + c;
          for (int i = 0; i < kLanes; ++i) sums[g][i] += q[i] * key[i];
        }
      }
      for (int g = 0; g < heads; ++g) {
        const float* s = sums[g];
        const float sum = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
        block.out[(first + g) * block.out_stride + j] = block.scale * sum;
      }
    }
  }
}

template <class Key>
void weigh(const WeighBlock& block) {
  const auto* values = static_cast<const typename Key::Element*>(block.values);
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const auto* row = values + block.list[j] * block.value_stride;
    for (std::int64_t c = 0; c < block.head_dim; c += kLanes) {
      float value[kLanes];
      for (int i = 0; i < kLanes; ++i) value[i] = Key::load(row[c + i]);
      for (std::int64_t g = 0; g < block.group; ++g) {
        const float weight = block.weights[g * block.weight_stride + j];
        float* out = block.out + g * block.head_dim + c;
        for (int i = 0; i < kLanes; ++i) out[i] += weight * value[i];
      }
    }
  }
}

float maximum(const float* x, std::int64_t n) {
  float most = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

float exponentials(const float* x, float shift, float* out, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = std::exp(x[i] - shift);
    sum += value;
    if (out) out[i] = value;
  }
  return static_cast<float>(sum);
}

void combine(const float* x, std::int64_t stride, const float* factors, std::int64_t group, float* out,
             std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (std::int64_t g = 0; g < group; ++g) sum += factors[g] * x[g * stride + i];
    out[i] = sum;
  }
}

bool usable() { return true; }

}  // namespace

const IsaKernels kScalar = {"scalar",
                            usable,
                            {scan<Float32>, scan<Float16>, scan<BFloat16>},
                            {weigh<Float32>, weigh<Float16>, weigh<BFloat16>},
                            maximum,
                            exponentials,
                            combine};

}  // namespace hybridgen
