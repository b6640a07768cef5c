// Scans of sketches, as far as they are the same with registers of 512 bits and with tiles: included by avx512.cpp,
// avx512_vnni.cpp and amx.cpp within their target regions and anonymous namespaces. No other file may include it, hence
// no guard.
//
// A block is 64 tokens x head_dim channels, 2.5 KiB for int2 and 128 channels. First the query is folded into the
// block's scales and zeros for each head; then the codes meet the weights, which sketch_dots512.h and amx.cpp say how.

constexpr int kSketchHeads = 8;  // heads that share an unpacked code

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

// 16 tokens of a head, whose sums are 2^places too large.
template <int Bits, int G>
inline __attribute__((always_inline)) void write_tokens(__m512i sums, int places, const Folded& folded, float shift,
                                                        float scale, float* out, std::int64_t out_stride) {
  const __m512 base = _mm512_set1_ps(scale * (folded.base + shift));
  const __m512 step = _mm512_set1_ps(scale * folded.step * (1.0f / static_cast<float>(1 << places)));
  const __m512 logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), step, base);
  if (kStreamed<Bits, G>) {
    store_line(out, logits, out_stride);
  } else {
    _mm512_storeu_ps(out, logits);
  }
}

// Asks for a whole block: nothing but the list says where it is.
inline void fetch_block(const unsigned char* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
  _mm_prefetch(at + bytes - 1, _MM_HINT_T0);
}

// Dots::logits<Bits, G>(block, head, codes, ahead, out, out_stride): of all 64 tokens of the block at `codes` for the G
// heads from `head` on, out[g * out_stride + j].
template <int Bits, class Dots>
void scan_blocks(const ScanBlock& block) {
  using Logits = void (*)(const ScanBlock&, std::int64_t, const unsigned char*, Ahead, float*, std::int64_t);
  static constexpr Logits kLogits[kSketchHeads + 1] = {
      nullptr,
      Dots::template logits<Bits, 1>, Dots::template logits<Bits, 2>, Dots::template logits<Bits, 3>,
      Dots::template logits<Bits, 4>, Dots::template logits<Bits, 5>, Dots::template logits<Bits, 6>,
      Dots::template logits<Bits, 7>, Dots::template logits<Bits, 8>};
  const auto* blocks = static_cast<const unsigned char*>(block.keys);
  const std::int64_t bytes = sketch_bytes(Bits, block.head_dim);
  const std::int64_t passes = (block.group + kSketchHeads - 1) / kSketchHeads;
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
      alignas(64) float all[kSketchHeads * kSketchTokens];
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
