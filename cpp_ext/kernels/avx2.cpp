// AVX2, FMA and F16C. The plan is avx512.cpp's in registers of 8 floats, of which there are 16: a tile of G query heads
// x R rows has G * R <= 8 accumulators, reduced together. head_dim is a multiple of 8, so no register is ever half
// full.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "scan.h"

// See avx512.cpp on this region.
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,fma,f16c")

namespace hybridgen {
namespace {

constexpr int kLanes = 8;                 // floats of a register
constexpr int kStrip = 16;                // rows that all heads pass over while they are in L1
constexpr int kMaxHeads = 8;              // heads of one pass over a strip
constexpr std::int64_t kListedAhead = 6 << 10;  // bytes of listed rows between a load and the prefetch beside it

struct Float32 {
  using Element = float;
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
};

struct Float16 {
  using Element = std::uint16_t;
  static __m256 load(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

struct BFloat16 {
  using Element = std::uint16_t;
  static __m256 load(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
};

struct Int8 {
  using Element = std::int8_t;
  static __m256 load(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
};

// Lane i of the result is the sum of the lanes of v[i].
inline __m256 sums_of(const __m256 (&v)[kLanes]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline float sum_of(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

inline float max_of(__m256 v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// Listed rows between a load and the prefetch beside it.
template <class Key>
inline std::int64_t rows_of_ahead(std::int64_t head_dim) {
  return kListedAhead / (head_dim * static_cast<std::int64_t>(sizeof(typename Key::Element))) + 1;
}

// The G heads from `head` on, `rows` <= 16 rows: those from `first` on, of the list if Listed. `ahead`: from a row to
// those that are prefetched meanwhile, where they are not listed.
template <class Key, int G, bool Listed>
void strip(const ScanBlock& block, std::int64_t head, std::int64_t first, std::int64_t rows, Ahead ahead) {
  constexpr bool kScaled = sizeof(typename Key::Element) == 1;
  constexpr int R = G == 1 ? 8 : G == 2 ? 4 : G <= 4 ? 2 : 1;
  using Element = typename Key::Element;
  const std::int64_t d = block.head_dim;
  const float* query = block.query + head * d;
  const auto* keys = static_cast<const Element*>(block.keys);
  const std::int64_t listed_ahead = rows_of_ahead<Key>(d);
  for (std::int64_t j = 0; j < rows; j += R) {
    const int n = rows - j < R ? static_cast<int>(rows - j) : R;
    std::int64_t at[R];
    const Element* row[R];  // past the end, the last row again: read twice, never stored
    const Element* next[R];
    for (int r = 0; r < R; ++r) {
      const std::int64_t i = first + j + (r < n ? r : n - 1);
      at[r] = Listed ? std::int64_t{block.list[i]} : i;
      row[r] = keys + at[r] * block.key_stride;
      if constexpr (Listed) {
        const std::int64_t later = i + listed_ahead < block.rows ? i + listed_ahead : block.rows - 1;
        next[r] = keys + block.list[later] * block.key_stride;
      }
    }

    __m256 acc[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) acc[i] = _mm256_setzero_ps();
    for (std::int64_t c = 0; c < d; c += kLanes) {
      __m256 key[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        // A line has several registers of elements, one of which asks for it.
        constexpr std::int64_t kLine = 64 / sizeof(Element);
        if (c % kLine != 0) {
          // Asked for already.
        } else if constexpr (Listed) {
          _mm_prefetch(next[r] + c, _MM_HINT_T0);
        } else {
          prefetch(row[r] + c, ahead);
        }
        key[r] = Key::load(row[r] + c);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const __m256 q = _mm256_loadu_ps(query + g * d + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[g * R + r] = _mm256_fmadd_ps(q, key[r], acc[g * R + r]);
      }
    }

    float sums[kLanes];
    _mm256_storeu_ps(sums, sums_of(acc));
    for (int g = 0; g < G; ++g) {
      float* to = block.out + (head + g) * block.out_stride + first + j;
      for (int r = 0; r < n; ++r) {
        float logit = sums[g * R + r];
        if constexpr (kScaled) logit = block.row_scales[at[r]] * logit + block.shifts[head + g];
        to[r] = block.scale * logit;
      }
    }
  }
}

// Heads of a pass: even shares, 9 is 5 + 4.
inline std::int64_t heads_of_pass(std::int64_t group) {
  const std::int64_t passes = (group + kMaxHeads - 1) / kMaxHeads;
  return (group + passes - 1) / passes;
}

template <class Key, bool Listed>
void scan_rows(const ScanBlock& block) {
  using Strip = void (*)(const ScanBlock&, std::int64_t, std::int64_t, std::int64_t, Ahead);
  static constexpr Strip kStrips[kMaxHeads + 1] = {
      nullptr,
      strip<Key, 1, Listed>, strip<Key, 2, Listed>, strip<Key, 3, Listed>, strip<Key, 4, Listed>,
      strip<Key, 5, Listed>, strip<Key, 6, Listed>, strip<Key, 7, Listed>, strip<Key, 8, Listed>};
  const std::int64_t heads = heads_of_pass(block.group);
  const std::int64_t row_bytes = block.key_stride * static_cast<std::int64_t>(sizeof(typename Key::Element));
  for (std::int64_t j = 0; j < block.rows; j += kStrip) {
    const std::int64_t rows = block.rows - j < kStrip ? block.rows - j : kStrip;
    Ahead ahead{};
    if constexpr (!Listed) ahead = bytes_ahead(block, block.rows, row_bytes, j + kStrip, kStrip);
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      kStrips[n](block, g, j, rows, ahead);
    }
  }
}

template <class Key>
void scan(const ScanBlock& block) {
  block.list ? scan_rows<Key, true>(block) : scan_rows<Key, false>(block);
}

// ---- Sketches: see sketch512.h, of which this is the half ----------------------------------------------------------

struct Folded {
  float step;
  float base;
};

// Four-byte dot products. No pair of products leaves 16 bits: 2 * 15 * 127.
inline __m256i dot(__m256i sums, __m256i codes, __m256i weights) {
  const __m256i pairs = _mm256_maddubs_epi16(codes, weights);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline __m256 halves(const unsigned char* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Folded fold(const float* query, const unsigned char* scales, std::int64_t d, float middle,
                   std::int8_t* weights) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 largest = _mm256_setzero_ps();
  for (std::int64_t c = 0; c < d; c += kLanes) {
    const __m256 weight = _mm256_mul_ps(_mm256_loadu_ps(query + c), halves(scales + 2 * c));
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, weight));
  }
  const float most = max_of(largest);
  const float step = most / 127.0f;
  const __m256 inverse = _mm256_set1_ps(most > 1e-30f ? 127.0f / most : 0.0f);
  __m256 base = _mm256_setzero_ps();
  for (std::int64_t c = 0; c < d; c += kLanes) {
    const __m256 q = _mm256_loadu_ps(query + c);
    const __m256 weight = _mm256_mul_ps(q, halves(scales + 2 * c));
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(weight, inverse));
    const __m256 lost = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(rounded), _mm256_set1_ps(step), weight);
    base = _mm256_fmadd_ps(q, halves(scales + 2 * (d + c)), base);
    base = _mm256_fmadd_ps(_mm256_set1_ps(middle), lost, base);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(weights + c), _mm_packs_epi16(words, words));
  }
  return {step, sum_of(base)};
}

// Of the block at `codes`, the tokens 16 * t + 8 * Half + lane for the T numbers t from First on, for G heads.
template <int Bits, int G, int T, int First>
inline __attribute__((always_inline)) void part(const unsigned char* codes, std::int64_t d, int half,
                                                const std::int8_t (*weights)[kMaxSketchDim], const Folded* folded,
                                                const float* shifts, float scale, float* out,
                                                std::int64_t out_stride) {
  constexpr int kPlaces = 8 / Bits;
  const __m256i low = _mm256_set1_epi8((1 << Bits) - 1);
  __m256i sums[G][T];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[g][t] = _mm256_setzero_si256();
  }
  for (std::int64_t c = 0; c < d; c += 4) {
    const unsigned char* vectors = codes + 8 * Bits * c + 32 * half;
    __m256i code[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int place = (First + t) % kPlaces;
      const auto* from = reinterpret_cast<const __m256i*>(vectors + 64 * ((First + t) / kPlaces));
      const __m256i packed = _mm256_loadu_si256(from);
      code[t] = _mm256_and_si256(place ? _mm256_srli_epi16(packed, Bits * place) : packed, low);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      std::int32_t four;
      std::memcpy(&four, weights[g] + c, sizeof four);
      const __m256i weight = _mm256_set1_epi32(four);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[g][t] = dot(sums[g][t], code[t], weight);
    }
  }
  for (int g = 0; g < G; ++g) {
    const __m256 step = _mm256_set1_ps(scale * folded[g].step);
    const __m256 base = _mm256_set1_ps(scale * (folded[g].base + shifts[g]));
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 logits = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[g][t]), step, base);
      _mm256_storeu_ps(out + g * out_stride + 16 * (First + t) + 8 * half, logits);
    }
  }
}

// All 64 tokens of the block at `codes` for the G heads from `head` on: out[g * out_stride + j].
template <int Bits, int G>
void block_logits(const ScanBlock& block, std::int64_t head, const unsigned char* codes, float* out,
                  std::int64_t out_stride) {
  const std::int64_t d = block.head_dim;
  std::int8_t weights[G][kMaxSketchDim];
  Folded folded[G];
  for (int g = 0; g < G; ++g) {
    folded[g] = fold(block.query + (head + g) * d, codes + sketch_code_bytes(Bits, d), d, 0.5f * ((1 << Bits) - 1),
                     weights[g]);
  }
  const float* shifts = block.shifts + head;
  for (int half = 0; half < 2; ++half) {
    if constexpr (G <= 2) {
      part<Bits, G, 4, 0>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
    } else if constexpr (G <= 4) {
      part<Bits, G, 2, 0>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
      part<Bits, G, 2, 2>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
    } else {
      part<Bits, G, 1, 0>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
      part<Bits, G, 1, 1>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
      part<Bits, G, 1, 2>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
      part<Bits, G, 1, 3>(codes, d, half, weights, folded, shifts, block.scale, out, out_stride);
    }
  }
}

template <int Bits>
void scan_sketch(const ScanBlock& block) {
  using Logits = void (*)(const ScanBlock&, std::int64_t, const unsigned char*, float*, std::int64_t);
  static constexpr Logits kLogits[kMaxHeads + 1] = {
      nullptr,
      block_logits<Bits, 1>, block_logits<Bits, 2>, block_logits<Bits, 3>, block_logits<Bits, 4>,
      block_logits<Bits, 5>, block_logits<Bits, 6>, block_logits<Bits, 7>, block_logits<Bits, 8>};
  const auto* blocks = static_cast<const unsigned char*>(block.keys);
  const std::int64_t bytes = sketch_bytes(Bits, block.head_dim);
  const std::int64_t heads = heads_of_pass(block.group);
  std::int64_t j = 0;
  while (j < block.rows) {
    // Rows j to end - 1 are of one block; the next one is asked for meanwhile.
    const std::int64_t at = (block.list ? std::int64_t{block.list[j]} : j) / kSketchTokens;
    std::int64_t end = j + 1;
    while (end < block.rows && (block.list ? std::int64_t{block.list[end]} : end) / kSketchTokens == at) ++end;
    if (end < block.rows) {
      const std::int64_t next = (block.list ? std::int64_t{block.list[end]} : end) / kSketchTokens;
      const unsigned char* later = blocks + next * block.key_stride;
      for (std::int64_t i = 0; i < bytes; i += 64) _mm_prefetch(later + i, _MM_HINT_T0);
    }
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      float all[kMaxHeads * kSketchTokens];
      kLogits[n](block, g, blocks + at * block.key_stride, all, kSketchTokens);
      for (std::int64_t h = 0; h < n; ++h) {
        float* out = block.out + (g + h) * block.out_stride;
        for (std::int64_t i = j; i < end; ++i) {
          out[i] = all[h * kSketchTokens + (block.list ? std::int64_t{block.list[i]} : i) % kSketchTokens];
        }
      }
    }
    j = end;
  }
}

// ---- Attention ------------------------------------------------------------------------------------------------------

// G heads from `weights` on, C registers of channels from c on: G * C accumulators walk along the rows.
template <class Key, int G, int C>
void columns(const WeighBlock& block, const float* weights, float* out, std::int64_t c, std::int64_t ahead) {
  using Element = typename Key::Element;
  const auto* values = static_cast<const Element*>(block.values) + c;
  __m256 acc[G][C];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) acc[g][i] = _mm256_loadu_ps(out + g * block.head_dim + c + i * kLanes);
  }
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const Element* row = values + block.list[j] * block.value_stride;
    const std::int64_t later = j + ahead < block.rows ? j + ahead : block.rows - 1;
    const Element* next = values + block.list[later] * block.value_stride;
    __m256 value[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      _mm_prefetch(next + i * kLanes, _MM_HINT_T0);
      value[i] = Key::load(row + i * kLanes);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const __m256 weight = _mm256_set1_ps(weights[g * block.weight_stride + j]);
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) acc[g][i] = _mm256_fmadd_ps(weight, value[i], acc[g][i]);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) _mm256_storeu_ps(out + g * block.head_dim + c + i * kLanes, acc[g][i]);
  }
}

template <class Key, int G>
void heads_weigh(const WeighBlock& block, const float* weights, float* out) {
  constexpr int C = G <= 2 ? 4 : G <= 5 ? 2 : 1;  // at most 10 accumulators
  const std::int64_t ahead = rows_of_ahead<Key>(block.head_dim);
  std::int64_t c = 0;
  for (; c + C * kLanes <= block.head_dim; c += C * kLanes) columns<Key, G, C>(block, weights, out, c, ahead);
  for (; c < block.head_dim; c += kLanes) columns<Key, G, 1>(block, weights, out, c, ahead);
}

// The same for rows in order, `rows` <= 16 of them from `first` on, of which `ahead` says where those are that are
// prefetched meanwhile.
template <class Key, int G, int C>
void strip_columns(const WeighBlock& block, std::int64_t head, std::int64_t first, std::int64_t rows, std::int64_t c,
                   Ahead ahead) {
  using Element = typename Key::Element;
  constexpr std::int64_t kLine = 64 / sizeof(Element);
  const auto* row = static_cast<const Element*>(block.values) + first * block.value_stride + c;
  const float* weights = block.weights + head * block.weight_stride + first;
  float* out = block.out + head * block.head_dim + c;
  __m256 acc[G][C];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) acc[g][i] = _mm256_loadu_ps(out + g * block.head_dim + i * kLanes);
  }
  for (std::int64_t j = 0; j < rows; ++j, row += block.value_stride) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      if ((c + i * kLanes) % kLine == 0) prefetch(row + i * kLanes, ahead);
      const __m256 value = Key::load(row + i * kLanes);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        acc[g][i] = _mm256_fmadd_ps(_mm256_set1_ps(weights[g * block.weight_stride + j]), value, acc[g][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) _mm256_storeu_ps(out + g * block.head_dim + i * kLanes, acc[g][i]);
  }
}

template <class Key, int G>
void strip_weigh(const WeighBlock& block, std::int64_t head, std::int64_t first, std::int64_t rows, Ahead ahead) {
  constexpr int C = G == 1 ? 8 : G <= 3 ? 4 : G <= 5 ? 2 : 1;  // at most 12 accumulators
  std::int64_t c = 0;
  for (; c + C * kLanes <= block.head_dim; c += C * kLanes) {
    strip_columns<Key, G, C>(block, head, first, rows, c, ahead);
  }
  for (; c < block.head_dim; c += kLanes) strip_columns<Key, G, 1>(block, head, first, rows, c, ahead);
}

// In strips that all heads and channels pass over while they are in L1, as scan_rows does.
template <class Key>
void weigh_in_order(const WeighBlock& block) {
  using Strip = void (*)(const WeighBlock&, std::int64_t, std::int64_t, std::int64_t, Ahead);
  static constexpr Strip kStrips[kMaxHeads + 1] = {
      nullptr,
      strip_weigh<Key, 1>, strip_weigh<Key, 2>, strip_weigh<Key, 3>, strip_weigh<Key, 4>,
      strip_weigh<Key, 5>, strip_weigh<Key, 6>, strip_weigh<Key, 7>, strip_weigh<Key, 8>};
  const std::int64_t heads = heads_of_pass(block.group);
  const std::int64_t row_bytes = block.value_stride * static_cast<std::int64_t>(sizeof(typename Key::Element));
  for (std::int64_t j = 0; j < block.rows; j += kStrip) {
    const std::int64_t rows = block.rows - j < kStrip ? block.rows - j : kStrip;
    const Ahead ahead = bytes_ahead(block.values, block.next, block.rows, row_bytes, j + kStrip, kStrip);
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      kStrips[n](block, g, j, rows, ahead);
    }
  }
}

template <class Key>
void weigh(const WeighBlock& block) {
  using Heads = void (*)(const WeighBlock&, const float*, float*);
  static constexpr Heads kHeads[kMaxHeads + 1] = {
      nullptr,
      heads_weigh<Key, 1>, heads_weigh<Key, 2>, heads_weigh<Key, 3>, heads_weigh<Key, 4>,
      heads_weigh<Key, 5>, heads_weigh<Key, 6>, heads_weigh<Key, 7>, heads_weigh<Key, 8>};
  if (block.rows == 0) return;
  if (!block.list) return weigh_in_order<Key>(block);
  const std::int64_t heads = heads_of_pass(block.group);
  for (std::int64_t g = 0; g < block.group; g += heads) {
    const std::int64_t n = block.group - g < heads ? block.group - g : heads;
    kHeads[n](block, block.weights + g * block.weight_stride, block.out + g * block.head_dim);
  }
}

// The first `rest` lanes, all if there are more.
inline __m256i lanes_of(std::int64_t rest) {
  const int n = rest < kLanes ? static_cast<int>(rest) : kLanes;
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

float maximum(const float* x, std::int64_t n) {
  const __m256 least = _mm256_set1_ps(-__builtin_inff());
  __m256 most = least;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = _mm256_max_ps(most, _mm256_loadu_ps(x + i));
  if (i < n) {
    const __m256i lanes = lanes_of(n - i);
    const __m256 rest = _mm256_blendv_ps(least, _mm256_maskload_ps(x + i, lanes), _mm256_castsi256_ps(lanes));
    most = _mm256_max_ps(most, rest);
  }
  return max_of(most);
}

float shrink(const float* x, std::int64_t n, std::uint16_t* out) {
  const float top = maximum(x, n);
  const __m256 tops = _mm256_set1_ps(top), least = _mm256_set1_ps(-kLargestDrop);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 below = _mm256_max_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), tops), least);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(below, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) {
    const float below = x[i] - top;
    out[i] = static_cast<std::uint16_t>(
        _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(below > -kLargestDrop ? below : -kLargestDrop),
                                       _MM_FROUND_TO_NEAREST_INT), 0));
  }
  return top;
}

// 2^n for n from -149 to 254 takes two factors, each a normal number.
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// As in avx512.cpp, but for 2^n: AVX2 has no vscalefps.
inline __m256 exp_of(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-150.0f), x);  // in this order NaN stays NaN
  x = _mm256_min_ps(_mm256_set1_ps(150.0f), x);   // overflows as what is larger does
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  const __m256i power = _mm256_cvtps_epi32(n);
  const __m256i first = _mm256_srai_epi32(power, 1);
  p = _mm256_mul_ps(p, power_of_two(first));  // exact: only the second may leave the normal numbers
  return _mm256_mul_ps(p, power_of_two(_mm256_sub_epi32(power, first)));
}

float exponentials(const float* x, float shift, float* out, std::int64_t n) {
  const __m256 base = _mm256_set1_ps(shift);
  __m256 sum = _mm256_setzero_ps();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const __m256i lanes = lanes_of(n - i);
    const __m256 value = exp_of(_mm256_sub_ps(_mm256_maskload_ps(x + i, lanes), base));
    sum = _mm256_add_ps(sum, _mm256_and_ps(value, _mm256_castsi256_ps(lanes)));
    if (out) _mm256_maskstore_ps(out + i, lanes, value);
  }
  return sum_of(sum);
}

void combine(const float* x, std::int64_t stride, const float* factors, std::int64_t group, float* out,
             std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const __m256i lanes = lanes_of(n - i);
    __m256 sum = _mm256_setzero_ps();
    for (std::int64_t g = 0; g < group; ++g) {
      sum = _mm256_fmadd_ps(_mm256_set1_ps(factors[g]), _mm256_maskload_ps(x + g * stride + i, lanes), sum);
    }
    _mm256_maskstore_ps(out + i, lanes, sum);
  }
}

constexpr ScanFn kScan[kKeyTypes] = {scan<Float32>, scan<Float16>,  scan<BFloat16>,
                                     scan<Int8>,    scan_sketch<4>, scan_sketch<2>};
constexpr WeighFn kWeigh[kValueTypes] = {weigh<Float32>, weigh<Float16>, weigh<BFloat16>};

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

// libgcc also asks the OS (xgetbv) whether it saves the registers.
bool usable() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const IsaKernels kAvx2 = {"avx2",       usable,
                          {kScan[0], kScan[1], kScan[2], kScan[3], kScan[4], kScan[5]},
                          {kWeigh[0], kWeigh[1], kWeigh[2]},
                          maximum,      exponentials,
                          combine,      shrink,       [] {},        kScan[static_cast<int>(KeyType::Int8)]};

}  // namespace hybridgen

#endif  // __x86_64__
