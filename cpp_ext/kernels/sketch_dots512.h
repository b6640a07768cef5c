// The products of a sketch's codes in registers of 512 bits: included by avx512.cpp and avx512_vnni.cpp within their target
// regions and anonymous namespaces, after `dot(sums, codes, weights)`, which adds four products of unsigned codes and
// signed weights to each 32-bit sum, `kMostCode`, the largest code that it can take, stores512.h and sketch512.h. No
// other file may include it, hence no guard.
//
// For each quad of channels the codes are unpacked once, T registers of 16 tokens, and meet the weights of G heads:
// G * T accumulators.

// Tokens from 16 * First on, 16 * T of them, of the block at `codes`, for the G heads with these weights. `ahead`:
// to what is prefetched beside each load.
template <int Bits, int G, int T, int First>
inline __attribute__((always_inline)) void part(const unsigned char* codes, std::int64_t d,
                                                const std::int8_t (*weights)[kMaxSketchDim], const Folded* folded,
                                                const float* shifts, float scale, Ahead ahead, float* out,
                                                std::int64_t out_stride) {
  constexpr int kPlaces = 8 / Bits;
  constexpr int kLargest = (1 << Bits) - 1;
  const auto in_place = [](int t) __attribute__((always_inline)) {
    return (kLargest << (Bits * ((First + t) % kPlaces))) <= kMostCode;
  };
  __m512i sums[G][T];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[g][t] = _mm512_setzero_si512();
  }
  for (std::int64_t c = 0; c < d; c += 4) {
    const unsigned char* vectors = codes + 8 * Bits * c;
    __m512i code[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int vector = (First + t) / kPlaces;
      const int place = (First + t) % kPlaces;
      if (place == 0) prefetch(vectors + 64 * vector, ahead);
      const __m512i packed = _mm512_loadu_si512(vectors + 64 * vector);
      // A code may stay where it is in its byte: its sums are then a power of two larger.
      code[t] = in_place(t) ? _mm512_and_si512(packed, _mm512_set1_epi8(static_cast<char>(kLargest << (Bits * place))))
                            : _mm512_and_si512(_mm512_srli_epi16(packed, Bits * place), _mm512_set1_epi8(kLargest));
      asm("" : "+v"(code[t]));  // one unpacking, not one for each head
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      std::int32_t four;
      __builtin_memcpy(&four, weights[g] + c, sizeof four);
      const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[g][t] = dot(sums[g][t], code[t], weight);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      write_tokens<Bits, G>(sums[g][t], in_place(t) ? Bits * ((First + t) % kPlaces) : 0, folded[g], shifts[g], scale,
                            out + g * out_stride + 16 * (First + t), out_stride);
    }
  }
}

struct Registers {
  template <int Bits, int G>
  static void logits(const ScanBlock& block, std::int64_t head, const unsigned char* codes, Ahead ahead, float* out,
                     std::int64_t out_stride) {
    const std::int64_t d = block.head_dim;
    alignas(64) std::int8_t weights[G][kMaxSketchDim];
    Folded folded[G];
    fold<G>(block.query + head * d, codes + sketch_code_bytes(Bits, d), d, 0.5f * ((1 << Bits) - 1), ahead, weights,
            folded);
    const float* shifts = block.shifts + head;
    if constexpr (G <= 5) {
      part<Bits, G, 4, 0>(codes, d, weights, folded, shifts, block.scale, ahead, out, out_stride);
    } else {  // all would not fit the registers
      part<Bits, G, 2, 0>(codes, d, weights, folded, shifts, block.scale, ahead, out, out_stride);
      part<Bits, G, 2, 2>(codes, d, weights, folded, shifts, block.scale, ahead, out, out_stride);
    }
  }
};

template <int Bits>
void scan_sketch(const ScanBlock& block) {
  scan_blocks<Bits, Registers>(block);
}
