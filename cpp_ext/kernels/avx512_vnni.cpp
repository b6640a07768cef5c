// AVX-512 VNNI: one instruction adds four products of a byte of a key and a byte of a query to a 32-bit sum. For a code
// of a sketch AVX-512 alone takes three; for int8 keys it takes two conversions and a product a head for each 16
// channels. Sketches and int8 keys gain; everything else is avx512.cpp's.
//
// Int8 keys meet a query that is rounded to 16 bits a channel: see int8_query512.h. The other ISAs without AMX, and this
// one beyond kMaxInt8Dim, multiply by the query in float32.
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

// _mm512_dpbusd_epi32, of which GCC 12 makes a copy of the sums before every other instruction.
inline __attribute__((always_inline)) __m512i dot(__m512i sums, __m512i codes, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(weights));
  return sums;
}

#include "stores512.h"
#include "int8_query512.h"
#include "sketch512.h"

constexpr int kRows = 16;                       // of a tile: a lane each of its logits
constexpr std::int64_t kMaxInt8Dim = 512;       // sums of 128 * kMostQuery a channel stay within 32 bits
constexpr std::int64_t kListedAhead = 6 << 10;  // bytes of listed rows between a load and the prefetch beside it

// Query heads in integers.
struct Rounded {
  // For each line of channels, each k < 4 and each head two registers, high and low: in each 128-bit quarter, the bytes
  // of channels 4k to 4k + 3 of the quarter's 16, four times. Zeros beyond head_dim.
  __m512i bytes[kMaxInt8Dim / kLine * 4 * kPassHeads * 2];
  // What sums begin with. Codes meet the query as code + 128, unsigned: this takes that away, in the first quarter.
  __m512i start[kPassHeads];
  float step[kPassHeads];
};

// G heads of `query`.
template <int G>
void round_heads(const float* query, std::int64_t d, Rounded& rounded) {
  for (int g = 0; g < G; ++g, query += d) {
    alignas(64) std::int8_t bytes[2][kMaxInt8Dim];
    const RoundedHead head = round_head(query, d, bytes[0], bytes[1]);
    rounded.step[g] = head.step;
    rounded.start[g] = _mm512_maskz_set1_epi32(0xf, -128 * head.total);
    for (std::int64_t line = 0; line * kLine < d; ++line) {
      for (int limb = 0; limb < 2; ++limb) {
        const __m512i all = _mm512_load_si512(bytes[limb] + line * kLine);
        __m512i* to = rounded.bytes + (line * 4 * G + g) * 2 + limb;
        to[0 * G * 2] = _mm512_shuffle_epi32(all, _MM_PERM_AAAA);
        to[1 * G * 2] = _mm512_shuffle_epi32(all, _MM_PERM_BBBB);
        to[2 * G * 2] = _mm512_shuffle_epi32(all, _MM_PERM_CCCC);
        to[3 * G * 2] = _mm512_shuffle_epi32(all, _MM_PERM_DDDD);
      }
    }
  }
}

// Where the rows of a tile lie, and what is prefetched beside each: what lies `ahead` of it, or another listed row.
struct Rows {
  const std::int8_t* at[kRows];
  const std::int8_t* next[kRows];
  Ahead ahead;
};

// These rows, which are `first` to first + n - 1 of the block, for the G heads from `head` on.
//
// Fours of rows are transposed within the quarters of registers, in dwords: register k has dword k of each quarter, of
// four rows. So a lane adds up one row, a quarter of its channels, and the four quarters of 16 rows are put together at
// once. (Transposed farther, shuffles would cost more than they save.)
template <int G, bool Listed, bool InTurn = false>
__attribute__((noinline)) void tile(const ScanBlock& block, const Rounded& rounded, const Rows& rows, std::int64_t head,
                                    std::int64_t first, int n) {
  // At a time: so many sums that none waits for the one before; or InTurn, as nearly as rows can be (`reads_in_turn`).
  constexpr int kFours = InTurn ? 1 : G == 1 ? 4 : G <= 4 ? 2 : 1;
  const std::int64_t d = block.head_dim;
  __m512i sums[kRows / 4][G];
#pragma GCC unroll 1
  for (int from = 0; from < kRows / 4; from += kFours) {
    const std::int8_t* const* row = rows.at + 4 * from;
    const std::int8_t* const* next = rows.next + 4 * from;
    __m512i acc[kFours][G][2];
#pragma GCC unroll 4
    for (int f = 0; f < kFours; ++f) {
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        acc[f][g][0] = _mm512_setzero_si512();
        acc[f][g][1] = rounded.start[g];
      }
    }

    const auto step = [&](std::int64_t c, __mmask16 mask) __attribute__((always_inline)) {
      __m512i dwords[kFours][4];
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) {
        __m512i x[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          if constexpr (Listed) {
            _mm_prefetch(next[4 * f + r] + c, _MM_HINT_T0);
          } else {
            prefetch(row[4 * f + r] + c, rows.ahead);
          }
          x[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi32(mask, row[4 * f + r] + c), _mm512_set1_epi8(-128));
        }
        const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]), high01 = _mm512_unpackhi_epi32(x[0], x[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]), high23 = _mm512_unpackhi_epi32(x[2], x[3]);
        dwords[f][0] = _mm512_unpacklo_epi64(low01, low23);
        dwords[f][1] = _mm512_unpackhi_epi64(low01, low23);
        dwords[f][2] = _mm512_unpacklo_epi64(high01, high23);
        dwords[f][3] = _mm512_unpackhi_epi64(high01, high23);
      }
      const __m512i* bytes = rounded.bytes + c / kLine * 4 * G * 2;
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 2
          for (int limb = 0; limb < 2; ++limb) {
            __m512i weights = bytes[(k * G + g) * 2 + limb];
            asm("" : "+v"(weights));  // one load for all fours
#pragma GCC unroll 4
            for (int f = 0; f < kFours; ++f) acc[f][g][limb] = dot(acc[f][g][limb], dwords[f][k], weights);
          }
        }
      }
    };
    std::int64_t c = 0;
    for (; c + kLine <= d; c += kLine) step(c, 0xffff);
    if (c < d) step(c, static_cast<__mmask16>((1u << ((d - c) / 4)) - 1));
#pragma GCC unroll 4
    for (int f = 0; f < kFours; ++f) {
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        sums[from + f][g] = _mm512_add_epi32(_mm512_slli_epi32(acc[f][g][0], 8), acc[f][g][1]);
      }
    }
  }

  const auto lanes = static_cast<__mmask16>((1u << n) - 1);
  __m512 row_scales;
  if constexpr (Listed) {
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, block.list + first);
    row_scales = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, block.row_scales, sizeof(float));
  } else {
    row_scales = _mm512_maskz_loadu_ps(lanes, block.row_scales + first);
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const __m512i x = _mm512_add_epi32(_mm512_shuffle_i32x4(sums[0][g], sums[1][g], 0x44),
                                       _mm512_shuffle_i32x4(sums[0][g], sums[1][g], 0xee));
    const __m512i y = _mm512_add_epi32(_mm512_shuffle_i32x4(sums[2][g], sums[3][g], 0x44),
                                       _mm512_shuffle_i32x4(sums[2][g], sums[3][g], 0xee));
    const __m512i sum = _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
    const __m512 factor = _mm512_mul_ps(row_scales, _mm512_set1_ps(block.scale * rounded.step[g]));
    const __m512 shift = _mm512_set1_ps(block.scale * block.shifts[head + g]);
    const __m512 logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, shift);
    float* out = block.out + (head + g) * block.out_stride + first;
    if (n == kRows) {
      store_line(out, logits, block.out_stride);
    } else {
      _mm512_mask_storeu_ps(out, lanes, logits);
    }
  }
}

template <int G, bool Listed>
void heads_int8(const ScanBlock& block, std::int64_t head) {
  Rounded rounded;
  round_heads<G>(block.query + head * block.head_dim, block.head_dim, rounded);
  const auto* keys = static_cast<const std::int8_t*>(block.keys);
  const std::int64_t listed_ahead = kListedAhead / block.head_dim + 1;
  const bool in_turn = G == 1 && !Listed && reads_in_turn();
  Rows rows;
  for (std::int64_t j = 0; j < block.rows; j += kRows) {
    const int n = block.rows - j < kRows ? static_cast<int>(block.rows - j) : kRows;
    if (!Listed && j > 0 && n == kRows) {
      for (int r = 0; r < kRows; ++r) rows.at[r] += kRows * block.key_stride;
    } else {
      for (int r = 0; r < kRows; ++r) {  // past the end, the last row again: read twice, never stored
        const std::int64_t at = j + (r < n ? r : n - 1);
        rows.at[r] = keys + (Listed ? std::int64_t{block.list[at]} : at) * block.key_stride;
        if constexpr (Listed) {
          const std::int64_t later = at + listed_ahead < block.rows ? at + listed_ahead : block.rows - 1;
          rows.next[r] = keys + block.list[later] * block.key_stride;
        }
      }
    }
    if constexpr (!Listed) rows.ahead = bytes_ahead(block, block.rows, block.key_stride, j + kRows, kRows);
    if (in_turn) {
      tile<G, Listed, G == 1 && !Listed>(block, rounded, rows, head, j, n);
    } else {
      tile<G, Listed>(block, rounded, rows, head, j, n);
    }
  }
}

// The rows of a list that no tile prefetches: see avx512.cpp.
void fetch_first(const ScanBlock& block) {
  const auto* keys = static_cast<const std::int8_t*>(block.keys);
  for (std::int64_t j = 0; j <= kListedAhead / block.head_dim && j < block.rows; ++j) {
    const std::int8_t* row = keys + block.list[j] * block.key_stride;
    for (std::int64_t c = 0; c < block.head_dim; c += kLine) _mm_prefetch(row + c, _MM_HINT_T0);
  }
}

template <bool Listed>
void scan_int8_rows(const ScanBlock& block) {
  using Heads = void (*)(const ScanBlock&, std::int64_t);
  static constexpr Heads kHeads[kPassHeads + 1] = {
      nullptr,
      heads_int8<1, Listed>, heads_int8<2, Listed>, heads_int8<3, Listed>, heads_int8<4, Listed>,
      heads_int8<5, Listed>, heads_int8<6, Listed>, heads_int8<7, Listed>, heads_int8<8, Listed>};
  const std::int64_t passes = (block.group + kPassHeads - 1) / kPassHeads;
  const std::int64_t heads = (block.group + passes - 1) / passes;
  if constexpr (Listed) fetch_first(block);
  for (std::int64_t g = 0; g < block.group; g += heads) {
    kHeads[block.group - g < heads ? block.group - g : heads](block, g);
  }
  finish_stores();
}

void scan_int8(const ScanBlock& block) {
  if (block.head_dim > kMaxInt8Dim) return kAvx512.scan[static_cast<int>(KeyType::Int8)](block);
  block.list ? scan_int8_rows<true>(block) : scan_int8_rows<false>(block);
}

constexpr ScanFn kInt8 = scan_int8;
constexpr ScanFn kInt4 = scan_sketch<4>;
constexpr ScanFn kInt2 = scan_sketch<2>;

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

bool usable() { return kAvx512.usable() && __builtin_cpu_supports("avx512vnni"); }

}  // namespace

IsaKernels with_integers(IsaKernels kernels) {
  kernels.scan[static_cast<int>(KeyType::Int8)] = kInt8;
  kernels.scan[static_cast<int>(KeyType::Int4)] = kInt4;
  kernels.scan[static_cast<int>(KeyType::Int2)] = kInt2;
  return kernels;
}

namespace {

IsaKernels named(IsaKernels kernels) {
  kernels.name = "avx512_vnni";
  kernels.usable = usable;
  return kernels;
}

}  // namespace

const IsaKernels kAvx512Vnni = named(with_integers(kAvx512));  // which is a constant, so it is there already

}  // namespace hybridgen

#endif  // __x86_64__
