// Writing logits in registers of 512 bits, for avx512.cpp, avx512_vnni.cpp and amx.cpp: included by each within its
// target region and its anonymous namespace. No other file may include it, hence no guard.

// 16 logits of a head that has `stride` of them; of buffers that are read at once it is kSketchTokens or kLinkTokens, and
// they stay in the cache. Others go past the caches where they are a whole line of memory: it is read later, by somebody
// else, and a plain store would first fetch it (5 % of a scan of int8 keys). `finish_stores` has to follow before
// anybody reads it.
inline void store_line(float* out, __m512 logits, std::int64_t stride = 0) {
  if (reinterpret_cast<std::uintptr_t>(out) % 64 == 0 && stride != kSketchTokens && stride != kLinkTokens) {
    _mm512_stream_ps(out, logits);
  } else {
    _mm512_storeu_ps(out, logits);
  }
}

inline void finish_stores() { _mm_sfence(); }
