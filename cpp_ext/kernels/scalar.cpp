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

struct Int8 {
  using Element = std::int8_t;
  static float load(std::int8_t key) { return static_cast<float>(key); }
};

template <class Key>
void scan(const ScanBlock& block) {
  constexpr bool kScaled = sizeof(typename Key::Element) == 1;
  const auto* keys = static_cast<const typename Key::Element*>(block.keys);
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const std::int64_t at = block.list ? std::int64_t{block.list[j]} : j;
    const auto* row = keys + at * block.key_stride;
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
        const float logit = kScaled ? block.row_scales[at] * sum + block.shifts[first + g] : sum;
        block.out[(first + g) * block.out_stride + j] = block.scale * logit;
      }
    }
  }
}

// A query folded into the scales and zeros of one block of a sketch: logit = step * sum_c weights[c] * code[c] + base.
struct Folded {
  float step;
  float base;
};

// The definition that all ISAs follow. `middle` is the middle of the codes: what rounding takes from the weights is
// made good for a code of that size, so that its error grows with a code's distance from it only.
Folded fold(const float* query, const unsigned char* scales, std::int64_t d, float middle, std::int8_t* weights) {
  const auto half = [](const unsigned char* at, std::int64_t c) {
    std::uint16_t bits;
    std::memcpy(&bits, at + 2 * c, sizeof bits);
    return Float16::load(bits);
  };
  float most = 0.0f;
  for (std::int64_t c = 0; c < d; ++c) {
    const float size = std::fabs(query[c] * half(scales, c));
    most = size > most ? size : most;
  }
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  Folded folded = {most / 127.0f, 0.0f};
  for (std::int64_t c = 0; c < d; ++c) {
    const float weight = query[c] * half(scales, c);
    float rounded = weight * inverse;
    rounded = rounded < 127.0f ? rounded : 127.0f;  // also what is not a number
    rounded = rounded > -127.0f ? rounded : -127.0f;
    rounded = (rounded + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to the nearest integer, ties to even
    weights[c] = static_cast<std::int8_t>(rounded);
    folded.base += query[c] * half(scales, d + c) + middle * (weight - folded.step * rounded);
  }
  return folded;
}

// The codes of four channels: quad[4 * j + k] is token j's for channel k.
template <int Bits>
void unpack(const unsigned char* codes, unsigned char* quad) {
  constexpr int kPlaces = 8 / Bits;
  for (int vector = 0; vector < 4 / kPlaces; ++vector) {
    for (int place = 0; place < kPlaces; ++place) {
      unsigned char* to = quad + 64 * (vector * kPlaces + place);
      for (int i = 0; i < 64; ++i) to[i] = (codes[64 * vector + i] >> (Bits * place)) & ((1 << Bits) - 1);
    }
  }
}

// All 64 logits of a block for up to kMaxHeads heads: out[64 * g + j].
template <int Bits>
void block_logits(const unsigned char* codes, const float* query, int heads, std::int64_t d, float scale,
                  const float* shifts, float* out) {
  std::int8_t weights[kMaxHeads][kMaxSketchDim];
  Folded folded[kMaxHeads];
  std::int32_t sums[kMaxHeads][kSketchTokens] = {};
  constexpr float kMiddle = 0.5f * ((1 << Bits) - 1);
  for (int g = 0; g < heads; ++g) {
    folded[g] = fold(query + g * d, codes + sketch_code_bytes(Bits, d), d, kMiddle, weights[g]);
  }
  for (std::int64_t c = 0; c < d; c += 4) {
    unsigned char quad[4 * kSketchTokens];
    unpack<Bits>(codes + sketch_code_bytes(Bits, c), quad);
    for (int g = 0; g < heads; ++g) {
      const std::int8_t* w = weights[g] + c;
      for (int j = 0; j < kSketchTokens; ++j) {
        const unsigned char* q = quad + 4 * j;
        sums[g][j] += w[0] * q[0] + w[1] * q[1] + w[2] * q[2] + w[3] * q[3];
      }
    }
  }
  for (int g = 0; g < heads; ++g) {
    const float base = folded[g].base + shifts[g];
    for (int j = 0; j < kSketchTokens; ++j) {
      out[kSketchTokens * g + j] = scale * (folded[g].step * static_cast<float>(sums[g][j]) + base);
    }
  }
}

template <int Bits>
void scan_sketch(const ScanBlock& block) {
  const auto* blocks = static_cast<const unsigned char*>(block.keys);
  for (std::int64_t first = 0; first < block.group; first += kMaxHeads) {
    const std::int64_t rest = block.group - first;
    const int heads = rest < kMaxHeads ? static_cast<int>(rest) : kMaxHeads;
    const float* query = block.query + first * block.head_dim;
    const float* shifts = block.shifts + first;
    float logits[kMaxHeads * kSketchTokens];
    std::int64_t held = -1;  // the block that `logits` are of
    for (std::int64_t j = 0; j < block.rows; ++j) {
      const std::int64_t at = block.list ? std::int64_t{block.list[j]} : j;
      if (at / kSketchTokens != held) {
        held = at / kSketchTokens;
        block_logits<Bits>(blocks + held * block.key_stride, query, heads, block.head_dim, block.scale, shifts, logits);
      }
      for (int g = 0; g < heads; ++g) {
        block.out[(first + g) * block.out_stride + j] = logits[kSketchTokens * g + at % kSketchTokens];
      }
    }
  }
}

template <class Key>
void weigh(const WeighBlock& block) {
  const auto* values = static_cast<const typename Key::Element*>(block.values);
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const auto* row = values + (block.list ? std::int64_t{block.list[j]} : j) * block.value_stride;
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

float shrink(const float* x, std::int64_t n, std::uint16_t* out) {
  const float top = maximum(x, n);
  for (std::int64_t i = 0; i < n; ++i) {
    const float below = x[i] - top;
    const auto half = static_cast<_Float16>(below > -kLargestDrop ? below : -kLargestDrop);
    std::memcpy(out + i, &half, sizeof half);
  }
  return top;
}

bool usable() { return true; }

}  // namespace

const IsaKernels kScalar = {"scalar",
                            usable,
                            {scan<Float32>, scan<Float16>, scan<BFloat16>, scan<Int8>, scan_sketch<4>,
                             scan_sketch<2>},
                            {weigh<Float32>, weigh<Float16>, weigh<BFloat16>},
                            maximum,
                            exponentials,
                            combine,
                            shrink,
                            [] {},
                            scan<Int8>};

}  // namespace hybridgen
