// Several operations of a chain at once, of which each goes on with what the one before has made,
// with the bits that NumPy's have one after the other. Only for files compiled once per
// KERNEL_LEVEL.
#pragma once

#include <cstddef>

#include "chain.h"
#include "vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

struct Add {
  template <class T>
  static T of(T x, T y) {
    return x + y;
  }
};
struct Subtract {
  template <class T>
  static T of(T x, T y) {
    return x - y;
  }
};
struct Multiply {
  template <class T>
  static T of(T x, T y) {
    return x * y;
  }
};
struct Divide {
  template <class T>
  static T of(T x, T y) {
    return x / y;
  }
};

// Vectors that stay in registers from the first operation to the last: as many divisions are under
// way at once, and to choose an operation is little beside them. Eight operations on 10⁷ floats
// take 3.9 ms so (Zen 3); to copy as many past the caches takes 3.4.
constexpr std::size_t kHeld = 8;
// Bytes: as far ahead is asked for what is read, as a processor does by itself within a page only.
// Eight operations on 10⁷ floats: 4.1 instead of 4.4 ms, and on small pages 5.6 instead of 6.0.
constexpr std::size_t kAhead = 2048;

inline void fetch(const void* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(from) + kAhead + at);
}

template <class T, class Op, bool IsRight, bool Repeats, std::size_t Count>
inline void apply(Vector<T> (&held)[Count], const T* other) {
  using V = Vector<T>;
  constexpr std::size_t lanes = sizeof(V) / sizeof(T);
  const V repeated = Repeats ? *other - V{} : V{};
  for (std::size_t v = 0; v < Count; ++v) {
    const V operand = Repeats ? repeated : load<V>(other + v * lanes);
    held[v] = IsRight ? Op::of(operand, held[v]) : Op::of(held[v], operand);
  }
}

template <class T, class Op, bool IsRight, std::size_t Count>
inline void apply(Vector<T> (&held)[Count], const SpineLink& link, std::size_t at) {
  const T* other = static_cast<const T*>(link.other);
  if (link.repeats)
    apply<T, Op, IsRight, true>(held, other);
  else
    apply<T, Op, IsRight, false>(held, other + at);
}

template <class T, std::size_t Count>
inline void spine_of(T* to, const T* from, const SpineLink* links, std::size_t count,
                     std::size_t at, bool streams) {
  using V = Vector<T>;
  constexpr std::size_t lanes = sizeof(V) / sizeof(T);
  V held[Count];
  for (std::size_t v = 0; v < Count; ++v) held[v] = load<V>(from + at + v * lanes);
  for (const SpineLink* link = links; link != links + count; ++link) {
    if (link->op == LinkOp::add)
      apply<T, Add, false>(held, *link, at);
    else if (link->op == LinkOp::multiply)
      apply<T, Multiply, false>(held, *link, at);
    else if (link->op == LinkOp::subtract && !link->is_right)
      apply<T, Subtract, false>(held, *link, at);
    else if (link->op == LinkOp::subtract)
      apply<T, Subtract, true>(held, *link, at);
    else if (!link->is_right)
      apply<T, Divide, false>(held, *link, at);
    else
      apply<T, Divide, true>(held, *link, at);
  }
  for (std::size_t v = 0; v < Count; ++v) {
    if (streams)
      stream_store(to + at + v * lanes, held[v]);
    else
      store(to + at + v * lanes, held[v]);
  }
}

template <class T>
inline T scalar_of(T value, const SpineLink& link, std::size_t at) {
  const T other = static_cast<const T*>(link.other)[link.repeats ? 0 : at];
  switch (link.op) {
    case LinkOp::add:
      return value + other;
    case LinkOp::multiply:
      return value * other;
    case LinkOp::subtract:
      return link.is_right ? other - value : value - other;
    default:
      return link.is_right ? other / value : value / other;
  }
}

template <class T>
void spine(void* out, const void* x, const SpineLink* links, std::size_t count, std::size_t n,
           bool streams) {
  constexpr std::size_t lanes = sizeof(Vector<T>) / sizeof(T);
  T* to = static_cast<T*>(out);
  const T* from = static_cast<const T*>(x);
  std::size_t at = 0;
  for (; at + kHeld * lanes <= n; at += kHeld * lanes) {
    fetch(from + at, kHeld * lanes * sizeof(T));
    for (std::size_t i = 0; i < count; ++i)
      if (!links[i].repeats)
        fetch(static_cast<const T*>(links[i].other) + at, kHeld * lanes * sizeof(T));
    spine_of<T, kHeld>(to, from, links, count, at, streams);
  }
  for (; at + lanes <= n; at += lanes) spine_of<T, 1>(to, from, links, count, at, streams);
  for (; at < n; ++at) {
    T value = from[at];
    for (std::size_t i = 0; i < count; ++i) value = scalar_of(value, links[i], at);
    to[at] = value;
  }
}

inline SpineKernel find_spine(LinkOp op, Scalar type) {
  if (op != LinkOp::add && op != LinkOp::subtract && op != LinkOp::multiply && op != LinkOp::divide)
    return nullptr;
  if (type == Scalar::float32) return spine<float>;
  return type == Scalar::float64 ? spine<double> : nullptr;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
