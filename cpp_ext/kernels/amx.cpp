// AMX, for int8 keys of grouped queries: a product of 16 rows of keys with all query heads of a group is one instruction,
// so that four heads cost little more arithmetic than one. All else is avx512_vnni.cpp's: one query head gains nothing, and
// for other types, most of which have to be unpacked for the tiles, it was faster (measured: experiments/RESULTS.md).
//
// Keys are the rows of tile A as they lie in memory; tile B has a query head's number in a column, in the two bytes of
// int8_query512.h, whose products add up to VNNI's sums.
#if defined(__x86_64__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "scan.h"
#include "tiles.h"

// See avx512.cpp on this region.
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")

namespace hybridgen {
namespace {

#include "int8_query512.h"
#include "stores512.h"
#include "transpose512.h"

constexpr int kUnit = 2 * kTileRows;  // rows at a time: two chains of sums, as each waits for its last product
constexpr int kPassHeads = 4;         // column 4 * part + head of tile B
constexpr int kParts = 2;             // of a query
constexpr std::int64_t kMaxGroup = 16;
constexpr std::int64_t kMaxDim = 256;
constexpr int kMaxPasses = kMaxGroup / kPassHeads;
constexpr std::int64_t kListedAhead = 6 << 10;  // bytes of listed rows between a load and the prefetch beside it

// How a group's heads go into passes: even shares, 5 is 3 + 2.
struct Passes {
  int count, heads;
  explicit Passes(std::int64_t group)
      : count(static_cast<int>((group + kPassHeads - 1) / kPassHeads)),
        heads(static_cast<int>((group + count - 1) / count)) {}
  int of(std::int64_t group, int pass) const {
    const auto rest = static_cast<int>(group) - pass * heads;
    return rest < heads ? rest : heads;
  }
};

struct Query {
  alignas(64) std::uint8_t tiles[kMaxPasses][kMaxDim / kTileBytes][kTileRows][kTileBytes];
  float step[kMaxGroup];

  Query(const ScanBlock& block, const Passes& passes) {
    const std::int64_t d = block.head_dim;
    const __m512i rows = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);  // of a tile, in dwords
    __builtin_memset(tiles, 0, sizeof tiles[0] * passes.count);
    for (int g = 0; g < block.group; ++g) {
      alignas(64) std::int8_t parts[kParts][kMaxDim];
      step[g] = round_head(block.query + g * d, d, parts[0], parts[1]).step;
      for (int part = 0; part < kParts; ++part) {
        for (std::int64_t s = 0; s * kTileBytes < d; ++s) {
          auto* column = reinterpret_cast<std::int32_t*>(tiles[g / passes.heads][s]) + kPassHeads * part + g % passes.heads;
          _mm512_i32scatter_epi32(column, rows, _mm512_load_si512(parts[part] + kTileBytes * s), 4);
        }
      }
    }
  }
};

// kUnit rows, `stride` bytes apart, times the heads of a pass. sums[0], sums[1]: of the first and the second 16 rows.
template <class Tiles>
inline void multiply(const std::int8_t* rows, std::int64_t stride, const std::uint8_t (*query)[kTileRows][kTileBytes],
                     std::int64_t steps, std::int32_t (*sums)[kTileRows][16]) {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  for (std::int64_t s = 0; s < steps; ++s, rows += kTileBytes) {
    Tiles::template load<6>(query[s], kTileBytes);
    Tiles::template load<4>(rows, stride);
    Tiles::template add_bytes<0, 4, 6>();
    Tiles::template load<5>(rows + kTileRows * stride, stride);
    Tiles::template add_bytes<1, 5, 6>();
  }
  Tiles::template store<0>(sums[0], kTileBytes);
  Tiles::template store<1>(sums[1], kTileBytes);
}

// From the sums of 16 rows to a register of 16 rows a head.
inline void heads_of_sums(const std::int32_t (*sums)[16], __m512i* head) {
  __m512 four[4];  // dword 4 * row + head, of four rows each
  for (int i = 0; i < 4; ++i) {
    __m512 v[4];
    for (int r = 0; r < 4; ++r) v[r] = _mm512_castsi512_ps(_mm512_load_si512(sums[4 * i + r]));
    transpose_quarters(v);
    four[i] = _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(v[0]), 8), _mm512_castps_si512(v[1])));
  }
  const __m512 low01 = _mm512_unpacklo_ps(four[0], four[1]), high01 = _mm512_unpackhi_ps(four[0], four[1]);
  const __m512 low23 = _mm512_unpacklo_ps(four[2], four[3]), high23 = _mm512_unpackhi_ps(four[2], four[3]);
  const __m512d a = _mm512_castps_pd(low01), b = _mm512_castps_pd(low23);
  const __m512d c = _mm512_castps_pd(high01), d = _mm512_castps_pd(high23);
  const __m512d of_head[kPassHeads] = {_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b), _mm512_unpacklo_pd(c, d),
                                       _mm512_unpackhi_pd(c, d)};
  // Dword 4 * row + i is of row 4 * i + row.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int h = 0; h < kPassHeads; ++h) head[h] = _mm512_permutexvar_epi32(order, _mm512_castpd_si512(of_head[h]));
}

// Writes the logits of `n` <= 16 rows from `first` on, for `heads` heads from `head` on.
inline void write(const ScanBlock& block, const Query& query, const std::int32_t (*sums)[16], int head, int heads,
                  std::int64_t first, int n) {
  __m512i found[kPassHeads];
  heads_of_sums(sums, found);
  const auto lanes = static_cast<__mmask16>((1u << n) - 1);
  __m512 row_scales;
  if (block.list) {
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, block.list + first);
    row_scales = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, block.row_scales, sizeof(float));
  } else {
    row_scales = _mm512_maskz_loadu_ps(lanes, block.row_scales + first);
  }
  for (int h = 0; h < heads; ++h) {
    const __m512 factor = _mm512_mul_ps(row_scales, _mm512_set1_ps(block.scale * query.step[head + h]));
    const __m512 shift = _mm512_set1_ps(block.scale * block.shifts[head + h]);
    const __m512 logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(found[h]), factor, shift);
    float* out = block.out + (head + h) * block.out_stride + first;
    if (n == kTileRows) {
      store_line(out, logits, block.out_stride);
    } else {
      _mm512_mask_storeu_ps(out, lanes, logits);
    }
  }
}

template <class Tiles, bool Listed>
void scan_rows(const ScanBlock& block) {
  const std::int64_t d = block.head_dim;
  const auto* keys = static_cast<const std::int8_t*>(block.keys);
  const Passes passes(block.group);
  const Query query(block, passes);
  alignas(64) std::int8_t staged[kUnit * kMaxDim];
  alignas(64) std::int32_t sums[2][kTileRows][16];
  const std::int64_t few = kListedAhead / d + 1, later = few < kUnit ? kUnit : few;
  const auto row_of = [&](std::int64_t j) { return keys + (Listed ? std::int64_t{block.list[j]} : j) * block.key_stride; };
  Tiles::configure();
  for (std::int64_t j = 0; j < block.rows; j += kUnit) {
    const int n = block.rows - j < kUnit ? static_cast<int>(block.rows - j) : kUnit;
    const Ahead ahead = Listed ? Ahead{} : bytes_ahead(block, block.rows, block.key_stride, j + kUnit, kUnit);
    for (int r = 0; r < n; ++r) {
      const std::int8_t* asked = row_of(Listed && j + r + later < block.rows ? j + r + later : j + r);
      for (std::int64_t c = 0; c < d; c += 64) {
        if constexpr (Listed) {
          _mm_prefetch(asked + c, _MM_HINT_T0);
        } else {
          prefetch(asked + c, ahead);
        }
      }
    }
    const std::int8_t* rows = keys + j * block.key_stride;
    std::int64_t stride = block.key_stride;
    if (Listed || n < kUnit) {  // beside each other; past the end, the last row again: read twice, never stored
      for (int r = 0; r < kUnit; ++r) {
        const std::int8_t* row = row_of(j + (r < n ? r : n - 1));
        for (std::int64_t c = 0; c < d; c += 64) _mm512_store_si512(staged + r * d + c, _mm512_loadu_si512(row + c));
      }
      rows = staged;
      stride = d;
    }
    for (int pass = 0; pass < passes.count; ++pass) {
      multiply<Tiles>(rows, stride, query.tiles[pass], d / kTileBytes, sums);
      for (int half = 0; half < 2 && half * kTileRows < n; ++half) {
        const int left = n - half * kTileRows;
        write(block, query, sums[half], pass * passes.heads, passes.of(block.group, pass), j + half * kTileRows,
              left < kTileRows ? left : kTileRows);
      }
    }
  }
  Tiles::release();
  finish_stores();
}

template <class Tiles>
void scan(const ScanBlock& block) {
  if (block.group == 1 || block.group > kMaxGroup || block.head_dim > kMaxDim || block.head_dim % kTileBytes != 0) {
    return kAvx512Vnni.scan[static_cast<int>(KeyType::Int8)](block);
  }
  block.list ? scan_rows<Tiles, true>(block) : scan_rows<Tiles, false>(block);
}

constexpr ScanFn kOnCpu = scan<CpuTiles>, kEmulated = scan<EmulatedTiles>;

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

constexpr int kTileData = 18;  // the part of a thread's state that the tiles are

bool usable() {
  constexpr long kGetSupported = 0x1021;
  unsigned long supported = 0;
  return kAvx512Vnni.usable() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 &&
         (supported >> kTileData & 1);
}

// Linux lets a process use the tiles once it has asked for that; then all its signal stacks have to be larger.
bool enable() {
  constexpr long kRequestPermission = 0x1023;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// For tests, and slow.
bool is_emulated() { return std::getenv("HYBRIDGEN_EMULATE_AMX") && kAvx512Vnni.usable(); }

IsaKernels with_tiles(const char* name, bool (*is_usable)(), bool (*enabled)(), ScanFn int8) {
  IsaKernels kernels = with_integers(kAvx512);  // which are there already
  kernels.name = name;
  kernels.usable = is_usable;
  kernels.enable = enabled;
  kernels.scan[static_cast<int>(KeyType::Int8)] = int8;
  return kernels;
}

}  // namespace

const IsaKernels kAmx = with_tiles("amx", usable, enable, kOnCpu);
const IsaKernels kAmxEmulated = with_tiles("amx_emulated", is_emulated, nullptr, kEmulated);

}  // namespace hybridgen

#endif  // __x86_64__
