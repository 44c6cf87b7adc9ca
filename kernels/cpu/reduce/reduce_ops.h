// Operations of reductions on lanes. Only for files compiled once per KERNEL_LEVEL.
#pragma once

namespace allreduce::KERNEL_LEVEL {
namespace {

// Operators: how two values become one, in lanes of any type.

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};
struct Min {  // a NaN on either side wins, as in numpy.minimum
  template <class V>
  static V apply(V a, V b) {
    return a != a ? a : (a < b ? a : b);
  }
};
struct Max {
  template <class V>
  static V apply(V a, V b) {
    return a != a ? a : (a > b ? a : b);
  }
};
struct Both {  // true or false, to be made 1 or 0 by Truth
  template <class V>
  static V apply(V a, V b) {
    return a != V{} ? b : a;
  }
};
struct Either {
  template <class V>
  static V apply(V a, V b) {
    return a != V{} ? a : b;
  }
};
struct And {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

// Final steps: applied to the folded value of n inputs.
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

// Divides by the number of inputs. A power of two has an exact reciprocal, and a product with it
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
