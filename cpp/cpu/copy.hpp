// Row copies past the caches. A call that moves more than the caches hold would evict what others need and read every
// destination line before writing it; streaming stores do neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#include <emmintrin.h>
#define DEEP_MOE_STREAMING_STORES 1
#endif

namespace deep_moe::cpu {

inline constexpr std::int64_t kStreamingBytes = std::int64_t{2} << 20;  // of one call; about an L2 cache

// `bytes` a multiple of 16, `to` aligned to 16. Streaming stores are weakly ordered: the thread that made them calls
// finish_streaming() before anything that publishes the rows.
inline void copy_row(void* to, const void* from, std::int64_t bytes, bool streaming) {
#if defined(DEEP_MOE_STREAMING_STORES)
  if (streaming) {
    auto* out = static_cast<__m128i*>(to);
    const auto* in = static_cast<const __m128i*>(from);
    const std::int64_t count = bytes / 16;
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      const __m128i a = _mm_loadu_si128(in + i), b = _mm_loadu_si128(in + i + 1);
      const __m128i c = _mm_loadu_si128(in + i + 2), d = _mm_loadu_si128(in + i + 3);
      _mm_stream_si128(out + i, a);
      _mm_stream_si128(out + i + 1, b);
      _mm_stream_si128(out + i + 2, c);
      _mm_stream_si128(out + i + 3, d);
    }
    for (; i < count; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
    return;
  }
#endif
  (void)streaming;
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

inline void finish_streaming() {
#if defined(DEEP_MOE_STREAMING_STORES)
  _mm_sfence();
#endif
}

}  // namespace deep_moe::cpu
