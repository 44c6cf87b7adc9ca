// Vectors of one instruction set. Only for files compiled once per KERNEL_LEVEL: no template of the
// standard library may be used here, or the linker could keep the AVX-512 copy for everyone.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allreduce::KERNEL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 64;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 32;
#else
constexpr std::size_t kWidth = 16;
#endif
constexpr std::size_t kLine = 64;  // bytes of a cache line
// Vectors per step: hides the latency of an add and leaves registers for the inputs.
constexpr std::size_t kUnroll = 4;

template <class T, std::size_t Bytes>
struct Lanes {
  typedef T Type __attribute__((vector_size(Bytes)));
};
// Lanes of type T. Also of a single one: such a value is not promoted to int as a scalar is, and so
// wraps in its own width.
template <class T, std::size_t Bytes = kWidth>
using Vector = typename Lanes<T, Bytes>::Type;

template <class V>
inline V load(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

// How many of `bytes` bytes come before the next whole cache line, or vector where that is shorter;
// 0 where there are too few for it to be worth it.
inline std::size_t bytes_to_line(const void* from, std::size_t bytes) {
  return bytes < 16 * kWidth ? 0 : -reinterpret_cast<std::uintptr_t>(from) % kWidth;
}

// The same bits as lanes of another type.
template <class To, class V>
inline To bits(V value) {
  static_assert(sizeof(To) == sizeof(V));
  return reinterpret_cast<To>(value);
}

// Stores a whole aligned vector past the caches.
template <class V>
inline void stream_store(void* to, V value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret_cast<__m512i>(value));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
#elif defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(to), reinterpret_cast<__m128i>(value));
#else
  store(to, value);
#endif
}

// Orders streaming stores before the store of the word that hands them over. Elsewhere they are
// ordinary ones, which that word's own release orders.
inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
