// Copies in vectors. Only for files compiled once per KERNEL_LEVEL.
#pragma once

#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// Vectors that are moved together: all are loaded before the first is stored.
template <class V, std::size_t Times>
struct Vectors {
  V values[Times];

  static Vectors load_from(const unsigned char* from) {
    Vectors loaded;
    for (std::size_t u = 0; u < Times; ++u) loaded.values[u] = load<V>(from + u * sizeof(V));
    return loaded;
  }
  void store_to(unsigned char* to) const {
    for (std::size_t u = 0; u < Times; ++u) store(to + u * sizeof(V), values[u]);
  }
  // Past the caches where these are whole vectors, to aligned ones.
  void stream_to(unsigned char* to) const {
    if constexpr (sizeof(V) == kWidth)
      for (std::size_t u = 0; u < Times; ++u) stream_store(to + u * sizeof(V), values[u]);
    else
      store_to(to);
  }
};

using Byte = Vectors<unsigned char, 1>;
using Line = Vectors<Vector<unsigned char>, kLine / kWidth>;

// Steps through `bytes` bytes, from `aligned` + i on in whole cache lines where that is worth it.
template <class Step>
inline void for_each_vector(const void* aligned, std::size_t bytes, const Step& step) {
  using V = Vector<unsigned char>;
  std::size_t i = 0;
  for (const std::size_t head = bytes_to_line(aligned, bytes); i < head; ++i) step(Byte{}, i);
  for (; i + kUnroll * kWidth <= bytes; i += kUnroll * kWidth) step(Vectors<V, kUnroll>{}, i);
  for (; i + kWidth <= bytes; i += kWidth) step(Vectors<V, 1>{}, i);
  for (; i < bytes; ++i) step(Byte{}, i);
}

// Steps through `bytes` bytes, in whole lines of `aligned`, which stores past the caches fill at
// once.
template <class Step>
inline void for_each_line(const void* aligned, std::size_t bytes, const Step& step) {
  std::size_t i = 0, head = -reinterpret_cast<std::uintptr_t>(aligned) % kLine;
  if (head > bytes) head = bytes;
  for (; i < head; ++i) step(Byte{}, i);
  for (; i + kLine <= bytes; i += kLine) step(Line{}, i);
  for (; i < bytes; ++i) step(Byte{}, i);
  store_fence();
}

void copy(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  for_each_vector(to, bytes, [=](auto zeros, std::size_t i) {
    decltype(zeros)::load_from(source + i).store_to(target + i);
  });
}

void swap(void* to, void* shared, const void* next, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* middle = static_cast<unsigned char*>(shared);
  auto* source = static_cast<const unsigned char*>(next);
  if (source == nullptr)
    return for_each_vector(shared, bytes, [=](auto zeros, std::size_t i) {
      const auto values = decltype(zeros)::load_from(middle + i);
      zeros.store_to(middle + i);
      values.store_to(target + i);
    });
  for_each_vector(shared, bytes, [=](auto zeros, std::size_t i) {
    const auto values = decltype(zeros)::load_from(middle + i);
    decltype(zeros)::load_from(source + i).store_to(middle + i);
    values.store_to(target + i);
  });
}

void stream_copy(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  for_each_line(to, bytes, [=](auto zeros, std::size_t i) {
    decltype(zeros)::load_from(source + i).stream_to(target + i);
  });
}

void stream_swap(void* to, void* shared, const void* next, void* kept, const void* own,
                 std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* middle = static_cast<unsigned char*>(shared);
  auto* source = static_cast<const unsigned char*>(next);
  if (source == nullptr)
    return for_each_line(to, bytes, [=](auto zeros, std::size_t i) {
      const auto values = decltype(zeros)::load_from(middle + i);
      zeros.store_to(middle + i);
      values.stream_to(target + i);
    });
  const auto step = [=](auto zeros, std::size_t i) {
    const auto values = decltype(zeros)::load_from(middle + i);
    decltype(zeros)::load_from(source + i).store_to(middle + i);
    values.stream_to(target + i);
  };
  if (own == nullptr) return for_each_line(to, bytes, step);
  auto* beside = static_cast<unsigned char*>(kept);
  auto* mine = static_cast<const unsigned char*>(own);
  for_each_line(to, bytes, [=](auto zeros, std::size_t i) {
    step(zeros, i);
    decltype(zeros)::load_from(mine + i).stream_to(beside + i);
  });
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
