// What reductions are to give, by plain arithmetic on one element at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// A 16-bit float as IEEE 754 describes it: a sign, `kExponent` bits, `kMantissa` bits.
template <int kExponent, int kMantissa>
struct Short {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kInfinity = ((1 << kExponent) - 1) << kMantissa;
  std::uint16_t word = 0;

  Short() = default;
  bool nan() const { return (word & 0x7fff) > kInfinity; }
  static constexpr int kQuiet = 1 << (kMantissa - 1);

  explicit operator float() const {
    const int exponent = (word & 0x7fff) >> kMantissa, mantissa = word & ((1 << kMantissa) - 1);
    double size;
    if (nan())
      size = NAN;
    else if ((word & 0x7fff) == kInfinity)
      size = INFINITY;
    else if (exponent == 0)
      size = std::ldexp(mantissa, 1 - kBias - kMantissa);
    else
      size = std::ldexp(mantissa + (1 << kMantissa), exponent - kBias - kMantissa);
    return static_cast<float>(std::copysign(size, word & 0x8000 ? -1.0 : 1.0));
  }
  // The nearest one; of two, the even one.
  explicit Short(float value) {
    const double size = std::fabs(static_cast<double>(value));
    int bits;
    if (std::isnan(value)) {
      bits = kInfinity | kQuiet;
    } else if (std::isinf(value)) {
      bits = kInfinity;
    } else {
      const int exponent = size == 0 ? 1 - kBias : std::max(std::ilogb(size), 1 - kBias);
      // In units of the last place; the implied one carries into the exponent, as a carry does.
      const double units = std::nearbyint(std::ldexp(size, kMantissa - exponent));
      bits = static_cast<int>(units) + ((exponent + kBias - 1) << kMantissa);
      bits = std::min(bits, kInfinity);
    }
    word = static_cast<std::uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
  }
};
using Half = Short<5, 10>;
using Brain = Short<8, 7>;

template <class T>
constexpr bool is_short = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;
// What a bool array holds; std::vector<bool> has no bytes.
struct Bool {
  unsigned char word = 0;
};

template <class T>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<std::complex<T>> = true;
template <class T>
constexpr bool is_real = is_short<T> || std::is_floating_point_v<T>;

template <class T>
bool nan(T value) {
  if constexpr (is_complex<T>)
    return nan(value.real()) || nan(value.imag());
  else if constexpr (is_short<T>)
    return value.nan();
  else if constexpr (std::is_floating_point_v<T>)
    return std::isnan(value);
  else
    return false;
}

// Whether the types go together.
template <class T>
bool makes_sense(Op op) {
  const bool boolean = std::is_same_v<T, Bool>;
  switch (op) {
    case Op::sum:
      return !boolean;
    case Op::mean:
      return is_real<T> || is_complex<T>;
    case Op::min:
    case Op::max:
    case Op::prod:
      return !boolean && !is_complex<T>;
    case Op::logical_and:
    case Op::logical_or:
      return !is_complex<T>;
    case Op::bitwise_and:
    case Op::bitwise_or:
    case Op::bitwise_xor:
      return std::is_integral_v<T> || boolean;
    case Op::none:
      return false;
  }
  return false;
}

// One step for floating-point values.
template <class A>
A combine(Op op, A a, A b) {
  if constexpr (!is_complex<A>) {
    if (op == Op::min) return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? a : b;
    if (op == Op::max) return std::isnan(a) ? a : std::isnan(b) ? b : a > b ? a : b;
    if (op == Op::prod) return a * b;
    if (op == Op::logical_and) return static_cast<A>(a != 0 && b != 0);
    if (op == Op::logical_or) return static_cast<A>(a != 0 || b != 0);
  }
  return a + b;
}

// One step for integers: in 128 bits, and then cut.
template <class T>
T combine_whole(Op op, T first, T second) {
  const __int128 a = first, b = second;
  const unsigned __int128 product =
      static_cast<unsigned __int128>(a) * static_cast<unsigned __int128>(b);
  switch (op) {
    case Op::min:
      return static_cast<T>(std::min(a, b));
    case Op::max:
      return static_cast<T>(std::max(a, b));
    case Op::prod:
      return static_cast<T>(product);
    case Op::logical_and:
      return static_cast<T>(a != 0 && b != 0);
    case Op::logical_or:
      return static_cast<T>(a != 0 || b != 0);
    case Op::bitwise_and:
      return static_cast<T>(a & b);
    case Op::bitwise_or:
      return static_cast<T>(a | b);
    case Op::bitwise_xor:
      return static_cast<T>(a ^ b);
    default:
      return static_cast<T>(a + b);
  }
}

// What the elements at one place of all inputs are to become.
template <class T>
T expected(Op op, const std::vector<T>& values) {
  const bool logical = op == Op::logical_and || op == Op::logical_or;
  if constexpr (std::is_same_v<T, Bool>) {
    std::vector<unsigned char> words;
    for (Bool value : values) words.push_back(value.word);
    return {expected(op, words)};
  } else if constexpr (std::is_integral_v<T>) {
    T result = values[0];
    for (std::size_t k = 1; k < values.size(); ++k) result = combine_whole(op, result, values[k]);
    return logical ? static_cast<T>(result != 0) : result;
  } else {
    using A = std::conditional_t<is_short<T>, float, T>;
    A result = static_cast<A>(values[0]);
    for (std::size_t k = 1; k < values.size(); ++k)
      result = combine(op, result, static_cast<A>(values[k]));
    if constexpr (is_complex<T>) {
      const auto n = static_cast<typename T::value_type>(values.size());
      return op == Op::mean ? T(result.real() / n, result.imag() / n) : result;
    } else {
      if (op == Op::mean) result /= static_cast<A>(values.size());
      return T(logical ? static_cast<A>(result != 0) : result);
    }
  }
}

// Equal in all bits, or both NaN.
template <class T>
bool same(T a, T b) {
  if constexpr (is_complex<T>)
    return same(a.real(), b.real()) && same(a.imag(), b.imag());
  else
    return nan(a) ? nan(b) : std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace allreduce
