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

template <class Step>
inline void for_each_vector(std::size_t bytes, const Step& step) {
  using V = Vector<unsigned char>;
  std::size_t i = 0;
  for (; i + kUnroll * kWidth <= bytes; i += kUnroll * kWidth)
    for (std::size_t u = 0; u < kUnroll; ++u) step(V{}, i + u * kWidth);
  for (; i + kWidth <= bytes; i += kWidth) step(V{}, i);
  for (; i < bytes; ++i) step(static_cast<unsigned char>(0), i);
}

void copy(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  for_each_vector(bytes, [=](auto zero, std::size_t i) {
    store(target + i, load<decltype(zero)>(source + i));
  });
}

void swap(void* to, void* shared, const void* next, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* middle = static_cast<unsigned char*>(shared);
  auto* source = static_cast<const unsigned char*>(next);
  if (source == nullptr)
    return for_each_vector(bytes, [=](auto zero, std::size_t i) {
      store(target + i, load<decltype(zero)>(middle + i));
      store(middle + i, zero);
    });
  for_each_vector(bytes, [=](auto zero, std::size_t i) {
    const auto value = load<decltype(zero)>(middle + i);
    store(middle + i, load<decltype(zero)>(source + i));
    store(target + i, value);
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
