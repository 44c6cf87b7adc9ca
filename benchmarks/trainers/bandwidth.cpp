// Reads one array of float32 and writes another: the lower bound of a chain of operations.

#include <cstddef>
#include <cstdint>
#if defined(__AVX__)
#include <immintrin.h>
#endif

extern "C" void read_and_write(const float* x, float* out, std::size_t count, int streams) {
  std::size_t i = 0;
#if defined(__AVX__)
  if (streams) {
    for (; i < count && reinterpret_cast<std::uintptr_t>(out + i) % 32; ++i) out[i] = x[i] + 1;
    const __m256 one = _mm256_set1_ps(1);
    for (; i + 8 <= count; i += 8) {
      _mm256_stream_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(x + i), one));
    }
    _mm_sfence();
  }
#endif
  for (; i < count; ++i) out[i] = x[i] + 1;
}
