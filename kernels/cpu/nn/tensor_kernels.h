// Kernels of the graph's operators and optimizers: one table of functions per instruction set.
//
// All levels give the same bits, and an element's result does not depend on where a range that
// holds it begins or ends: nothing but single IEEE operations in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/elementwise/chain.h"
#include "cpu/simd/levels.h"

namespace allreduce {

// The parameters of one optimizer step besides its arrays. Gradients are sums over samples: they
// are divided by `count`, and taken as zero if there were no samples.
template <class T>
struct SgdStep {
  T count, learning_rate, momentum;
  bool nesterov;
};

// `rate` is the learning rate with both bias corrections; `rest` is 1 - beta, rounded only once for
// full precision. `keep` is the factor of decoupled weight decay.
template <class T>
struct AdamStep {
  T count, rate, beta1, rest1, beta2, rest2, epsilon, keep;
};

// Which elements of which rows a dropout keeps: a word of Philox is at least `threshold`.
struct DropoutPlan {
  std::uint64_t key, first_row;
  std::uint32_t step, threshold;
};

// From the share that is dropped, which is below 1.
inline DropoutPlan dropout_plan(double rate, std::uint64_t key, std::uint64_t first_row,
                                std::uint64_t step) {
  return {key, first_row, static_cast<std::uint32_t>(step),
          static_cast<std::uint32_t>(rate * 4294967296.0)};
}

// What is kept becomes as much larger.
template <class T>
T dropout_scale(double rate) {
  return static_cast<T>(1 / (1 - rate));
}

// Optimizers whose update is a kernel with its settings as plain numbers, in the table's order.
enum class Rule : std::size_t { adagrad, lion, rmsprop };
inline constexpr const char* kRuleNames[] = {"adagrad", "lion", "rmsprop"};
inline constexpr std::size_t kMostRuleSlots = 3, kMostRuleNumbers = 8;

// Updates `n` values and the same range of each slot. The first number is the count of samples, the
// others are what the optimizer's file in allreduce/optim hands over.
template <class T>
using RuleKernel = void (*)(T* value, const T* gradient, T* const* slots, const T* numbers,
                            std::size_t n);

template <class T>
struct FloatKernels {
  void (*sgd)(T* value, const T* gradient, T* velocity, const SgdStep<T>& step, std::size_t n);
  void (*adam)(T* value, const T* gradient, T* m, T* v, const AdamStep<T>& step, std::size_t n);
  RuleKernel<T> rules[3];
  void (*dropout)(T* out, const T* x, std::size_t rows, std::size_t columns, T scale,
                  const DropoutPlan& plan);
  // Both return the first row whose label is not below `columns`, or -1.
  std::ptrdiff_t (*sparse_cross_entropy)(T* out, const std::int64_t* labels, const T* logits,
                                         std::size_t rows, std::size_t columns);
  std::ptrdiff_t (*sparse_cross_entropy_gradient)(T* out, const T* dy, const std::int64_t* labels,
                                                  const T* logits, std::size_t rows,
                                                  std::size_t columns);
  void (*cross_entropy)(T* out, const T* targets, const T* logits, std::size_t rows,
                        std::size_t columns);
  void (*cross_entropy_gradient)(T* out, const T* dy, const T* targets, const T* logits,
                                 std::size_t rows, std::size_t columns);
  // Of each row; `normalize` is (x - mean) / sqrt(variance + epsilon).
  void (*softmax)(T* out, const T* x, std::size_t rows, std::size_t columns);
  void (*normalize)(T* out, const T* x, std::size_t rows, std::size_t columns, T epsilon);
  void (*normalize_gradient)(T* out, const T* dy, const T* x, const T* y, std::size_t rows,
                             std::size_t columns, T epsilon);
};

struct TensorKernels {
  FloatKernels<float> float32;
  FloatKernels<double> float64;
  ElementwiseKernels ops;

  template <class T>
  const FloatKernels<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return float32;
    else
      return float64;
  }
};

template <>
const TensorKernels LevelTable<TensorKernels, Level::baseline>::table;
template <>
const TensorKernels LevelTable<TensorKernels, Level::avx2>::table;
template <>
const TensorKernels LevelTable<TensorKernels, Level::avx512>::table;

inline const TensorKernels& tensor_kernels() { return *table_in_use<TensorKernels>(); }

}  // namespace allreduce
