// Cross-entropies of rows of logits. Only for files compiled once per KERNEL_LEVEL.
//
// Partial results are kept in 16 lanes at every level and combined in one order, so that all levels
// and the tails of rows give the same bits. Long rows are summed in blocks, which are added
// pairwise: the error grows only with the logarithm of the length.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

constexpr std::size_t kLanes = 16;

// Constants of e^x = 2^k e^r with |r| <= ln(2)/2. ln(2) is split so that k * high is exact.
// Source: Cody and Waite, Software Manual for the Elementary Functions (1980), chapter 6.
template <class T>
struct Exponential;

template <>
struct Exponential<float> {
  using Bits = std::uint32_t;
  static constexpr float kLowest = -87.0f, kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr int kTerms = 7;  // the next is below 6e-9
};

template <>
struct Exponential<double> {
  using Bits = std::uint64_t;
  static constexpr double kLowest = -708.0, kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kHigh = 0.693145751953125, kLow = 1.42860682030941723212e-6;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int kTerms = 13;  // the next is below 5e-18
};

template <class T>
constexpr T inverse_factorial(int n) {
  double product = 1;
  for (int i = 2; i <= n; ++i) product *= i;
  return static_cast<T>(1 / product);
}

// e^x for x <= 0, 0 where it is below about 1e-38 (1e-308); NaN stays NaN. Within 2 units in the
// last place.
template <class T>
inline T exponential(T x) {
  using E = Exponential<T>;
  const T held = x < E::kLowest ? E::kLowest : x;
  const T rounded = held * T(1.44269504088896340736) + E::kRound;
  const T k = rounded - E::kRound;
  const T r = held - k * E::kHigh - k * E::kLow;
  T series = inverse_factorial<T>(E::kTerms);
#pragma GCC unroll 16
  for (int n = E::kTerms - 1; n >= 0; --n) series = series * r + inverse_factorial<T>(n);
  typename E::Bits bits;
  __builtin_memcpy(&bits, &rounded, sizeof(T));
  bits = (bits + E::kBias) << E::kMantissa;  // the low bits of `rounded` hold k
  T power;
  __builtin_memcpy(&power, &bits, sizeof(T));
  return x < E::kLowest ? T(0) : series * power;
}

template <class T>
inline T logarithm(T x) {
  if constexpr (sizeof(T) == 4)
    return __builtin_logf(x);
  else
    return __builtin_log(x);
}

// Elements of a block: with blocks, the sum of 65,536 floats has the error of NumPy's; with lanes
// alone, 3 to 6 times that.
constexpr std::size_t kBlock = 512;

// Adds up `term(j)` over some elements in 16 lanes.
template <class T, class Term>
inline void add_lanes(T* lane, std::size_t first, std::size_t last, Term term) {
  for (std::size_t l = 0; l < kLanes; ++l) lane[l] = T(0);
  std::size_t j = first;
  for (; j + kLanes <= last; j += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lane[l] += term(j + l);
  for (std::size_t l = 0; j + l < last; ++l) lane[l] += term(j + l);
}

// Adds up `term(j)` over the row: block by block, of which as many as a power of two are added to
// as many before them, then the lanes: two by two, too, where there are several blocks.
template <class T, class Term>
inline T sum_row(std::size_t columns, Term term) {
  constexpr std::size_t kDepth = 8 * sizeof(std::size_t);
  T lane[kLanes], waiting[kDepth][kLanes];
  std::size_t depth = 0, blocks = 0, first = 0;
  for (; columns - first > kBlock; first += kBlock) {
    add_lanes(lane, first, first + kBlock, term);
    for (std::size_t number = ++blocks; number % 2 == 0; number /= 2) {
      --depth;
      for (std::size_t l = 0; l < kLanes; ++l) lane[l] = waiting[depth][l] + lane[l];
    }
    for (std::size_t l = 0; l < kLanes; ++l) waiting[depth][l] = lane[l];
    ++depth;
  }
  add_lanes(lane, first, columns, term);
  while (depth-- > 0)
    for (std::size_t l = 0; l < kLanes; ++l) lane[l] = waiting[depth][l] + lane[l];
  if (blocks == 0) {
    for (std::size_t l = 1; l < kLanes; ++l) lane[0] += lane[l];
    return lane[0];
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

template <class T>
inline T largest(const T* row, std::size_t columns) {
  const auto larger = [](T a, T b) { return a < b ? b : a; };
  T lane[kLanes];
  for (std::size_t l = 0; l < kLanes; ++l) lane[l] = row[0];
  std::size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lane[l] = larger(lane[l], row[j + l]);
  for (std::size_t l = 0; j + l < columns; ++l) lane[l] = larger(lane[l], row[j + l]);
  for (std::size_t l = 1; l < kLanes; ++l) lane[0] = larger(lane[0], lane[l]);
  return lane[0];
}

template <class T>
inline T sum_exponentials(const T* row, T shift, std::size_t columns) {
  return sum_row<T>(columns, [row, shift](std::size_t j) { return exponential(row[j] - shift); });
}

inline bool in_range(std::int64_t label, std::size_t columns) {
  return static_cast<std::uint64_t>(label) < columns;
}

template <class T>
const T* as(const void* array) {
  return static_cast<const T*>(array);
}

template <class T>
std::ptrdiff_t sparse_cross_entropy(T* out, const void* const* inputs, std::size_t rows,
                                    std::size_t columns, const RowNumber*) {
  const auto* labels = as<std::int64_t>(inputs[0]);
  const T* logits = as<T>(inputs[1]);
  for (std::size_t i = 0; i < rows; ++i) {
    if (!in_range(labels[i], columns)) return static_cast<std::ptrdiff_t>(i);
    const T* row = logits + i * columns;
    const T shift = largest(row, columns);
    // The two subtractions apart: log(sum) is small, and shift and the label's logit may be large.
    out[i] = logarithm(sum_exponentials(row, shift, columns)) + (shift - row[labels[i]]);
  }
  return -1;
}

template <class T>
std::ptrdiff_t sparse_cross_entropy_gradient(T* out, const void* const* inputs, std::size_t rows,
                                             std::size_t columns, const RowNumber*) {
  const T *dy = as<T>(inputs[0]), *logits = as<T>(inputs[2]);
  const auto* labels = as<std::int64_t>(inputs[1]);
  for (std::size_t i = 0; i < rows; ++i) {
    if (!in_range(labels[i], columns)) return static_cast<std::ptrdiff_t>(i);
    const T* row = logits + i * columns;
    T* to = out + i * columns;
    const T shift = largest(row, columns);
    const T total = sum_exponentials(row, shift, columns), scale = dy[i] / total;
    for (std::size_t j = 0; j < columns; ++j) to[j] = exponential(row[j] - shift) * scale;
    to[labels[i]] = (exponential(row[labels[i]] - shift) / total - T(1)) * dy[i];
  }
  return -1;
}

template <class T>
std::ptrdiff_t cross_entropy(T* out, const void* const* inputs, std::size_t rows,
                             std::size_t columns, const RowNumber*) {
  const T *targets = as<T>(inputs[0]), *logits = as<T>(inputs[1]);
  for (std::size_t i = 0; i < rows; ++i) {
    const T *row = logits + i * columns, *target = targets + i * columns;
    const T shift = largest(row, columns);
    const T log_total = logarithm(sum_exponentials(row, shift, columns));
    // A class of no weight may have a logit of minus infinity.
    out[i] = sum_row<T>(columns, [=](std::size_t j) {
      const T loss = target[j] * (log_total + (shift - row[j]));
      return target[j] == 0 ? T(0) : loss;
    });
  }
  return -1;
}

template <class T>
std::ptrdiff_t cross_entropy_gradient(T* out, const void* const* inputs, std::size_t rows,
                                      std::size_t columns, const RowNumber*) {
  const T *dy = as<T>(inputs[0]), *targets = as<T>(inputs[1]), *logits = as<T>(inputs[2]);
  for (std::size_t i = 0; i < rows; ++i) {
    const T *row = logits + i * columns, *target = targets + i * columns;
    T* to = out + i * columns;
    const T shift = largest(row, columns);
    const T total = sum_exponentials(row, shift, columns);
    const T weight = sum_row<T>(columns, [target](std::size_t j) { return target[j]; });
    const T share = weight / total, slope = dy[i];
    for (std::size_t j = 0; j < columns; ++j)
      to[j] = (exponential(row[j] - shift) * share - target[j]) * slope;
  }
  return -1;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
