// A query head in integers, for avx512_vnni.cpp and amx.cpp: included by each within its target region and its anonymous
// namespace. No other file may include it, hence no guard.
//
// A head is rounded once, before it meets any int8 key, to integers of 16 bits with one step a head:
//   query[c] = step * (256 * high[c] + low[c]), nearly; step = max |query| / kMostQuery; high and low are signed bytes.
// Everything up to the sum over the channels is then exact, in integers. So, beside the rounding of a few float32
// operations, a logit is off by at most
//   scale * row_scale * step / 2 * sum_c |code[c]|,
// which is 2^-16 of the largest logit that such a key could have with such a query (all channels at its maximum), where
// the codes themselves are rounded to 8 bits: 2^-8 of their largest.

constexpr float kMostQuery = 127 * 256 + 127;  // the largest number of two signed bytes
constexpr std::int64_t kLine = 64;             // int8 channels of a register

struct RoundedHead {
  float step;
  std::int32_t total;  // of all its integers
};

// high, low: [d rounded up to a multiple of 64], zeros beyond d. As for sketches, a head that is below 1e-30 everywhere is
// taken for zero.
inline RoundedHead round_head(const float* query, std::int64_t d, std::int8_t* high, std::int8_t* low) {
  const auto piece = [&](std::int64_t c) {  // head_dim is a multiple of 8: zeros beyond it
    return _mm512_maskz_loadu_ps(d - c >= 16 ? 0xffff : d > c ? 0xff : 0, query + c);
  };
  __m512i largest = _mm512_setzero_si512();  // as integers, of which a NaN's is the largest: it ends up in the step
  for (std::int64_t c = 0; c < d; c += 16) {
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(piece(c))));
  }
  const std::uint32_t bits = _mm512_reduce_max_epu32(largest);
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  const __m512 inverse = _mm512_set1_ps(most > 1e-30f ? kMostQuery / most : 0.0f);
  __m512i total = _mm512_setzero_si512();
  for (std::int64_t c = 0; c < d || c % kLine != 0; c += 16) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(piece(c), inverse));
    const __m512i lower = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
    const __m512i upper = _mm512_srai_epi32(_mm512_sub_epi32(whole, lower), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + c), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + c), _mm512_cvtepi32_epi8(lower));
    total = _mm512_add_epi32(total, whole);
  }
  return {most / kMostQuery, _mm512_reduce_add_epi32(total)};
}
