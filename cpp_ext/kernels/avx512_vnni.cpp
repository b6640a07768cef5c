// AVX-512 VNNI: one instruction adds four products of a code and a weight to a 32-bit sum, which AVX-512 alone does in
// three. Only sketches gain; everything else is avx512.cpp's.
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

constexpr ScanFn kInt4 = scan_sketch<4>;
constexpr ScanFn kInt2 = scan_sketch<2>;

}  // namespace
}  // namespace hybridgen

#pragma GCC pop_options

namespace hybridgen {
namespace {

bool usable() { return kAvx512.usable() && __builtin_cpu_supports("avx512vnni"); }

IsaKernels with_sketches(IsaKernels kernels) {
  kernels.name = "avx512_vnni";
  kernels.usable = usable;
  kernels.scan[static_cast<int>(KeyType::Int4)] = kInt4;
  kernels.scan[static_cast<int>(KeyType::Int2)] = kInt2;
  return kernels;
}

}  // namespace

const IsaKernels kAvx512Vnni = with_sketches(kAvx512);  // which is a constant, so it is there already

}  // namespace hybridgen

#endif  // __x86_64__
