// Rows that are made to add up to 1, or to have mean 0 and variance 1. Only for files compiled once
// per KERNEL_LEVEL; sums are kept as in rowwise.h.
#pragma once

#include <cstddef>

#include "cpu/elementwise/elementwise_ops.h"
#include "cpu/nn/rowwise.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// The mean of `term(j)` over a row.
template <class T, class Term>
inline T mean_of(std::size_t columns, Term term) {
  return sum_row<T>(columns, term) / static_cast<T>(columns);
}

// The divisor of a row.
template <class T>
inline T deviation(const T* x, T mean, T epsilon, std::size_t columns) {
  const T variance = mean_of<T>(columns, [=](std::size_t j) {
    const T centred = x[j] - mean;
    return centred * centred;
  });
  return square_root(variance + epsilon);
}

template <class T>
std::ptrdiff_t softmax(T* out, const void* const* inputs, std::size_t rows, std::size_t columns,
                       const RowNumber*) {
  const T* x = as<T>(inputs[0]);
  for (std::size_t i = 0; i < rows; ++i, x += columns, out += columns) {
    const T shift = largest(x, columns);
    for (std::size_t j = 0; j < columns; ++j) out[j] = exponential(x[j] - shift);
    const T total = sum_row<T>(columns, [out](std::size_t j) { return out[j]; });
    for (std::size_t j = 0; j < columns; ++j) out[j] /= total;
  }
  return -1;
}

template <class T>
std::ptrdiff_t normalize(T* __restrict__ out, const void* const* inputs, std::size_t rows,
                         std::size_t columns, const RowNumber* numbers) {
  const T* __restrict__ x = as<T>(inputs[0]);
  const T epsilon = static_cast<T>(numbers[0].real);
  for (std::size_t i = 0; i < rows; ++i, x += columns, out += columns) {
    const T mean = mean_of<T>(columns, [x](std::size_t j) { return x[j]; });
    const T divisor = deviation(x, mean, epsilon, columns);
    for (std::size_t j = 0; j < columns; ++j) out[j] = (x[j] - mean) / divisor;
  }
  return -1;
}

template <class T>
std::ptrdiff_t normalize_gradient(T* __restrict__ out, const void* const* inputs, std::size_t rows,
                                  std::size_t columns, const RowNumber* numbers) {
  const T* __restrict__ dy = as<T>(inputs[0]), * __restrict__ x = as<T>(inputs[1]);
  const T* __restrict__ y = as<T>(inputs[2]);  // the normalized `x`
  const T epsilon = static_cast<T>(numbers[0].real);
  for (std::size_t i = 0; i < rows;
       ++i, x += columns, y += columns, dy += columns, out += columns) {
    const T mean = mean_of<T>(columns, [x](std::size_t j) { return x[j]; });
    const T divisor = deviation(x, mean, epsilon, columns);
    const T slope = mean_of<T>(columns, [dy](std::size_t j) { return dy[j]; });
    const T along = mean_of<T>(columns, [dy, y](std::size_t j) { return dy[j] * y[j]; });
    for (std::size_t j = 0; j < columns; ++j) out[j] = (dy[j] - slope - y[j] * along) / divisor;
  }
  return -1;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
