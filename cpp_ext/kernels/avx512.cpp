// AVX-512 F/BW/VL. Bytes from DRAM are the cost, so the plan is: touch each key once, keep many loads in flight, and
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
#pragma GCC target("avx512f,avx512bw,avx512vl,fma,f16c,prefer-vector-width=512")

namespace hybridgen {
namespace {

constexpr int kLanes = 16;               // floats of a register, and rows of a strip
constexpr int kMaxHeads = 8;             // heads of one pass over a strip
constexpr std::int64_t kAhead = 6 << 10;  // bytes of keys between a load and the prefetch beside it
constexpr __mmask16 kAll = 0xffff;

struct Float32 {
  using Element = float;
  static __m512 load(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
};

struct Float16 {
  using Element = std::uint16_t;
  static __m512 load(__mmask16 mask, const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
  }
};

struct BFloat16 {
  using Element = std::uint16_t;
  // bf16 is the upper half of an fp32. (vdpbf16ps would round the query to bf16 as well.)
  static __m512 load(__mmask16 mask, const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
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

// G heads from `query` and `out` on, `rows` <= 16 rows from `keys` on. `ahead`: elements from a row to the one that
// is prefetched meanwhile.
template <class Key, int G>
void strip(const ScanBlock& block, const float* query, const typename Key::Element* keys, float* out,
           std::int64_t rows, std::int64_t ahead) {
  constexpr int R = G == 1 ? 16 : G == 2 ? 8 : G <= 4 ? 4 : 2;
  const std::int64_t d = block.head_dim;
  for (std::int64_t j = 0; j < rows; j += R) {
    const int n = rows - j < R ? static_cast<int>(rows - j) : R;
    const typename Key::Element* row[R];  // past the end, the last row again: read twice, never stored
    for (int r = 0; r < R; ++r) row[r] = keys + (j + (r < n ? r : n - 1)) * block.key_stride;

    __m512 acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = _mm512_setzero_ps();

    const auto step = [&](std::int64_t c, __mmask16 mask) __attribute__((always_inline)) {
      __m512 key[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        _mm_prefetch(row[r] + c + ahead, _MM_HINT_T1);  // L2: distant rows at large strides share few sets of L1
        key[r] = Key::load(mask, row[r] + c);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        __m512 q = _mm512_maskz_loadu_ps(mask, query + g * d + c);
        asm("" : "+v"(q));  // one load, not one in each FMA: queries are rarely aligned, and then a load costs two
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[g * R + r] = _mm512_fmadd_ps(q, key[r], acc[g * R + r]);
      }
    };
    std::int64_t c = 0;
    for (; c + kLanes <= d; c += kLanes) step(c, kAll);
    if (c < d) step(c, kAll >> 8);  // head_dim is a multiple of 8: half a register is left

    float sums[kLanes];
    _mm512_storeu_ps(sums, _mm512_mul_ps(sums_of(acc), _mm512_set1_ps(block.scale)));
    for (int g = 0; g < G; ++g) {
      float* to = out + g * block.out_stride + j;
      if (n == R) {
        std::memcpy(to, sums + g * R, sizeof(float) * R);  // one or two moves; with n it would be a call
      } else {
        for (int r = 0; r < n; ++r) to[r] = sums[g * R + r];
      }
    }
  }
}

template <class Key>
void scan(const ScanBlock& block) {
  using Element = typename Key::Element;
  using Strip = void (*)(const ScanBlock&, const float*, const Element*, float*, std::int64_t, std::int64_t);
  static constexpr Strip kStrips[kMaxHeads + 1] = {
      nullptr,       strip<Key, 1>, strip<Key, 2>, strip<Key, 3>, strip<Key, 4>,
      strip<Key, 5>, strip<Key, 6>, strip<Key, 7>, strip<Key, 8>};
  const std::int64_t passes = (block.group + kMaxHeads - 1) / kMaxHeads;
  const std::int64_t heads = (block.group + passes - 1) / passes;  // of a pass: even shares, 9 is 5 + 4
  const std::int64_t row_bytes = block.head_dim * static_cast<std::int64_t>(sizeof(Element));
  const std::int64_t rows_ahead = kAhead / row_bytes + 1;

  const auto* keys = static_cast<const Element*>(block.keys);
  for (std::int64_t j = 0; j < block.rows; j += kLanes) {
    const std::int64_t rows = block.rows - j < kLanes ? block.rows - j : kLanes;
    // Prefetches, too, stay within the block: what follows is another thread's or nobody's.
    const bool more = j + kLanes + rows_ahead <= block.rows;
    const std::int64_t ahead = more ? rows_ahead * block.key_stride : 0;
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      kStrips[n](block, block.query + g * block.head_dim, keys + j * block.key_stride,
                 block.out + g * block.out_stride + j, rows, ahead);
    }
  }
}

constexpr ScanFn kScan[kKeyTypes] = {scan<Float32>, scan<Float16>, scan<BFloat16>};

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

// libgcc also asks the OS (xgetbv) whether it saves the registers.
bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
}

}  // namespace

const IsaKernels kAvx512 = {"avx512", usable, {kScan[0], kScan[1], kScan[2]}};

}  // namespace hybridgen

#endif  // __x86_64__
