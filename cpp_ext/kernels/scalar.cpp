// The reference: plain C++ that every CPU runs and that the other ISAs are compared with.
#include <cstdint>
#include <cstring>

#include "scan.h"

namespace hybridgen {
namespace {

constexpr int kLanes = 8;     // independent partial sums of a dot product; head_dim is a multiple of it
constexpr int kMaxHeads = 8;  // query heads that share one conversion of a key

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
    const auto* row = keys + j * block.key_stride;
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

bool usable() { return true; }

}  // namespace

const IsaKernels kScalar = {"scalar", usable, {scan<Float32>, scan<Float16>, scan<BFloat16>}};

}  // namespace hybridgen
