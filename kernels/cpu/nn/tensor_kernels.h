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

// A setting of a row operator; `whole` is 0 if it is not an integer.
struct RowNumber {
  double real;
  std::uint64_t whole;
};

// Computes rows, each from the same row of the inputs. Returns the first row that it refuses, or
// -1.
template <class T>
using RowKernel = std::ptrdiff_t (*)(T* out, const void* const* inputs, std::size_t rows,
                                     std::size_t columns, const RowNumber* numbers);

inline constexpr std::size_t kMostRowInputs = 4, kMostRowNumbers = 4;

// An operator under its name in the graph. One letter describes each array:
//   m  a matrix: its last axis is a row, the other axes together count the rows
//   b  a batch: its first axis counts the rows, the other axes together are a row
//   v  one number per row
//   l  one int64 per row
//   i  one int64 for all rows
// The numbers are attributes of the operator, by name.
template <class T>
struct RowOperator {
  const char* name;
  const char* inputs;
  char out;
  RowKernel<T> run;
  const char* numbers[kMostRowNumbers] = {};
};

template <class T>
struct RowOperators {
  const RowOperator<T>*first, *last;

  const RowOperator<T>* begin() const { return first; }
  const RowOperator<T>* end() const { return last; }
};

// An optimizer's kernel, with the fewest slots that it takes.
struct RuleName {
  const char* name;
  std::size_t slots;
};
// In the order of `rules`.
inline constexpr RuleName kRules[] = {{"adagrad", 1}, {"adam", 2},    {"lamb", 2}, {"lars", 1},
                                      {"lion", 1},    {"rmsprop", 1}, {"sgd", 0}};
inline constexpr std::size_t kMostRuleSlots = 3, kMostRuleNumbers = 10;

// Updates `n` values and the same range of each slot. Gradients are sums over samples. The first
// number is the count of samples, by which they are divided; if it is 0, they are taken as zero.
// The others are the `numbers` of the optimizer's file in allreduce/optim. LAMB's and LARS's take
// one whole variable.
template <class T>
using RuleKernel = void (*)(T* value, const T* gradient, T* const* slots, const T* numbers,
                            std::size_t n);

template <class T>
struct FloatKernels {
  RuleKernel<T> rules[sizeof kRules / sizeof *kRules];
  RowOperators<T> rows;
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
