// Operations of reductions on lanes. Only for files compiled once per KERNEL_LEVEL.
#pragma once

namespace allreduce::KERNEL_LEVEL {
namespace {

// Operators: how two values become one, in lanes of any type.
constexpr auto Sum = [](auto a, auto b) { return a + b; };
constexpr auto Prod = [](auto a, auto b) { return a * b; };
// A NaN on either side wins, as in numpy.minimum.
constexpr auto Min = [](auto a, auto b) { return a != a ? a : (a < b ? a : b); };
constexpr auto Max = [](auto a, auto b) { return a != a ? a : (a > b ? a : b); };
// True or false, to be made 1 or 0 by Truth.
constexpr auto Both = [](auto a, auto b) { return a != decltype(a){} ? b : a; };
constexpr auto Either = [](auto a, auto b) { return a != decltype(a){} ? a : b; };
constexpr auto And = [](auto a, auto b) { return a & b; };
constexpr auto Or = [](auto a, auto b) { return a | b; };
constexpr auto Xor = [](auto a, auto b) { return a ^ b; };

// Final steps, applied to the folded value: all are made with a divisor.
// --------------------------------------------------

template <class T>
struct Keep {
  explicit Keep(int) {}
  template <class V>
  V operator()(V value) const {
    return value;
  }
};

template <class T>
struct Truth {
  explicit Truth(int) {}
  template <class V>
  V operator()(V value) const {
    return value != V{} ? V{} + T(1) : V{};
  }
};

// Divides. A power of two has an exact reciprocal, and a product with it
// rounds as the quotient does, at a fraction of the time.
template <class T>
struct Divide {
  explicit Divide(int n)
      : divisor(static_cast<T>(n)), reciprocal(T(1) / divisor), exact((n & (n - 1)) == 0) {}
  template <class V>
  V operator()(V value) const {
    return exact ? value * reciprocal : value / divisor;
  }
  T divisor;
  T reciprocal;
  bool exact;
};

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
