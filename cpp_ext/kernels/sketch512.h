// Scans of sketches in registers of 512 bits, for avx512.cpp and avx512_vnni.cpp: included by each within its target
// region and its anonymous namespace, after `dot(sums, codes, weights)`, which adds four products of unsigned codes and
// signed weights to each 32-bit sum, `kMostCode`, the largest code that it can take, and stores512.h. No other file may
// include it, hence no guard.
//
// A block is 64 tokens x head_dim channels, 2.5 KiB for int2 and 128 channels. First the query is folded into the
// block's scales and zeros for each head; then for each quad of channels the codes are unpacked once, T registers of 16
// tokens, and meet the weights of G heads: G * T accumulators.

constexpr int kPassHeads = 8;  // heads that share an unpacked code

struct Folded {
  float step;
  float base;
};

// scalar.cpp's `fold` is the definition. sum_c query * zero + middle * (weight - step * rounded) is taken apart, so
// that what is the same for all heads is computed once and the rest costs few instructions: with one head, a third of a
// block's time goes here. `ahead`: as in `part`.
template <int G>
inline __attribute__((always_inline)) void fold(const float* query, const unsigned char* scales, std::int64_t d,
                                                float middle, Ahead ahead,
                                                std::int8_t (*weights)[kMaxSketchDim], Folded* folded) {
  __m512 largest[G], base[G];
  __m512i total[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    largest[g] = base[g] = _mm512_setzero_ps();
    total[g] = _mm512_setzero_si512();
  }
  // head_dim is a multiple of 8: half a register may be left.
  const auto lanes = [d](std::int64_t c) __attribute__((always_inline)) -> __mmask16 {
    return d - c >= 16 ? 0xffff : 0xff;
  };
  for (std::int64_t c = 0; c < d; c += 16) {
    const __mmask16 mask = lanes(c);
    prefetch(scales + 4 * c, ahead);
    const __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + 2 * c));
    const __m512 zero = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + 2 * (d + c)));
    const __m512 centre = _mm512_fmadd_ps(_mm512_set1_ps(middle), scale, zero);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const __m512 q = _mm512_maskz_loadu_ps(mask, query + g * d + c);
      largest[g] = _mm512_range_ps(largest[g], _mm512_mul_ps(q, scale), 0xb);  // the larger of their sizes
      base[g] = _mm512_fmadd_ps(q, centre, base[g]);
    }
  }
  __m512 inverse[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const float most = _mm512_reduce_max_ps(largest[g]);
    folded[g].step = most / 127.0f;
    inverse[g] = _mm512_set1_ps(most > 1e-30f ? 127.0f / most : 0.0f);
  }
  for (std::int64_t c = 0; c < d; c += 16) {
    const __mmask16 mask = lanes(c);
    const __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + 2 * c));
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const __m512 weight = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, query + g * d + c), scale);
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(weight, inverse[g]));
      total[g] = _mm512_add_epi32(total[g], rounded);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights[g] + c), _mm512_cvtsepi32_epi8(rounded));
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const __m512 step = _mm512_set1_ps(middle * folded[g].step);
    folded[g].base = _mm512_reduce_add_ps(_mm512_fnmadd_ps(step, _mm512_cvtepi32_ps(total[g]), base[g]));
  }
}

// Not where a block's logits are many beside its bytes: they would hold the buffers that its bytes come through.
template <int Bits, int G>
constexpr bool kStreamed = 16 * G <= 8 * Bits;

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
    const __m512 base = _mm512_set1_ps(scale * (folded[g].base + shifts[g]));
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const float size = in_place(t) ? 1.0f / static_cast<float>(1 << (Bits * ((First + t) % kPlaces))) : 1.0f;
      const __m512 step = _mm512_set1_ps(scale * folded[g].step * size);
      const __m512 logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[g][t]), step, base);
      float* to = out + g * out_stride + 16 * (First + t);
      if (kStreamed<Bits, G>) {
        store_line(to, logits, out_stride);
      } else {
        _mm512_storeu_ps(to, logits);
      }
    }
  }
}

// All 64 tokens of the block at `codes` for the G heads from `head` on: out[g * out_stride + j].
template <int Bits, int G>
void block_logits(const ScanBlock& block, std::int64_t head, const unsigned char* codes, Ahead ahead, float* out,
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

// Asks for a whole block: nothing but the list says where it is.
inline void fetch_block(const unsigned char* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
  _mm_prefetch(at + bytes - 1, _MM_HINT_T0);
}

template <int Bits>
void scan_sketch(const ScanBlock& block) {
  using Logits = void (*)(const ScanBlock&, std::int64_t, const unsigned char*, Ahead, float*, std::int64_t);
  static constexpr Logits kLogits[kPassHeads + 1] = {
      nullptr,
      block_logits<Bits, 1>, block_logits<Bits, 2>, block_logits<Bits, 3>, block_logits<Bits, 4>,
      block_logits<Bits, 5>, block_logits<Bits, 6>, block_logits<Bits, 7>, block_logits<Bits, 8>};
  const auto* blocks = static_cast<const unsigned char*>(block.keys);
  const std::int64_t bytes = sketch_bytes(Bits, block.head_dim);
  const std::int64_t passes = (block.group + kPassHeads - 1) / kPassHeads;
  const std::int64_t heads = (block.group + passes - 1) / passes;

  std::int64_t j = 0;
  while (j < block.rows) {
    // Rows j to end - 1 are of one block.
    const std::int64_t at = (block.list ? std::int64_t{block.list[j]} : j) / kSketchTokens;
    std::int64_t end = j + 1;
    Ahead ahead{};
    if (block.list) {
      while (end < block.rows && block.list[end] / kSketchTokens == at) ++end;
      if (end < block.rows) fetch_block(blocks + block.list[end] / kSketchTokens * block.key_stride, bytes);
    } else {
      end = j + kSketchTokens < block.rows ? j + kSketchTokens : block.rows;
      ahead = bytes_ahead(block, block.rows / kSketchTokens, block.key_stride, at + 1, 1);
    }
    const unsigned char* codes = blocks + at * block.key_stride;
    for (std::int64_t g = 0; g < block.group; g += heads) {
      const std::int64_t n = block.group - g < heads ? block.group - g : heads;
      float* out = block.out + g * block.out_stride + j;
      if (!block.list && end - j == kSketchTokens) {
        kLogits[n](block, g, codes, ahead, out, block.out_stride);
        continue;
      }
      alignas(64) float all[kPassHeads * kSketchTokens];
      kLogits[n](block, g, codes, ahead, all, kSketchTokens);
      for (std::int64_t i = j; i < end; ++i) {
        const std::int64_t token = (block.list ? std::int64_t{block.list[i]} : i) % kSketchTokens;
        for (std::int64_t h = 0; h < n; ++h) out[h * block.out_stride + i - j] = all[h * kSketchTokens + token];
      }
    }
    j = end;
  }
  finish_stores();
}
