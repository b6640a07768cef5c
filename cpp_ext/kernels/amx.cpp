// AMX: a product of 16 rows of keys with all query heads of a group is one instruction, so that grouped queries cost
// little more arithmetic than one head. One query head gains nothing: it is avx512_vnni.cpp's, as are shapes that do not
// fill tiles.
//
// Scans: keys are the rows of tile A as they lie in memory; tile B has a query head's number in a column, in parts that
// add up to it, so that nothing is rounded: three bf16 are an fp32; int8 keys meet the two bytes of int8_query512.h.
//   fp16 keys become three tiles of bf16. Let w be a key's bits, +-2^e * (1 + m / 1024), and m = 8 * high + low:
//     high part: +-2^e * (1 + high / 128)
//     with low:  +-2^e * (1 + low / 8 + rest), without: -+2^e * (1 + rest); their sum / 128 is what the high part lacks
//   Exponents of fp16 stand in bf16 as they are, so that numbers are 2^112 too small, for which the query makes up.
//   A key below 2^-14, which is subnormal in fp16, counts as zero: a logit is off by less than scale * 2^-14 * the sum
//   of the query's sizes in those channels. Rows with keys that are not finite are left to avx512.cpp.
//   bf16 keys that are infinite may give a NaN where other kernels give an infinite logit.
// Sketches: codes are unpacked once, to bytes that lie as tile B wants them already, and the weights of a head are a row of
// tile A: the sums are those of avx512_vnni.cpp.
// Sums of bf16 values: weights are the rows of tile A, in three parts; values of two tokens are interleaved for tile B.
#if defined(__x86_64__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <type_traits>

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
#include "sketch512.h"
#include "transpose512.h"

constexpr int kUnit = 2 * kTileRows;  // rows at a time: two chains of sums, as each waits for its last product
constexpr int kPassHeads = 4;         // column 4 * part + head of tile B, row 4 * part + head of tile A
constexpr std::int64_t kMaxGroup = 16;
constexpr std::int64_t kMaxDim = 256;
constexpr int kMaxPasses = kMaxGroup / kPassHeads;
constexpr std::int64_t kListedAhead = 6 << 10;  // bytes of listed rows between a load and the prefetch beside it

// Listed rows between a load and the prefetch beside it: at least those that are worked on together.
inline std::int64_t listed_ahead(std::int64_t row_bytes) {
  const std::int64_t rows = kListedAhead / row_bytes + 1;
  return rows < kUnit ? kUnit : rows;
}

// Asks for a row of a list, or for what lies ahead of a row.
template <bool Listed>
inline void fetch_row(const void* row, std::int64_t bytes, Ahead ahead) {
  for (std::int64_t c = 0; c < bytes; c += 64) {
    const auto* at = static_cast<const char*>(row) + c;
    if constexpr (Listed) {
      _mm_prefetch(at, _MM_HINT_T0);
    } else {
      prefetch(at, ahead);
    }
  }
}

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

// 32 floats times `factor` as bf16: part 0 + part 1 + part 2 is what they are, but for what is subnormal.
inline void split(__m512 low, __m512 high, void* part0, void* part1, void* part2) {
  const __m512i upper = _mm512_set1_epi32(-65536);
  void* const parts[] = {part0, part1, part2};
  for (void* part : parts) {
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(low), upper);
    const __m512i b = _mm512_and_si512(_mm512_castps_si512(high), upper);
    auto* to = static_cast<__m256i*>(part);
    _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
    _mm256_storeu_si256(to + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)));
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(a));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(b));
  }
}

struct BFloat16 {
  using Element = std::uint16_t;
  static constexpr std::int64_t kChannels = 32;  // of a row of a tile
  static constexpr int kParts = 3;               // of a query
  static constexpr int kPlanes = 1;              // that a key becomes
  static constexpr float kFactor = 1.0f;         // of the query
  static constexpr bool kIntegers = false;       // sums are, until they meet the steps of keys and query
};

struct Float16 : BFloat16 {
  static constexpr int kPlanes = 3;
  static constexpr float kFactor = 0x1p112f;
};

struct Int8 {
  using Element = std::int8_t;
  static constexpr std::int64_t kChannels = 64;
  static constexpr int kParts = 2;
  static constexpr int kPlanes = 1;
  static constexpr bool kIntegers = true;
};

template <class Key>
struct Query {
  static constexpr std::int64_t kMaxSteps = kMaxDim / Key::kChannels;
  alignas(64) std::uint8_t tiles[kMaxPasses][kMaxSteps][kTileRows][kTileBytes];
  float step[kMaxGroup];  // of int8 keys

  Query(const ScanBlock& block, const Passes& passes) {
    const std::int64_t d = block.head_dim;
    const __m512i rows = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);  // of a tile, in dwords
    __builtin_memset(tiles, 0, sizeof tiles[0] * passes.count);
    for (int g = 0; g < block.group; ++g) {
      const float* head = block.query + g * d;
      alignas(64) std::uint8_t parts[3][kMaxDim * 2];
      if constexpr (Key::kIntegers) {
        const RoundedHead rounded = round_head(head, d, reinterpret_cast<std::int8_t*>(parts[0]),
                                               reinterpret_cast<std::int8_t*>(parts[1]));
        step[g] = rounded.step;
      } else {
        const __m512 factor = _mm512_set1_ps(Key::kFactor);
        for (std::int64_t c = 0; c < d; c += 32) {
          split(_mm512_mul_ps(_mm512_loadu_ps(head + c), factor), _mm512_mul_ps(_mm512_loadu_ps(head + c + 16), factor),
                parts[0] + 2 * c, parts[1] + 2 * c, parts[2] + 2 * c);
        }
      }
      for (int part = 0; part < Key::kParts; ++part) {
        for (std::int64_t s = 0; s * Key::kChannels < d; ++s) {
          auto* column = reinterpret_cast<std::int32_t*>(tiles[g / passes.heads][s]) + kPassHeads * part + g % passes.heads;
          _mm512_i32scatter_epi32(column, rows, _mm512_load_si512(parts[part] + kTileBytes * s), 4);
        }
      }
    }
  }
};

// Rows of a tile A, or of several, which lie `stride` bytes apart.
struct Planes {
  const std::uint8_t* at[3];
  std::int64_t stride;
};

// Copies rows to where they lie beside each other, as Key wants them. Bit r: row r is not finite, and of no use here.
template <class Key>
inline std::uint32_t stage(const typename Key::Element* const* row, std::int64_t d,
                           std::uint8_t (*to)[kUnit * kMaxDim * sizeof(typename Key::Element)]) {
  const std::int64_t bytes = d * static_cast<std::int64_t>(sizeof(typename Key::Element));
  std::uint32_t bad = 0;
  for (int r = 0; r < kUnit; ++r) {
    __m512i carry = _mm512_setzero_si512();
    for (std::int64_t c = 0; c < bytes; c += kTileBytes) {
      const __m512i bits = _mm512_loadu_si512(reinterpret_cast<const std::uint8_t*>(row[r]) + c);
      if constexpr (Key::kPlanes == 1) {
        _mm512_store_si512(to[0] + r * bytes + c, bits);
      } else {
        const __m512i low = _mm512_set1_epi16(0x0070);  // where a bf16 has 1/2, 1/4 and 1/8
        const __m512i sign = _mm512_set1_epi16(-0x8000);
        const __m512i high = _mm512_and_si512(_mm512_srai_epi16(bits, 3), _mm512_set1_epi16(-0x7001));
        const __m512i with = _mm512_ternarylogic_epi32(high, _mm512_slli_epi16(bits, 4), low, 0xd8);
        const __m512i without = _mm512_ternarylogic_epi32(high, low, sign, 0x9a);
        _mm512_store_si512(to[0] + r * bytes + c, high);
        _mm512_store_si512(to[1] + r * bytes + c, with);
        _mm512_store_si512(to[2] + r * bytes + c, without);
        carry = _mm512_or_si512(carry, _mm512_add_epi16(high, _mm512_set1_epi16(0x80)));  // of the largest exponent
      }
    }
    if (Key::kPlanes > 1 && _mm512_test_epi16_mask(carry, _mm512_set1_epi16(0x1000))) bad |= 1u << r;
  }
  return bad;
}

// The kUnit rows at `planes` times the heads of a pass. sums[0], sums[1]: of the first and the second 16 rows; of keys
// with several planes, 128 times what they lack in sums[2] and sums[3].
template <class Tiles, class Key>
inline void multiply(const Planes& planes, const std::uint8_t (*query)[kTileRows][kTileBytes], std::int64_t steps,
                     float (*sums)[kTileRows][16]) {
  const std::int64_t half = kTileRows * planes.stride;
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  if constexpr (Key::kPlanes == 3) {
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    Tiles::template load<6>(query[s], kTileBytes);
    const auto add = [&](auto first, auto second, const std::uint8_t* rows) __attribute__((always_inline)) {
      Tiles::template load<4>(rows + kTileBytes * s, planes.stride);
      Tiles::template load<5>(rows + kTileBytes * s + half, planes.stride);
      if constexpr (Key::kIntegers) {
        Tiles::template add_bytes<first, 4, 6>();
        Tiles::template add_bytes<second, 5, 6>();
      } else {
        Tiles::template add_bf16<first, 4, 6>();
        Tiles::template add_bf16<second, 5, 6>();
      }
    };
    using std::integral_constant;
    add(integral_constant<int, 0>{}, integral_constant<int, 1>{}, planes.at[0]);
    if constexpr (Key::kPlanes == 3) {
      add(integral_constant<int, 2>{}, integral_constant<int, 3>{}, planes.at[1]);
      add(integral_constant<int, 2>{}, integral_constant<int, 3>{}, planes.at[2]);
    }
  }
  Tiles::template store<0>(sums[0], kTileBytes);
  Tiles::template store<1>(sums[1], kTileBytes);
  if constexpr (Key::kPlanes == 3) {
    Tiles::template store<2>(sums[2], kTileBytes);
    Tiles::template store<3>(sums[3], kTileBytes);
  }
}

// Adds up the parts of four rows: dword 4 * row + head, of int8 keys an integer still.
template <class Key>
inline __m512 add_parts(const float (*rows)[16]) {
  __m512 v[4];
  for (int r = 0; r < 4; ++r) v[r] = _mm512_load_ps(rows[r]);
  transpose_quarters(v);
  if constexpr (Key::kIntegers) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(v[0]), 8), _mm512_castps_si512(v[1])));
  } else {
    return _mm512_add_ps(_mm512_add_ps(v[2], v[1]), v[0]);
  }
}

// From the sums of 16 rows to a register of 16 rows a head.
template <class Key>
inline void heads_of_sums(const float (*sums)[16], const float (*lacking)[16], __m512* head) {
  __m512 four[4];
  for (int i = 0; i < 4; ++i) {
    four[i] = add_parts<Key>(sums + 4 * i);
    if constexpr (Key::kPlanes == 3) {
      four[i] = _mm512_fmadd_ps(add_parts<Key>(lacking + 4 * i), _mm512_set1_ps(0x1p-7f), four[i]);
    }
  }
  const __m512 low01 = _mm512_unpacklo_ps(four[0], four[1]), high01 = _mm512_unpackhi_ps(four[0], four[1]);
  const __m512 low23 = _mm512_unpacklo_ps(four[2], four[3]), high23 = _mm512_unpackhi_ps(four[2], four[3]);
  const __m512d a = _mm512_castps_pd(low01), b = _mm512_castps_pd(low23);
  const __m512d c = _mm512_castps_pd(high01), d = _mm512_castps_pd(high23);
  head[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
  head[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  head[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
  head[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  // Dword 4 * row + i is of row 4 * i + row.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int h = 0; h < kPassHeads; ++h) head[h] = _mm512_permutexvar_ps(order, head[h]);
}

// Writes the logits of `n` <= 16 rows from `first` on, for `heads` heads from `head` on.
template <class Key>
inline void write(const ScanBlock& block, const Query<Key>& query, const float (*sums)[16], const float (*lacking)[16],
                  int head, int heads, std::int64_t first, int n) {
  __m512 found[kPassHeads];
  heads_of_sums<Key>(sums, lacking, found);
  const auto lanes = static_cast<__mmask16>((1u << n) - 1);
  __m512 row_scales{};
  if constexpr (Key::kIntegers) {
    if (block.list) {
      const __m512i at = _mm512_maskz_loadu_epi32(lanes, block.list + first);
      row_scales = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, block.row_scales, sizeof(float));
    } else {
      row_scales = _mm512_maskz_loadu_ps(lanes, block.row_scales + first);
    }
  }
  for (int h = 0; h < heads; ++h) {
    __m512 logits;
    if constexpr (Key::kIntegers) {
      const __m512 factor = _mm512_mul_ps(row_scales, _mm512_set1_ps(block.scale * query.step[head + h]));
      const __m512 shift = _mm512_set1_ps(block.scale * block.shifts[head + h]);
      logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(found[h])), factor, shift);
    } else {
      logits = _mm512_mul_ps(found[h], _mm512_set1_ps(block.scale));
    }
    float* out = block.out + (head + h) * block.out_stride + first;
    if (n == kTileRows) {
      store_line(out, logits, block.out_stride);
    } else {
      _mm512_mask_storeu_ps(out, lanes, logits);
    }
  }
}

// The block's `n` rows from `first` on.
inline ScanBlock part_of(const ScanBlock& block, std::int64_t first, std::int64_t n, std::int64_t element_bytes) {
  ScanBlock part = block;
  part.rows = n;
  part.out += first;
  part.next = nullptr;
  if (block.list) {
    part.list += first;
  } else {
    part.keys = static_cast<const std::uint8_t*>(block.keys) + first * block.key_stride * element_bytes;
  }
  return part;
}

template <class Tiles, class Key, bool Listed>
void scan_rows(const ScanBlock& block, ScanFn other) {
  using Element = typename Key::Element;
  constexpr std::int64_t kBytes = sizeof(Element);
  const std::int64_t d = block.head_dim, row_bytes = block.key_stride * kBytes;
  const auto* keys = static_cast<const Element*>(block.keys);
  const Passes passes(block.group);
  const Query<Key> query(block, passes);
  alignas(64) std::uint8_t staged[Key::kPlanes][kUnit * kMaxDim * kBytes];
  alignas(64) float sums[2 * (Key::kPlanes == 3 ? 2 : 1)][kTileRows][16];
  const std::int64_t later = Listed ? listed_ahead(d * kBytes) : 0;
  const auto row_of = [&](std::int64_t j) { return keys + (Listed ? std::int64_t{block.list[j]} : j) * block.key_stride; };
  Tiles::configure();
  for (std::int64_t j = 0; j < block.rows; j += kUnit) {
    const int n = block.rows - j < kUnit ? static_cast<int>(block.rows - j) : kUnit;
    const Ahead ahead = Listed ? Ahead{} : bytes_ahead(block, block.rows, row_bytes, j + kUnit, kUnit);
    for (int r = 0; r < n; ++r) {
      const std::int64_t asked = Listed && j + r + later < block.rows ? j + r + later : j + r;
      fetch_row<Listed>(row_of(asked), d * kBytes, ahead);
    }
    std::uint32_t bad = 0;
    Planes planes{{reinterpret_cast<const std::uint8_t*>(keys + j * block.key_stride)}, row_bytes};
    if (Listed || n < kUnit || Key::kPlanes > 1) {
      const Element* row[kUnit];  // past the end, the last row again: read twice, never stored
      for (int r = 0; r < kUnit; ++r) row[r] = row_of(j + (r < n ? r : n - 1));
      bad = stage<Key>(row, d, staged);
      planes.stride = d * kBytes;
      for (int plane = 0; plane < Key::kPlanes; ++plane) planes.at[plane] = staged[plane];
    }
    for (int pass = 0; pass < passes.count; ++pass) {
      multiply<Tiles, Key>(planes, query.tiles[pass], d / Key::kChannels, sums);
      for (int half = 0; half < 2 && half * kTileRows < n; ++half) {
        const int rows = n - half * kTileRows < kTileRows ? n - half * kTileRows : kTileRows;
        write<Key>(block, query, sums[half], sums[Key::kPlanes == 3 ? 2 + half : half], pass * passes.heads,
                   passes.of(block.group, pass), j + half * kTileRows, rows);
      }
    }
    // One by one: what its neighbours get must not depend on where a chunk begins.
    for (int r = 0; bad && r < n; ++r) {
      if (bad >> r & 1) other(part_of(block, j + r, 1, kBytes));
    }
  }
  Tiles::release();
  finish_stores();
}

inline bool fits(std::int64_t group, std::int64_t head_dim, std::int64_t channels) {
  return group > 1 && group <= kMaxGroup && head_dim <= kMaxDim && head_dim % channels == 0;
}

// Whether no query of fp16 keys leaves the range of bf16 by its factor.
inline bool in_range(const ScanBlock& block) {
  const __m512i most = _mm512_castps_si512(_mm512_set1_ps(16384.0f));
  for (std::int64_t i = 0; i < block.group * block.head_dim; i += 16) {
    const __m512i size = _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(block.query + i)));
    if (_mm512_cmpgt_epu32_mask(size, most)) return false;  // a NaN, too
  }
  return true;
}

template <class Tiles, class Key>
void scan(const ScanBlock& block) {
  constexpr KeyType kType = Key::kIntegers ? KeyType::Int8
                            : Key::kPlanes == 3                ? KeyType::Float16
                                                               : KeyType::BFloat16;
  const ScanFn other = kAvx512Vnni.scan[static_cast<int>(kType)];
  if (!fits(block.group, block.head_dim, Key::kChannels) || (Key::kPlanes == 3 && !in_range(block))) return other(block);
  block.list ? scan_rows<Tiles, Key, true>(block, other) : scan_rows<Tiles, Key, false>(block, other);
}

// For scan_blocks(). Codes stay where they are in their bytes, so that the sums of place p are 2^(Bits * p) too large.
template <class Tiles>
struct TileDots {
  template <int Bits, int G>
  static void logits(const ScanBlock& block, std::int64_t head, const unsigned char* codes, Ahead ahead, float* out,
                     std::int64_t out_stride) {
    constexpr int kPlaces = 8 / Bits;
    const std::int64_t d = block.head_dim, steps = (d + kTileBytes - 1) / kTileBytes;
    alignas(64) std::int8_t weights[kSketchHeads][kMaxSketchDim];
    Folded folded[G];
    fold<G>(block.query + head * d, codes + sketch_code_bytes(Bits, d), d, 0.5f * ((1 << Bits) - 1), ahead, weights,
            folded);

    // Row `quad` % 16 of a step has four channels of 16 tokens.
    alignas(64) std::uint8_t bytes[4][kMaxDim / kTileBytes][kTileRows][kTileBytes];
    for (std::int64_t quad = 0; quad < kTileRows * steps; ++quad) {
      const bool is_there = 4 * quad < d;
#pragma GCC unroll 2
      for (int vector = 0; vector < Bits / 2; ++vector) {
        const unsigned char* from = codes + 64 * (Bits / 2 * quad + vector);
        if (is_there) prefetch(from, ahead);
        const __m512i packed = is_there ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int place = 0; place < kPlaces; ++place) {
          const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << Bits) - 1) << (Bits * place)));
          _mm512_store_si512(bytes[kPlaces * vector + place][quad / kTileRows][quad % kTileRows],
                             _mm512_and_si512(packed, mask));
        }
      }
    }

    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (std::int64_t s = 0; s < steps; ++s) {
      Tiles::template load<4>(weights[0] + kTileBytes * s, kMaxSketchDim);
      Tiles::template load<5>(bytes[0][s], kTileBytes);
      Tiles::template add_codes<0, 4, 5>();
      Tiles::template load<6>(bytes[1][s], kTileBytes);
      Tiles::template add_codes<1, 4, 6>();
      Tiles::template load<5>(bytes[2][s], kTileBytes);
      Tiles::template add_codes<2, 4, 5>();
      Tiles::template load<6>(bytes[3][s], kTileBytes);
      Tiles::template add_codes<3, 4, 6>();
    }
    alignas(64) std::int32_t sums[4][kSketchHeads][16];
    Tiles::template store<0>(sums[0], kTileBytes);
    Tiles::template store<1>(sums[1], kTileBytes);
    Tiles::template store<2>(sums[2], kTileBytes);
    Tiles::template store<3>(sums[3], kTileBytes);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        write_tokens<Bits, G>(_mm512_load_si512(sums[t][g]), Bits * (t % kPlaces), folded[g], block.shifts[head + g],
                              block.scale, out + g * out_stride + 16 * t, out_stride);
      }
    }
  }
};

template <class Tiles, int Bits>
void scan_sketch(const ScanBlock& block) {
  if (block.group == 1 || block.head_dim > kMaxDim) {
    return kAvx512Vnni.scan[static_cast<int>(Bits == 4 ? KeyType::Int4 : KeyType::Int2)](block);
  }
  const std::int64_t passes = (block.group + kSketchHeads - 1) / kSketchHeads;
  Tiles::configure(static_cast<int>((block.group + passes - 1) / passes));  // rows of the largest pass
  scan_blocks<Bits, TileDots<Tiles>>(block);
  Tiles::release();
}

constexpr std::int64_t kStrip = 128;  // tokens whose values lie interleaved in L1
constexpr std::int64_t kBand = 32;    // of them that one product takes
constexpr int kColumns = 4;           // tiles of 16 channels at a time, of sums

// Values of `n` tokens of a band, then zeros: row `pair` has 2 * pair and 2 * pair + 1, of 32 channels first the low
// halves of every 8, then the high ones.
template <bool Listed>
inline void interleave(const WeighBlock& block, std::int64_t first, std::int64_t n, std::uint16_t* to) {
  const std::int64_t d = block.head_dim;
  const auto* values = static_cast<const std::uint16_t*>(block.values);
  const auto row_of = [&](std::int64_t j) {
    return values + (Listed ? std::int64_t{block.list[j]} : j) * block.value_stride;
  };
  const std::int64_t later = Listed ? listed_ahead(2 * d) : 0;
  const Ahead ahead =
      Listed ? Ahead{} : bytes_ahead(block.values, block.next, block.rows, 2 * block.value_stride, first + kBand, kBand);
  for (std::int64_t pair = 0; pair < kBand / 2; ++pair, to += 2 * d) {
    const std::int64_t j = first + 2 * pair;
    const std::uint16_t* row[2] = {2 * pair < n ? row_of(j) : nullptr, 2 * pair + 1 < n ? row_of(j + 1) : nullptr};
    for (int k = 0; k < 2; ++k) {
      if (!row[k]) continue;
      const std::uint16_t* asked = Listed && j + k + later < block.rows ? row_of(j + k + later) : row[k];
      fetch_row<Listed>(asked, 2 * d, ahead);
    }
    for (std::int64_t c = 0; c < d; c += 32) {
      const __m512i a = row[0] ? _mm512_loadu_si512(row[0] + c) : _mm512_setzero_si512();
      const __m512i b = row[1] ? _mm512_loadu_si512(row[1] + c) : _mm512_setzero_si512();
      _mm512_store_si512(to + 2 * c, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + 2 * c + 32, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Weights of up to kBand tokens from `first` on, as tile A.
inline void make_weights(const WeighBlock& block, int head, int heads, std::int64_t first, std::int64_t n,
                         std::uint8_t (*tile)[kTileBytes]) {
  const auto lanes = [n](std::int64_t at) -> __mmask16 {
    return n - at >= 16 ? 0xffff : n > at ? (1u << (n - at)) - 1 : 0;
  };
  for (int h = 0; h < heads; ++h) {
    const float* from = block.weights + (head + h) * block.weight_stride + first;
    split(_mm512_maskz_loadu_ps(lanes(0), from), _mm512_maskz_loadu_ps(lanes(16), from + 16), tile[h],
          tile[kPassHeads + h], tile[2 * kPassHeads + h]);
  }
}

// Adds to `sums`, kColumns tiles, the products of `bands` bands with the channels from `values` on.
template <class Tiles>
inline void weigh_columns(const std::uint8_t (*weights)[kTileRows][kTileBytes], const std::uint16_t* values,
                          std::int64_t d, std::int64_t bands, float (*sums)[kTileRows][16]) {
  const std::int64_t stride = 4 * d;
  Tiles::template load<0>(sums[0], kTileBytes);
  Tiles::template load<1>(sums[1], kTileBytes);
  Tiles::template load<2>(sums[2], kTileBytes);
  Tiles::template load<3>(sums[3], kTileBytes);
  for (std::int64_t band = 0; band < bands; ++band, values += kBand * d) {
    Tiles::template load<4>(weights[band], kTileBytes);
    Tiles::template load<5>(values, stride);
    Tiles::template add_bf16<0, 4, 5>();
    Tiles::template load<6>(values + 32, stride);
    Tiles::template add_bf16<1, 4, 6>();
    Tiles::template load<5>(values + 64, stride);
    Tiles::template add_bf16<2, 4, 5>();
    Tiles::template load<6>(values + 96, stride);
    Tiles::template add_bf16<3, 4, 6>();
  }
  Tiles::template store<0>(sums[0], kTileBytes);
  Tiles::template store<1>(sums[1], kTileBytes);
  Tiles::template store<2>(sums[2], kTileBytes);
  Tiles::template store<3>(sums[3], kTileBytes);
}

// Adds to `out`, a head's 32 channels, what `sums` have in the rows of its three parts.
inline void add_sums(const float (*sums)[kTileRows][16], int head, float* out) {
  __m512 of[2];  // the low halves of every 8 channels, and the high ones
  for (int i = 0; i < 2; ++i) {
    of[i] = _mm512_add_ps(_mm512_load_ps(sums[i][2 * kPassHeads + head]), _mm512_load_ps(sums[i][kPassHeads + head]));
    of[i] = _mm512_add_ps(of[i], _mm512_load_ps(sums[i][head]));
  }
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), _mm512_permutex2var_ps(of[0], first, of[1])));
  _mm512_storeu_ps(out + 16, _mm512_add_ps(_mm512_loadu_ps(out + 16), _mm512_permutex2var_ps(of[0], second, of[1])));
}

template <class Tiles, bool Listed>
void weigh_rows(const WeighBlock& block) {
  const std::int64_t d = block.head_dim;
  const Passes passes(block.group);
  alignas(64) std::uint16_t values[kStrip * kMaxDim];
  alignas(64) std::uint8_t weights[kStrip / kBand][kTileRows][kTileBytes] = {};
  alignas(64) float sums[kMaxPasses][kMaxDim / 16][kTileRows][16];
  for (int pass = 0; pass < passes.count; ++pass) __builtin_memset(sums[pass], 0, sizeof sums[0][0] * d / 16);
  Tiles::configure();
  for (std::int64_t j = 0; j < block.rows; j += kStrip) {
    const std::int64_t left = block.rows - j, bands = left < kStrip ? (left + kBand - 1) / kBand : kStrip / kBand;
    const auto tokens = [left](std::int64_t band) { return left - kBand * band < kBand ? left - kBand * band : kBand; };
    for (std::int64_t band = 0; band < bands; ++band) {
      interleave<Listed>(block, j + kBand * band, tokens(band), values + kBand * band * d);
    }
    for (int pass = 0; pass < passes.count; ++pass) {
      const int heads = passes.of(block.group, pass);
      for (std::int64_t band = 0; band < bands; ++band) {
        make_weights(block, pass * passes.heads, heads, j + kBand * band, tokens(band), weights[band]);
      }
      for (std::int64_t c = 0; c < d; c += 16 * kColumns) {
        weigh_columns<Tiles>(weights, values + 2 * c, d, bands, sums[pass] + c / 16);
      }
    }
  }
  Tiles::release();
  for (int g = 0; g < block.group; ++g) {
    for (std::int64_t c = 0; c < d; c += 32) {
      add_sums(sums[g / passes.heads] + c / 16, g % passes.heads, block.out + g * d + c);
    }
  }
}

template <class Tiles>
void weigh(const WeighBlock& block) {
  if (!fits(block.group, block.head_dim, 16 * kColumns)) {
    return kAvx512Vnni.weigh[static_cast<int>(KeyType::BFloat16)](block);
  }
  block.list ? weigh_rows<Tiles, true>(block) : weigh_rows<Tiles, false>(block);
}

struct Kernels {
  ScanFn float16, bfloat16, int8, int4, int2;
  WeighFn weigh_bfloat16;
};
template <class Tiles>
constexpr Kernels kKernels = {scan<Tiles, Float16>,  scan<Tiles, BFloat16>, scan<Tiles, Int8>,
                              scan_sketch<Tiles, 4>, scan_sketch<Tiles, 2>, weigh<Tiles>};
constexpr Kernels kOnCpu = kKernels<CpuTiles>, kEmulated = kKernels<EmulatedTiles>;

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
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 &&
         (supported >> kTileData & 1);
}

// Linux lets a process use the tiles once it has asked for that; then all its signal stacks have to be larger.
bool enable() {
  constexpr long kRequestPermission = 0x1023;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// For tests, and slow.
bool is_emulated() { return std::getenv("HYBRIDGEN_EMULATE_AMX") && kAvx512Vnni.usable(); }

IsaKernels with_tiles(const char* name, bool (*is_usable)(), bool (*enabled)(), const Kernels& own) {
  IsaKernels kernels = with_integers(kAvx512);  // which are there already
  kernels.name = name;
  kernels.usable = is_usable;
  kernels.enable = enabled;
  kernels.scan[static_cast<int>(KeyType::Float16)] = own.float16;
  kernels.scan[static_cast<int>(KeyType::BFloat16)] = own.bfloat16;
  kernels.scan[static_cast<int>(KeyType::Int8)] = own.int8;
  kernels.scan[static_cast<int>(KeyType::Int4)] = own.int4;
  kernels.scan[static_cast<int>(KeyType::Int2)] = own.int2;
  kernels.weigh[static_cast<int>(KeyType::BFloat16)] = own.weigh_bfloat16;
  return kernels;
}

}  // namespace

const IsaKernels kAmx = with_tiles("amx", usable, enable, kOnCpu);
const IsaKernels kAmxEmulated = with_tiles("amx_emulated", is_emulated, nullptr, kEmulated);

}  // namespace hybridgen

#endif  // __x86_64__
