// Two operations of a chain at once, with the bits that NumPy's have one after the other. Only for
// files compiled once per KERNEL_LEVEL.
#pragma once

#include <cstddef>

#include "chain.h"
#include "vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// A tile is read and written less often. Against one at a time, 10⁷ floats and 8 operations take a
// third less.
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

// A number that is repeated is kept in a register: eight of them, as tiles, leave a level-1 cache
// no room for what is worked on.
template <class T, class First, class Second, bool IsRight, bool RepeatsB, bool RepeatsC>
void both(void* out, const void* a, const void* b, const void* c, std::size_t n, bool streams) {
  using V = Vector<T>;
  constexpr std::size_t lanes = sizeof(V) / sizeof(T);
  T* to = static_cast<T*>(out);
  const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  const T* z = static_cast<const T*>(c);
  const V repeated_y = (n ? y[0] : T(0)) - V{}, repeated_z = (n ? z[0] : T(0)) - V{};
  const auto made = [&](std::size_t i) {
    const V first = First::of(load<V>(x + i), RepeatsB ? repeated_y : load<V>(y + i));
    const V other = RepeatsC ? repeated_z : load<V>(z + i);
    return IsRight ? Second::of(other, first) : Second::of(first, other);
  };
  std::size_t i = 0;
  if (streams)
    for (; i + lanes <= n; i += lanes) stream_store(to + i, made(i));
  else
    for (; i + lanes <= n; i += lanes) store(to + i, made(i));
  for (; i < n; ++i) {
    const T first = First::of(x[i], y[RepeatsB ? 0 : i]), other = z[RepeatsC ? 0 : i];
    to[i] = IsRight ? Second::of(other, first) : Second::of(first, other);
  }
}

template <class T, class First, class Second, bool IsRight>
PairKernel pair_reading(bool repeats_b, bool repeats_c) {
  if (repeats_b)
    return repeats_c ? both<T, First, Second, IsRight, true, true>
                     : both<T, First, Second, IsRight, true, false>;
  return repeats_c ? both<T, First, Second, IsRight, false, true>
                   : both<T, First, Second, IsRight, false, false>;
}

template <class T, class First, class Second>
PairKernel pair_in_order(bool is_right, bool repeats_b, bool repeats_c) {
  return is_right ? pair_reading<T, First, Second, true>(repeats_b, repeats_c)
                  : pair_reading<T, First, Second, false>(repeats_b, repeats_c);
}

template <class T, class First>
PairKernel pair_behind(LinkOp second, bool is_right, bool repeats_b, bool repeats_c) {
  switch (second) {
    case LinkOp::add:
      return pair_in_order<T, First, Add>(is_right, repeats_b, repeats_c);
    case LinkOp::subtract:
      return pair_in_order<T, First, Subtract>(is_right, repeats_b, repeats_c);
    case LinkOp::multiply:
      return pair_in_order<T, First, Multiply>(is_right, repeats_b, repeats_c);
    case LinkOp::divide:
      return pair_in_order<T, First, Divide>(is_right, repeats_b, repeats_c);
    default:
      return nullptr;
  }
}

template <class T>
PairKernel pair_of(LinkOp first, LinkOp second, bool is_right, bool repeats_b, bool repeats_c) {
  switch (first) {
    case LinkOp::add:
      return pair_behind<T, Add>(second, is_right, repeats_b, repeats_c);
    case LinkOp::subtract:
      return pair_behind<T, Subtract>(second, is_right, repeats_b, repeats_c);
    case LinkOp::multiply:
      return pair_behind<T, Multiply>(second, is_right, repeats_b, repeats_c);
    case LinkOp::divide:
      return pair_behind<T, Divide>(second, is_right, repeats_b, repeats_c);
    default:
      return nullptr;
  }
}

inline PairKernel find_pair(LinkOp first, LinkOp second, bool is_right, Scalar type, bool repeats_b,
                            bool repeats_c) {
  if (type == Scalar::float32) return pair_of<float>(first, second, is_right, repeats_b, repeats_c);
  return type == Scalar::float64 ? pair_of<double>(first, second, is_right, repeats_b, repeats_c)
                                 : nullptr;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
