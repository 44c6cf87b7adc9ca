// The operations of chains, bitwise NumPy's. Only for files compiled once per KERNEL_LEVEL.
#pragma once

#include "cpu/elementwise/chain.h"
#include "cpu/elementwise/fused_arithmetic.h"
#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

template <class T>
inline T square_root(T x) {
  if constexpr (sizeof(T) == 4)
    return __builtin_sqrtf(x);
  else
    return __builtin_sqrt(x);
}

template <class T>
inline T magnitude(T x) {
  if constexpr (T(0.5) == 0)
    return x < 0 ? -x : x;
  else if constexpr (sizeof(T) == 4)
    return __builtin_fabsf(x);
  else
    return __builtin_fabs(x);
}

// In loops over elements, `out` is an operand or apart from it: nothing depends on another one.
template <class R, class A, class F>
inline void map1(void* out, const void* a, std::size_t n, F f) {
  R* to = static_cast<R*>(out);
  const A* x = static_cast<const A*>(a);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) to[i] = f(x[i]);
}

template <class R, class A, class F>
inline void map2(void* out, const void* a, const void* b, std::size_t n, F f) {
  R* to = static_cast<R*>(out);
  const A *x = static_cast<const A*>(a), *y = static_cast<const A*>(b);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) to[i] = f(x[i], y[i]);
}

using Bool = std::uint8_t;

#define ALLREDUCE_LINK1(R, expression)                                           \
  return [](void* out, const void* a, const void*, const void*, std::size_t n) { \
    map1<R, T>(out, a, n, [](T x) -> R { return static_cast<R>(expression); });  \
  }
#define ALLREDUCE_LINK2(R, expression)                                                  \
  return [](void* out, const void* a, const void* b, const void*, std::size_t n) {      \
    map2<R, T>(out, a, b, n, [](T x, T y) -> R { return static_cast<R>(expression); }); \
  }

template <class T>
void choose(void* out, const void* condition, const void* a, const void* b, std::size_t n) {
  T* to = static_cast<T*>(out);
  const Bool* chosen = static_cast<const Bool*>(condition);
  const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) {
    const T one = x[i], other = y[i];  // both are read in any case, so that it is vectorised
    to[i] = chosen[i] ? one : other;
  }
}

template <class T>
ElementwiseKernel compare(ElementwiseOp op) {
  switch (op) {
    case ElementwiseOp::less:
      ALLREDUCE_LINK2(Bool, x < y);
    case ElementwiseOp::less_equal:
      ALLREDUCE_LINK2(Bool, x <= y);
    case ElementwiseOp::greater:
      ALLREDUCE_LINK2(Bool, x > y);
    case ElementwiseOp::greater_equal:
      ALLREDUCE_LINK2(Bool, x >= y);
    case ElementwiseOp::equal:
      ALLREDUCE_LINK2(Bool, x == y);
    case ElementwiseOp::not_equal:
      ALLREDUCE_LINK2(Bool, x != y);
    case ElementwiseOp::where:
      return choose<T>;
    default:
      return nullptr;
  }
}

inline ElementwiseKernel combine(ElementwiseOp op) {
  using T = Bool;  // 0 or 1
  switch (op) {
    case ElementwiseOp::logical_and:
      ALLREDUCE_LINK2(Bool, x & y);
    case ElementwiseOp::logical_or:
      ALLREDUCE_LINK2(Bool, x | y);
    case ElementwiseOp::logical_xor:
      ALLREDUCE_LINK2(Bool, x ^ y);
    case ElementwiseOp::logical_not:
      ALLREDUCE_LINK1(Bool, x ^ 1);
    default:
      return compare<T>(op);
  }
}

// Of integers and floats. Where one operand of `maximum` is NaN, it is the result.
template <class T>
ElementwiseKernel compute(ElementwiseOp op) {
  switch (op) {
    case ElementwiseOp::add:
      ALLREDUCE_LINK2(T, x + y);
    case ElementwiseOp::subtract:
      ALLREDUCE_LINK2(T, x - y);
    case ElementwiseOp::multiply:
      ALLREDUCE_LINK2(T, x * y);
    case ElementwiseOp::maximum:
      ALLREDUCE_LINK2(T, x != x ? x : (x > y ? x : y));
    case ElementwiseOp::minimum:
      ALLREDUCE_LINK2(T, x != x ? x : (x < y ? x : y));
    case ElementwiseOp::negative:
      ALLREDUCE_LINK1(T, -x);
    case ElementwiseOp::absolute:
      ALLREDUCE_LINK1(T, magnitude(x));
    case ElementwiseOp::sign:
      ALLREDUCE_LINK1(T, x > 0 ? T(1) : (x < 0 ? T(-1) : (x == 0 ? T(0) : x)));
    case ElementwiseOp::square:
      ALLREDUCE_LINK1(T, x * x);
    default:
      return compare<T>(op);
  }
}

template <class T>
ElementwiseKernel compute_floats(ElementwiseOp op) {
  switch (op) {
    case ElementwiseOp::divide:
      ALLREDUCE_LINK2(T, x / y);
    case ElementwiseOp::sqrt:
      ALLREDUCE_LINK1(T, square_root(x));
    case ElementwiseOp::relu:  // a NaN passes: it must not be hidden
      ALLREDUCE_LINK1(T, x < 0 ? T(0) : x);
    case ElementwiseOp::relu_gradient:
      ALLREDUCE_LINK2(T, y > 0 ? x : T(0));
    case ElementwiseOp::isfinite:
      ALLREDUCE_LINK1(Bool, magnitude(x) < T(__builtin_inf()));
    case ElementwiseOp::isnan:
      ALLREDUCE_LINK1(Bool, x != x);
    case ElementwiseOp::isinf:
      ALLREDUCE_LINK1(Bool, magnitude(x) == T(__builtin_inf()));
    default:
      return compute<T>(op);
  }
}

// To floats and to booleans. Casts of floats to integers are left out: values out of range depend
// on the processor.
template <class T>
ElementwiseKernel convert(Scalar to) {
  switch (to) {
    case Scalar::boolean:
      ALLREDUCE_LINK1(Bool, x != 0);
    case Scalar::float32:
      ALLREDUCE_LINK1(float, x);
    case Scalar::float64:
      ALLREDUCE_LINK1(double, x);
    default:
      return nullptr;
  }
}

#undef ALLREDUCE_LINK1
#undef ALLREDUCE_LINK2

template <class Word>
ElementwiseKernel copying() {
  return [](void* out, const void* a, const void*, const void*, std::size_t n) {
    map1<Word, Word>(out, a, n, [](Word x) { return x; });
  };
}

inline ElementwiseKernel find_copy(Scalar type) {
  if (type == Scalar::boolean) return copying<std::uint8_t>();
  const bool is_short = type == Scalar::int32 || type == Scalar::float32;
  return is_short ? copying<std::uint32_t>() : copying<std::uint64_t>();
}

inline ElementwiseKernel find_elementwise(ElementwiseOp op, Scalar in, Scalar out) {
  if (op == ElementwiseOp::copy) return in == out ? find_copy(in) : nullptr;
  const bool casts = op == ElementwiseOp::cast;
  switch (in) {
    case Scalar::boolean:
      return casts ? convert<Bool>(out) : combine(op);
    case Scalar::int32:
      return casts ? convert<std::int32_t>(out) : compute<std::int32_t>(op);
    case Scalar::int64:
      return casts ? convert<std::int64_t>(out) : compute<std::int64_t>(op);
    case Scalar::float32:
      return casts ? convert<float>(out) : compute_floats<float>(op);
    case Scalar::float64:
      return casts ? convert<double>(out) : compute_floats<double>(op);
  }
  return nullptr;
}

inline void stream(void* to, const void* from, std::size_t bytes) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  std::size_t i = bytes_to_line(target, bytes);
  __builtin_memcpy(target, source, i);
  if (bytes >= 16 * kWidth)
    for (; i + kWidth <= bytes; i += kWidth)
      stream_store(target + i, load<Vector<float>>(source + i));
  __builtin_memcpy(target + i, source + i, bytes - i);
}

constexpr ElementwiseKernels elementwise_kernels{find_elementwise, find_fused, stream, store_fence};

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
