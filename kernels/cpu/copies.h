// Copies in vectors. Only for files compiled once per KERNEL_LEVEL.
#pragma once

#include "vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

void stream_copy(void* to, const void* from, std::size_t bytes) {
  using V = Vector<unsigned char>;
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kWidth;
  if (head > bytes) head = bytes;
  __builtin_memcpy(target, source, head);
  std::size_t i = head;
  for (; i + kWidth <= bytes; i += kWidth) stream_store(target + i, load<V>(source + i));
  __builtin_memcpy(target + i, source + i, bytes - i);
  store_fence();
}

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
};

// Steps through `bytes` bytes, from `aligned` + i on in whole cache lines where that is worth it.
template <class Step>
inline void for_each_vector(const void* aligned, std::size_t bytes, const Step& step) {
  using V = Vector<unsigned char>;
  using Byte = Vectors<unsigned char, 1>;
  std::size_t i = 0;
  for (const std::size_t head = bytes_to_line(aligned, bytes); i < head; ++i) step(Byte{}, i);
  for (; i + kUnroll * kWidth <= bytes; i += kUnroll * kWidth) step(Vectors<V, kUnroll>{}, i);
  for (; i + kWidth <= bytes; i += kWidth) step(Vectors<V, 1>{}, i);
  for (; i < bytes; ++i) step(Byte{}, i);
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

// As swap() with nothing to put in, and past the caches where it copies to.
void stream_take(void* to, void* shared, std::size_t bytes) {
  using V = Vector<unsigned char>;
  auto* target = static_cast<unsigned char*>(to);
  auto* middle = static_cast<unsigned char*>(shared);
  std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kWidth;
  if (head > bytes) head = bytes;
  swap(target, middle, nullptr, head);
  std::size_t i = head;
  for (; i + kWidth <= bytes; i += kWidth) {
    stream_store(target + i, load<V>(middle + i));
    store(middle + i, V{});
  }
  swap(target + i, middle + i, nullptr, bytes - i);
  store_fence();
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
