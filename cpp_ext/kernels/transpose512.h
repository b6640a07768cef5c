// Quarters of four registers of 512 bits, for avx512.cpp and amx.cpp: included by each within its target region and its
// anonymous namespace. No other file may include it, hence no guard.

// Quarter i of v[j] goes to quarter j of v[i].
inline void transpose_quarters(__m512* v) {
  const __m512 low01 = _mm512_shuffle_f32x4(v[0], v[1], 0x44), high01 = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const __m512 low23 = _mm512_shuffle_f32x4(v[2], v[3], 0x44), high23 = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
  v[1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
  v[2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
  v[3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
}
