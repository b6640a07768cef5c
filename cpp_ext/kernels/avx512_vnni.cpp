// AVX-512 VNNI: one instruction adds four products of a byte of a key and a byte of a query to a 32-bit sum. AVX-512
// alone takes three for a sketch's, and for int8 keys two conversions and a product for every sixteen channels. Sketches
// and int8 gain; everything else is avx512.cpp's.
//
// Int8: 16 rows at a time are transposed, so that a register holds the same four channels of each and a lane adds up
// one row: no sums across lanes. The query is an integer of 24 bits a channel, taken apart into three signed bytes,
// each with its own sum: as exact as float32. (Two would be a fifth faster with several heads, and 1e-4 off.)
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "scan.h"

// See avx512.cpp on this region.
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,prefer-vector-width=512")

namespace hybridgen {
namespace {

constexpr int kMostCode = 255;

inline __m512i dot(__m512i sums, __m512i codes, __m512i weights) { return _mm512_dpbusd_epi32(sums, codes, weights); }

#include "sketch512.h"

constexpr int kRows = 16;                    // of a tile: a lane each
constexpr int kInt8Heads = 5;                // that share a transposed tile: 15 sums beside 16 registers of keys
constexpr int kLimbs = 3;
constexpr std::int64_t kMaxInt8Dim = 1024;   // the limbs lie on the stack
constexpr std::int64_t kListedAhead = 48;    // rows of a list between a load and the prefetch beside it
constexpr float kMostQuery = 8.3e6f;         // below 127 * 2^16: the highest limb stays within a byte

struct Limbs {
  alignas(64) std::int8_t bytes[kInt8Heads][kLimbs][kMaxInt8Dim];  // beyond head_dim zeros, up to a whole register
  std::int32_t start[kInt8Heads][kLimbs];  // keys enter as key + 128: what the sums begin with takes that away
  float step[kInt8Heads];
};

// The heads of `query`, [heads, d], in limbs: query = step * (b0 + 2^8 b1 + 2^16 b2).
inline void split(const float* query, std::int64_t heads, std::int64_t d, Limbs& limbs) {
  const std::int64_t padded = (d + 63) / 64 * 64;
  const auto piece = [&](std::int64_t c) {
    return _mm512_maskz_loadu_ps(d - c >= 16 ? 0xffff : d > c ? 0xff : 0, query + c);  // head_dim: a multiple of 8
  };
  for (std::int64_t h = 0; h < heads; ++h, query += d) {
    __m512 largest = _mm512_setzero_ps();
    for (std::int64_t c = 0; c < d; c += 16) largest = _mm512_range_ps(largest, piece(c), 0xb);  // the larger of sizes
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(most > 1e-30f ? kMostQuery / most : 0.0f);
    limbs.step[h] = most / kMostQuery;
    __m512i total[kLimbs] = {};
    for (std::int64_t c = 0; c < padded; c += 16) {
      __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(piece(c), inverse));
      for (int l = 0; l < kLimbs; ++l) {
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        _mm_store_si128(reinterpret_cast<__m128i*>(limbs.bytes[h][l] + c), _mm512_cvtepi32_epi8(low));
        total[l] = _mm512_add_epi32(total[l], low);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
      }
    }
    for (int l = 0; l < kLimbs; ++l) limbs.start[h][l] = -128 * _mm512_reduce_add_epi32(total[l]);
  }
}

// Half way: in each 128-bit part p of four[4 * g + k] are, of rows 4g to 4g + 3, bytes 16p + 4k to 16p + 4k + 3.
inline __attribute__((always_inline)) void transpose_fours(const __m512i (&rows)[kRows], __m512i (&four)[kRows]) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i* r = rows + 4 * g;
    const __m512i low = _mm512_unpacklo_epi32(r[0], r[1]), low2 = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i high = _mm512_unpackhi_epi32(r[0], r[1]), high2 = _mm512_unpackhi_epi32(r[2], r[3]);
    four[4 * g] = _mm512_unpacklo_epi64(low, low2);
    four[4 * g + 1] = _mm512_unpackhi_epi64(low, low2);
    four[4 * g + 2] = _mm512_unpacklo_epi64(high, high2);
    four[4 * g + 3] = _mm512_unpackhi_epi64(high, high2);
  }
}

// The other half: lane i of quads[p] is bytes 16p + 4k to 16p + 4k + 3 of row i.
inline __attribute__((always_inline)) void transpose_parts(const __m512i (&four)[kRows], int k, __m512i (&quads)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(four[k], four[4 + k], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(four[8 + k], four[12 + k], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(four[k], four[4 + k], 0xee);
  const __m512i e = _mm512_shuffle_i32x4(four[8 + k], four[12 + k], 0xee);
  quads[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  quads[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  quads[2] = _mm512_shuffle_i32x4(c, e, 0x88);
  quads[3] = _mm512_shuffle_i32x4(c, e, 0xdd);
}

// Rows `first` to first + 15, of the list if Listed, those from `first + n` on left out, for the G heads from `head` on.
// `ahead`: from a row to those that are prefetched meanwhile, where they are not listed.
template <int G, bool Listed>
void tile(const ScanBlock& block, const Limbs& limbs, std::int64_t head, std::int64_t first, int n,
          Ahead ahead) {
  constexpr int kSets = G <= 2 ? 2 : 1;  // a sum waits for the one before: few heads take turns with two
  const std::int64_t d = block.head_dim;
  const auto* keys = static_cast<const std::int8_t*>(block.keys);
  const std::int8_t* row[kRows];  // past the end, the last row again: read twice, never stored
  const std::int8_t* next[kRows];
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t at = first + (r < n ? r : n - 1);
    row[r] = keys + (Listed ? std::int64_t{block.list[at]} : at) * block.key_stride;
    if constexpr (Listed) {
      const std::int64_t later = at + kListedAhead < block.rows ? at + kListedAhead : block.rows - 1;
      next[r] = keys + block.list[later] * block.key_stride;
    }
  }

  __m512i sums[kSets][G][kLimbs];
#pragma GCC unroll 5
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
    for (int l = 0; l < kLimbs; ++l) {
      sums[0][g][l] = _mm512_set1_epi32(limbs.start[g][l]);
      if constexpr (kSets == 2) sums[1][g][l] = _mm512_setzero_si512();
    }
  }
  for (std::int64_t c = 0; c < d; c += 64) {
    const __mmask64 mask = d - c >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (d - c)) - 1;
    __m512i rows[kRows], four[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Listed) {
        _mm_prefetch(next[r] + c, _MM_HINT_T0);
      } else {
        _mm_prefetch(row[r] + c + ahead.far, _MM_HINT_T1);
        _mm_prefetch(row[r] + c + ahead.near, _MM_HINT_T0);
      }
      rows[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, row[r] + c), _mm512_set1_epi8(-128));
    }
    transpose_fours(rows, four);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __m512i quads[4];
      transpose_parts(four, k, quads);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
#pragma GCC unroll 5
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
          for (int l = 0; l < kLimbs; ++l) {
            std::int32_t bytes;
            __builtin_memcpy(&bytes, limbs.bytes[g][l] + c + 16 * part + 4 * k, sizeof bytes);
            __m512i& sum = sums[part % kSets][g][l];
            sum = _mm512_dpbusd_epi32(sum, quads[part], _mm512_set1_epi32(bytes));
          }
        }
      }
    }
  }

  const auto lanes = static_cast<__mmask16>((1u << n) - 1);
  __m512 steps;
  if constexpr (Listed) {
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, block.list + first);
    steps = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, block.row_scales, sizeof(float));
  } else {
    steps = _mm512_maskz_loadu_ps(lanes, block.row_scales + first);
  }
#pragma GCC unroll 5
  for (int g = 0; g < G; ++g) {
    __m512 product = _mm512_setzero_ps();
#pragma GCC unroll 3
    for (int l = kLimbs - 1; l >= 0; --l) {
      __m512i sum = sums[0][g][l];
      if constexpr (kSets == 2) sum = _mm512_add_epi32(sum, sums[1][g][l]);
      product = _mm512_fmadd_ps(product, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum));
    }
    product = _mm512_mul_ps(product, _mm512_set1_ps(limbs.step[g]));
    const __m512 logits = _mm512_fmadd_ps(product, steps, _mm512_set1_ps(block.shifts[head + g]));
    float* out = block.out + (head + g) * block.out_stride + first;
    _mm512_mask_storeu_ps(out, lanes, _mm512_mul_ps(logits, _mm512_set1_ps(block.scale)));
  }
}

template <bool Listed>
void scan_int8_rows(const ScanBlock& block) {
  using Tile = void (*)(const ScanBlock&, const Limbs&, std::int64_t, std::int64_t, int, Ahead);
  static constexpr Tile kTiles[kInt8Heads + 1] = {nullptr,         tile<1, Listed>, tile<2, Listed>,
                                                  tile<3, Listed>, tile<4, Listed>, tile<5, Listed>};
  const std::int64_t passes = (block.group + kInt8Heads - 1) / kInt8Heads;
  const std::int64_t heads = (block.group + passes - 1) / passes;
  for (std::int64_t g = 0; g < block.group; g += heads) {
    const std::int64_t n = block.group - g < heads ? block.group - g : heads;
    Limbs limbs;
    split(block.query + g * block.head_dim, n, block.head_dim, limbs);
    for (std::int64_t j = 0; j < block.rows; j += kRows) {
      const int rows = block.rows - j < kRows ? static_cast<int>(block.rows - j) : kRows;
      Ahead ahead{};
      if constexpr (!Listed) ahead = bytes_ahead(block, block.rows, block.key_stride, j + kRows, kRows);
      kTiles[n](block, limbs, g, j, rows, ahead);
    }
  }
}

void scan_int8(const ScanBlock& block) {
  if (block.head_dim > kMaxInt8Dim) return kAvx512.scan[static_cast<int>(KeyType::Int8)](block);
  block.list ? scan_int8_rows<true>(block) : scan_int8_rows<false>(block);
}

constexpr ScanFn kInt4 = scan_sketch<4>;
constexpr ScanFn kInt2 = scan_sketch<2>;

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

bool usable() { return kAvx512.usable() && __builtin_cpu_supports("avx512vnni"); }

IsaKernels with_integers(IsaKernels kernels) {
  kernels.name = "avx512_vnni";
  kernels.usable = usable;
  kernels.scan[static_cast<int>(KeyType::Int8)] = scan_int8;
  kernels.scan[static_cast<int>(KeyType::Int4)] = kInt4;
  kernels.scan[static_cast<int>(KeyType::Int2)] = kInt2;
  return kernels;
}

}  // namespace

const IsaKernels kAvx512Vnni = with_integers(kAvx512);  // which is a constant, so it is there already

}  // namespace hybridgen

#endif  // __x86_64__
