// AVX-512 F/BW/VL/DQ. Bytes from DRAM are the cost, so the plan is: touch each key once, keep many loads in flight, and
// spend few instructions.
//
// The unit of work is a tile of G query heads x R rows with G * R <= 16: one accumulator register for each (head, row)
// walks along the channels, a converted key serves G heads and a query register R rows, and the 16 accumulators are
// reduced together into the 16 sums of one register (45 instructions instead of 16 separate horizontal sums).
// Rows go in strips of 16 (a few KiB, L1-resident), so groups of more than 8 heads pass over a strip, not over DRAM,
// again. The next strips are prefetched while this one is worked on.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "scan.h"

// Everything between push and pop may use AVX-512. It stays in the anonymous namespace and instantiates no template of
// any header: such an instance would be a weak symbol full of AVX-512 that the linker may hand to baseline code.
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own intrinsics: its bug 105593
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")

namespace hybridgen {
namespace {

constexpr int kLanes = 16;               // floats of a register, and rows of a strip
constexpr int kMaxHeads = 8;             // heads of one pass over a strip
constexpr std::int64_t kListedAhead = 6 << 10;  // bytes of listed rows between a load and the prefetch beside it
constexpr std::int64_t kMaxSplit = 4096;  // floats of a group's queries that scan_bf16 has room for: 16 KiB
constexpr __mmask16 kAll = 0xffff;

#include "stores512.h"
#include "transpose512.h"

// Keys: `load` gives up to 16 channels in order; of those that are kSplit, `line` gives 64 whole bytes, even channels and
// odd ones.
struct Float32 {
  using Element = float;
  static constexpr bool kSplit = false;
  static __m512 load(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
};

struct Float16 {
  using Element = std::uint16_t;
  static constexpr bool kSplit = false;
  static __m512 load(__mmask16 mask, const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
  }
};

struct BFloat16 {
  using Element = std::uint16_t;
  static constexpr bool kSplit = false;
  // bf16 is the upper half of an fp32: one permutation, where widening and shifting are two instructions. (vdpbf16ps
  // would round the query to bf16 as well, and is slower.)
  static __m512 load(__mmask16 mask, const std::uint16_t* p) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i keys = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(lane, 16), keys));
  }
};

// The even channels of a line are a shift away, the odd ones a mask, and neither takes the port of permutations. For
// queries in that order.
struct BFloat16Split : BFloat16 {
  static constexpr bool kSplit = true;
  static void line(const std::uint16_t* p, __m512& even, __m512& odd) {
    __m512i keys = _mm512_loadu_si512(p);
    asm("" : "+v"(keys));  // one load, not one for each
    even = _mm512_castsi512_ps(_mm512_slli_epi32(keys, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(keys, _mm512_set1_epi32(-65536)));
  }
};

struct Int8 {
  using Element = std::int8_t;
  static constexpr bool kSplit = false;
  static __m512 load(__mmask16 mask, const std::int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p)));
  }
};

// Lane i of the result is the sum of the lanes of v[i].
inline __m512 sums_of(const __m512 (&v)[kLanes]) {
  __m512 quad[4];  // in each 128-bit quarter: that quarter's sums of four registers
  for (int i = 0; i < 4; ++i) {
    const __m512* a = v + 4 * i;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  const __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x44),
                                 _mm512_shuffle_f32x4(quad[0], quad[1], 0xee));
  const __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x44),
                                 _mm512_shuffle_f32x4(quad[2], quad[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

// From 16 / R tiles, lane R * head + row, to a register of 16 rows a head: tile t has rows R * t and on.
template <int R>
inline void heads_of_tiles(const __m512* tile, __m512* head) {
  if constexpr (R == 16) head[0] = tile[0];
  if constexpr (R == 8) {
    head[0] = _mm512_shuffle_f32x4(tile[0], tile[1], 0x44);
    head[1] = _mm512_shuffle_f32x4(tile[0], tile[1], 0xee);
  }
  if constexpr (R == 4) {
    for (int i = 0; i < 4; ++i) head[i] = tile[i];
    transpose_quarters(head);
  }
  if constexpr (R == 2) {
    __m512 odd[4];
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(tile[2 * i]), b = _mm512_castps_pd(tile[2 * i + 1]);
      head[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      odd[i] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    transpose_quarters(head);
    transpose_quarters(odd);
    for (int i = 3; i >= 0; --i) {
      head[2 * i] = head[i];
      head[2 * i + 1] = odd[i];
    }
  }
}

// Listed rows between a load and the prefetch beside it.
template <class Key>
inline std::int64_t rows_of_ahead(std::int64_t head_dim) {
  return kListedAhead / (head_dim * static_cast<std::int64_t>(sizeof(typename Key::Element))) + 1;
}

// Adds to sum[g * W + r] the products of W rows with the G heads from `query` on, channel by channel.
template <class Key, int G, int W, bool Listed>
inline __attribute__((always_inline)) void multiply(const float* query, std::int64_t d,
                                                    const typename Key::Element* const* row,
                                                    const typename Key::Element* const* next, Ahead ahead,
                                                    __m512* sum) {
  constexpr std::int64_t kLine = 64 / sizeof(typename Key::Element);
  const auto fetch = [&](std::int64_t c) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < W; ++r) {
      if constexpr (Listed) {
        _mm_prefetch(next[r] + c, _MM_HINT_T0);
      } else {
        prefetch(row[r] + c, ahead);
      }
    }
  };
  const auto add = [&](const __m512 (&key)[W], std::int64_t c, __mmask16 mask) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      __m512 q = _mm512_maskz_loadu_ps(mask, query + g * d + c);
      asm("" : "+v"(q));  // queries, too, are rarely aligned, and then a load costs two
#pragma GCC unroll 8
      for (int r = 0; r < W; ++r) sum[g * W + r] = _mm512_fmadd_ps(q, key[r], sum[g * W + r]);
    }
  };
  const auto step = [&](std::int64_t c, __mmask16 mask) __attribute__((always_inline)) {
    __m512 key[W];
#pragma GCC unroll 8
    for (int r = 0; r < W; ++r) {
      key[r] = Key::load(mask, row[r] + c);
      if constexpr (G > 1) asm("" : "+v"(key[r]));  // one load, not one in each FMA
    }
    add(key, c, mask);
  };
  std::int64_t c = 0;
#pragma GCC unroll 1
  for (; c + kLine <= d; c += kLine) {
    fetch(c);
    if constexpr (Key::kSplit) {
      __m512 even[W], odd[W];
#pragma GCC unroll 8
      for (int r = 0; r < W; ++r) Key::line(row[r] + c, even[r], odd[r]);
      add(even, c, kAll);
      add(odd, c + kLanes, kAll);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kLine; i += kLanes) step(c + i, kAll);
    }
  }
  if (c < d) {
    fetch(c);
#pragma GCC unroll 1
    for (; c + kLanes <= d; c += kLanes) step(c, kAll);
    if (c < d) step(c, kAll >> 8);  // head_dim is a multiple of 8: half a register is left
  }
}

// The G heads from `head` on, `rows` <= 16 rows: those from `first` on, of the list if Listed. `ahead`: from a row to
// those that are prefetched meanwhile, where they are not listed. `query`: of all heads, in the order that Key wants.
// InTurn: one row after the other (see `reads_in_turn`).
template <class Key, int G, bool Listed, bool InTurn = false>
void strip(const ScanBlock& block, const float* query, std::int64_t head, std::int64_t first, std::int64_t rows,
           Ahead ahead) {
  constexpr bool kScaled = sizeof(typename Key::Element) == 1;
  constexpr int R = G == 1 ? 16 : G == 2 ? 8 : G <= 4 ? 4 : 2;
  constexpr int W = InTurn ? 1 : R < 8 ? R : 8;
  using Element = typename Key::Element;
  const std::int64_t d = block.head_dim, stride = block.key_stride;
  const auto* keys = static_cast<const Element*>(block.keys);
  const std::int64_t listed_ahead = rows_of_ahead<Key>(d);
  __m512 tiles[kLanes / R];
#pragma GCC unroll 1
  for (int j = 0; j < kLanes; j += R) {
    if (j >= rows) {
      tiles[j / R] = _mm512_setzero_ps();
      continue;
    }
    const Element* row[R];  // past the end, the last row again: read twice, never stored
    const Element* next[R];
    for (int r = 0; r < R; ++r) {
      const std::int64_t at = first + (j + r < rows ? j + r : rows - 1);
      row[r] = keys + (Listed ? std::int64_t{block.list[at]} : at) * stride;
      if constexpr (Listed) {
        const std::int64_t later = at + listed_ahead < block.rows ? at + listed_ahead : block.rows - 1;
        next[r] = keys + block.list[later] * stride;
      }
    }
    __m512 sum[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sum[i] = _mm512_setzero_ps();
    // 8 rows at a time, at most: measured 10 to 20 % faster from DRAM than 16 at once. (Probably because 16 prefetches
    // in a row hold all of L1's fill buffers, and loads of what is in L2 already wait with them.)
    if constexpr (G == 1) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r += W) multiply<Key, G, W, Listed>(query + head * d, d, row + r, next + r, ahead, sum + r);
    } else {
      multiply<Key, G, W, Listed>(query + head * d, d, row, next, ahead, sum);
    }
    tiles[j / R] = sums_of(sum);
  }

  __m512 logits[R == 2 ? 8 : R == 4 ? 4 : 16 / R];
  heads_of_tiles<R>(tiles, logits);
  const auto lanes = static_cast<__mmask16>((1u << rows) - 1);
  __m512 row_scales{};
  if constexpr (kScaled) {
    if constexpr (Listed) {
      const __m512i at = _mm512_maskz_loadu_epi32(lanes, block.list + first);
      row_scales = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, block.row_scales, sizeof(float));
    } else {
      row_scales = _mm512_maskz_loadu_ps(lanes, block.row_scales + first);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    if constexpr (kScaled) logits[g] = _mm512_fmadd_ps(logits[g], row_scales, _mm512_set1_ps(block.shifts[head + g]));
    logits[g] = _mm512_mul_ps(logits[g], _mm512_set1_ps(block.scale));
  }
  float* out = block.out + head * block.out_stride + first;
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g, out += block.out_stride) {
    if (rows == kLanes) {
      store_line(out, logits[g], block.out_stride);
    } else {
      _mm512_mask_storeu_ps(out, lanes, logits[g]);
    }
  }
}

// Query heads of a pass: even shares, 9 is 5 + 4.
inline std::int64_t heads_of_pass(std::int64_t group) {
  const std::int64_t passes = (group + kMaxHeads - 1) / kMaxHeads;
  return (group + passes - 1) / passes;
}

// The first `rows` rows of a list: those that no strip prefetches. They are a large part of a small block, and nothing
// but the list says where they are.
template <class Key>
void fetch_first(const ScanBlock& block, std::int64_t rows) {
  constexpr std::int64_t kLine = 64 / sizeof(typename Key::Element);
  const auto* keys = static_cast<const typename Key::Element*>(block.keys);
  for (std::int64_t j = 0; j < rows && j < block.rows; ++j) {
    const auto* row = keys + block.list[j] * block.key_stride;
    for (std::int64_t c = 0; c < block.head_dim; c += kLine) _mm_prefetch(row + c, _MM_HINT_T0);
  }
}

template <class Key, bool Listed>
void scan_rows(const ScanBlock& block, const float* query) {
  using Strip = void (*)(const ScanBlock&, const float*, std::int64_t, std::int64_t, std::int64_t, Ahead);
  static constexpr Strip kStrips[kMaxHeads + 1] = {
      nullptr,
      strip<Key, 1, Listed>, strip<Key, 2, Listed>, strip<Key, 3, Listed>, strip<Key, 4, Listed>,
      strip<Key, 5, Listed>, strip<Key, 6, Listed>, strip<Key, 7, Listed>, strip<Key, 8, Listed>};
  const Strip one_head = !Listed && reads_in_turn() ? strip<Key, 1, Listed, !Listed> : kStrips[1];
  const std::int64_t heads = heads_of_pass(block.group);
  const std::int64_t row_bytes = block.key_stride * static_cast<std::int64_t>(sizeof(typename Key::Element));
  if constexpr (Listed) fetch_first<Key>(block, rows_of_ahead<Key>(block.head_dim));

  for (std::int64_t j = 0; j < block.rows; j += kLanes) {
    const std::int64_t rows = block.rows - j < kLanes ? block.rows - j : kLanes;
    Ahead ahead{};
    if constexpr (!Listed) ahead = bytes_ahead(block, block.rows, row_bytes, j + kLanes, kLanes);
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      (n == 1 ? one_head : kStrips[n])(block, query, g, j, rows, ahead);
    }
  }
}

template <class Key>
void scan(const ScanBlock& block) {
  block.list ? scan_rows<Key, true>(block, block.query) : scan_rows<Key, false>(block, block.query);
  finish_stores();
}

// The query, if there is room for it, in the order of split keys.
void scan_bf16(const ScanBlock& block) {
  alignas(64) float query[kMaxSplit];
  const std::int64_t d = block.head_dim;
  if (block.group * d > kMaxSplit) return scan<BFloat16>(block);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i even = _mm512_slli_epi32(lane, 1), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (std::int64_t g = 0; g < block.group; ++g) {
    const float* from = block.query + g * d;
    float* to = query + g * d;
    std::int64_t c = 0;
    for (; c + 2 * kLanes <= d; c += 2 * kLanes) {
      const __m512 a = _mm512_loadu_ps(from + c), b = _mm512_loadu_ps(from + c + kLanes);
      _mm512_storeu_ps(to + c, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(to + c + kLanes, _mm512_permutex2var_ps(a, odd, b));
    }
    for (; c < d; ++c) to[c] = from[c];
  }
  block.list ? scan_rows<BFloat16Split, true>(block, query) : scan_rows<BFloat16Split, false>(block, query);
  finish_stores();
}

// G heads from `weights` on, up to C registers of channels from c on: G * C accumulators walk along the rows, a
// converted piece of a value serves G heads and a weight C registers.
template <class Key, int G, int C>
void columns(const WeighBlock& block, const float* weights, float* out, std::int64_t c, std::int64_t ahead) {
  using Element = typename Key::Element;
  const auto* values = static_cast<const Element*>(block.values) + c;
  __mmask16 mask[C];
  __m512 acc[G][C];
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
    const std::int64_t rest = block.head_dim - c - i * kLanes;
    mask[i] = rest >= kLanes ? kAll : rest > 0 ? kAll >> 8 : 0;
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[g][i] = _mm512_maskz_loadu_ps(mask[i], out + g * block.head_dim + c + i * kLanes);
  }
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const Element* row = values + block.list[j] * block.value_stride;
    const std::int64_t later = j + ahead < block.rows ? j + ahead : block.rows - 1;
    const Element* next = values + block.list[later] * block.value_stride;
    __m512 value[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      _mm_prefetch(next + i * kLanes, _MM_HINT_T0);
      value[i] = Key::load(mask[i], row + i * kLanes);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const __m512 weight = _mm512_set1_ps(weights[g * block.weight_stride + j]);
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) acc[g][i] = _mm512_fmadd_ps(weight, value[i], acc[g][i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) _mm512_mask_storeu_ps(out + g * block.head_dim + c + i * kLanes, mask[i], acc[g][i]);
  }
}

template <class Key, int G>
void heads_weigh(const WeighBlock& block, const float* weights, float* out) {
  constexpr int C = G <= 6 ? 4 : 2;  // at most 24 accumulators
  const std::int64_t ahead = rows_of_ahead<Key>(block.head_dim);
  for (std::int64_t c = 0; c < block.head_dim; c += C * kLanes) columns<Key, G, C>(block, weights, out, c, ahead);
}

// The same for rows in order, `rows` <= 16 of them from `first` on, of which `ahead` says where those are that are
// prefetched meanwhile. Whole: no register is half full or empty, and loads need no mask, which costs an instruction.
template <class Key, int G, int C, bool Whole>
void strip_columns(const WeighBlock& block, std::int64_t head, std::int64_t first, std::int64_t rows, std::int64_t c,
                   Ahead ahead) {
  using Element = typename Key::Element;
  constexpr std::int64_t kLine = 64 / sizeof(Element);
  const std::int64_t stride = block.value_stride, d = block.head_dim;
  const auto* row = static_cast<const Element*>(block.values) + first * stride + c;
  float* out = block.out + head * d + c;
  const float* weights[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) weights[g] = block.weights + (head + g) * block.weight_stride + first;
  __mmask16 mask[C];
  __m512 acc[G][C];
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
    const std::int64_t rest = d - c - i * kLanes;
    mask[i] = Whole || rest >= kLanes ? kAll : rest > 0 ? kAll >> 8 : 0;
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[g][i] = _mm512_maskz_loadu_ps(mask[i], out + g * d + i * kLanes);
  }
  for (std::int64_t j = 0; j < rows; ++j, row += stride) {
    __m512 weight[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) weight[g] = _mm512_set1_ps(weights[g][j]);
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      if (i * kLanes % kLine == 0 && mask[i]) prefetch(row + i * kLanes, ahead);
      __m512 value = Key::load(mask[i], row + i * kLanes);
      if constexpr (G > 1) asm("" : "+v"(value));  // one load, not one in each FMA
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) acc[g][i] = _mm512_fmadd_ps(weight[g], value, acc[g][i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) _mm512_mask_storeu_ps(out + g * d + i * kLanes, mask[i], acc[g][i]);
  }
}

template <class Key, int G>
void strip_weigh(const WeighBlock& block, std::int64_t head, std::int64_t first, std::int64_t rows, Ahead ahead) {
  constexpr int C = G <= 3 ? 8 : G <= 6 ? 4 : 2;  // accumulators, weights and a value are at most 31 registers
  for (std::int64_t c = 0; c < block.head_dim; c += C * kLanes) {
    const bool whole = c + C * kLanes <= block.head_dim;
    (whole ? strip_columns<Key, G, C, true> : strip_columns<Key, G, C, false>)(block, head, first, rows, c, ahead);
  }
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
  for (std::int64_t j = 0; j < block.rows; j += kLanes) {
    const std::int64_t rows = block.rows - j < kLanes ? block.rows - j : kLanes;
    const Ahead ahead = bytes_ahead(block.values, block.next, block.rows, row_bytes, j + kLanes, kLanes);
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

inline __mmask16 lanes_of(std::int64_t rest) { return rest >= kLanes ? kAll : (1u << rest) - 1; }

float maximum(const float* x, std::int64_t n) {
  const __m512 least = _mm512_set1_ps(-__builtin_inff());
  __m512 most[2] = {least, least};
  for (std::int64_t i = 0; i < n; i += 2 * kLanes) {
    most[0] = _mm512_max_ps(most[0], _mm512_mask_loadu_ps(least, lanes_of(n - i), x + i));
    if (n - i > kLanes) {
      most[1] = _mm512_max_ps(most[1], _mm512_mask_loadu_ps(least, lanes_of(n - i - kLanes), x + i + kLanes));
    }
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1]));
}

// e^x = 2^n * e^r with |r| <= ln 2 / 2; e^r by its minimax polynomial (Cephes), 2^n by vscalefps, down to subnormals.
inline __m512 exp_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // far below the last subnormal; in this order NaN stays NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

float exponentials(const float* x, float shift, float* out, std::int64_t n) {
  const __m512 base = _mm512_set1_ps(shift);
  __m512 sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_of(n - i);
    const __m512 value = exp_of(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, x + i), base));
    sum = _mm512_mask_add_ps(sum, lanes, sum, value);
    if (out) _mm512_mask_storeu_ps(out + i, lanes, value);
  }
  return _mm512_reduce_add_ps(sum);
}

void combine(const float* x, std::int64_t stride, const float* factors, std::int64_t group, float* out,
             std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_of(n - i);
    __m512 sum = _mm512_setzero_ps();
    for (std::int64_t g = 0; g < group; ++g) {
      sum = _mm512_fmadd_ps(_mm512_set1_ps(factors[g]), _mm512_maskz_loadu_ps(lanes, x + g * stride + i), sum);
    }
    _mm512_mask_storeu_ps(out + i, lanes, sum);
  }
}

// Four-byte dot products without VNNI. Two products are added in 16 bits, which limits the codes.
constexpr int kMostCode = 128;

inline __m512i dot(__m512i sums, __m512i codes, __m512i weights) {
  const __m512i pairs = _mm512_maddubs_epi16(codes, weights);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

float shrink(const float* x, std::int64_t n, std::uint16_t* out) {
  const float top = maximum(x, n);
  const __m512 tops = _mm512_set1_ps(top), least = _mm512_set1_ps(-kLargestDrop);
  const auto below = [&](__m512 some) {
    return _mm512_cvtps_ph(_mm512_max_ps(_mm512_sub_ps(some, tops), least), _MM_FROUND_TO_NEAREST_INT);
  };
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const __m256i low = below(_mm512_loadu_ps(x + i)), high = below(_mm512_loadu_ps(x + i + kLanes));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    store_line(reinterpret_cast<float*>(out + i), _mm512_castsi512_ps(both));
  }
  for (; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_of(n - i);
    _mm256_mask_storeu_epi16(out + i, lanes, below(_mm512_maskz_loadu_ps(lanes, x + i)));
  }
  return top;
}

void finish() { finish_stores(); }

#include "sketch512.h"

constexpr ScanFn kScan[kKeyTypes] = {scan<Float32>, scan<Float16>,  scan_bf16,
                                     scan<Int8>,    scan_sketch<4>, scan_sketch<2>};
constexpr WeighFn kWeigh[kValueTypes] = {weigh<Float32>, weigh<Float16>, weigh<BFloat16>};

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

// libgcc also asks the OS (xgetbv) whether it saves the registers.
bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
}

}  // namespace

const IsaKernels kAvx512 = {"avx512",     usable,
                            {kScan[0], kScan[1], kScan[2], kScan[3], kScan[4], kScan[5]},
                            {kWeigh[0], kWeigh[1], kWeigh[2]},
                            maximum,      exponentials,
                            combine,      shrink,       finish,       kScan[static_cast<int>(KeyType::Int8)]};

}  // namespace hybridgen

#endif  // __x86_64__
