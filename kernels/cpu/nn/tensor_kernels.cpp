// Compiled once per instruction set, with KERNEL_LEVEL naming the namespace: no template of the
// standard library may be used here, or the linker could keep the AVX-512 copy for everyone.
#include "cpu/nn/tensor_kernels.h"

#include "cpu/elementwise/elementwise_ops.h"
#include "cpu/nn/normalized.h"
#include "cpu/nn/philox.h"
#include "cpu/nn/rowwise.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// The gradient as the mean over samples; a compiler hoists `live` out of its loop.
template <class T>
inline T mean_gradient(T sum, T count, bool live) {
  return live ? sum / count : T(0);
}

template <class T>
void sgd(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots, const T* numbers,
         std::size_t n) {
  const T count = numbers[0], rate = numbers[1], momentum = numbers[2];
  const bool live = count > 0, nesterov = numbers[3] != 0;
  T* __restrict__ velocity = slots[0];
  if (!velocity) {
    for (std::size_t i = 0; i < n; ++i) value[i] -= rate * mean_gradient(gradient[i], count, live);
  } else if (nesterov) {
    for (std::size_t i = 0; i < n; ++i) {
      const T move = rate * mean_gradient(gradient[i], count, live);
      velocity[i] = momentum * velocity[i] - move;
      value[i] += momentum * velocity[i] - move;
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      velocity[i] = momentum * velocity[i] - rate * mean_gradient(gradient[i], count, live);
      value[i] += velocity[i];
    }
  }
}

template <class T>
void adam(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots, const T* numbers,
          std::size_t n) {
  const T count = numbers[0], rate = numbers[1], beta1 = numbers[2], rest1 = numbers[3];
  const T beta2 = numbers[4], rest2 = numbers[5], epsilon = numbers[6], keep = numbers[7];
  T* __restrict__ m = slots[0], * __restrict__ v = slots[1];
  const bool live = count > 0;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    m[i] = beta1 * m[i] + rest1 * g;
    v[i] = beta2 * v[i] + rest2 * (g * g);
    value[i] = keep * value[i] - rate * m[i] / (square_root(v[i]) + epsilon);
  }
}

template <class T>
void adagrad(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots,
             const T* numbers, std::size_t n) {
  const T count = numbers[0], rate = numbers[1], start = numbers[2];
  T* __restrict__ squares = slots[0];
  const bool live = count > 0;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    squares[i] += g * g;
    value[i] -= rate * g / square_root(squares[i] + start);
  }
}

template <class T>
void lion(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots, const T* numbers,
          std::size_t n) {
  const T count = numbers[0], rate = numbers[1], beta1 = numbers[2], rest1 = numbers[3];
  const T beta2 = numbers[4], rest2 = numbers[5], decay = numbers[6];
  T* __restrict__ m = slots[0];
  const bool live = count > 0;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live), move = beta1 * m[i] + rest1 * g;
    const T sign = move > 0 ? T(1) : move < 0 ? T(-1) : move;  // a NaN passes
    value[i] -= rate * (sign + decay * value[i]);
    m[i] = beta2 * m[i] + rest2 * g;
  }
}

// The slots are the moving square, then the moving mean if `centered`, then the velocity if there
// is momentum.
template <class T>
void rmsprop(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots,
             const T* numbers, std::size_t n) {
  const T count = numbers[0], rate = numbers[1], rho = numbers[2], rest = numbers[3];
  const T epsilon = numbers[4], momentum = numbers[5];
  const bool live = count > 0, centered = numbers[6] != 0;
  T* __restrict__ square = slots[0];
  T* __restrict__ mean = centered ? slots[1] : nullptr;
  T* __restrict__ velocity = momentum > 0 ? slots[centered ? 2 : 1] : nullptr;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    square[i] = rho * square[i] + rest * (g * g);
    T below = square[i] + epsilon;
    if (mean) {
      mean[i] = rho * mean[i] + rest * g;
      below -= mean[i] * mean[i];
    }
    T move = rate * g / square_root(below);
    if (velocity) move = velocity[i] = momentum * velocity[i] + move;
    value[i] -= move;
  }
}

// Returns the root of the sum of squares of term(0), …, term(n - 1). It adds doubles in lanes, in
// the same order for each instruction set.
template <class T, class Term>
double norm(std::size_t n, Term term) {
  constexpr std::size_t kLanes = 8, kBlock = 512;
  double sums[kLanes] = {}, sum = 0;
  T block[kBlock];  // terms that a compiler can compute in vectors
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t size = n - start < kBlock ? n - start : kBlock;
    for (std::size_t i = 0; i < size; ++i) block[i] = term(start + i);
    for (std::size_t i = size; i % kLanes; ++i) block[i] = 0;
    for (std::size_t i = 0; i < size; i += kLanes)
      for (std::size_t k = 0; k < kLanes; ++k) {
        const double x = block[i + k];
        sums[k] += x * x;
      }
  }
  for (double each : sums) sum += each;
  return square_root(sum);
}

template <class T>
void lars(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots, const T* numbers,
          std::size_t n) {
  const T count = numbers[0], rate = numbers[1], momentum = numbers[2], decay = numbers[3];
  T* __restrict__ velocity = slots[0];
  const bool live = count > 0;
  const double weights = norm<T>(n, [&](std::size_t i) { return value[i]; });
  const double size =
      norm<T>(n, [&](std::size_t i) { return mean_gradient(gradient[i], count, live); });
  const double coefficient = numbers[4];
  const double trust =
      weights > 0 && size > 0 ? coefficient * weights / (size + decay * weights) : 1;
  const T scaled = static_cast<T>(rate * trust);
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    velocity[i] = momentum * velocity[i] + scaled * (g + decay * value[i]);
    value[i] -= velocity[i];
  }
}

// The last two numbers are 1 - beta ** step.
template <class T>
void lamb(T* __restrict__ value, const T* __restrict__ gradient, T* const* slots, const T* numbers,
          std::size_t n) {
  const T count = numbers[0], rate = numbers[1], beta1 = numbers[2], rest1 = numbers[3];
  const T beta2 = numbers[4], rest2 = numbers[5], epsilon = numbers[6], decay = numbers[7];
  const T fix1 = numbers[8], fix2 = numbers[9];
  T* __restrict__ m = slots[0], * __restrict__ v = slots[1];
  const bool live = count > 0;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    m[i] = beta1 * m[i] + rest1 * g;
    v[i] = beta2 * v[i] + rest2 * (g * g);
  }
  const auto move = [=](T mean, T square, T weight) {
    return mean / fix1 / (square_root(square / fix2) + epsilon) + decay * weight;
  };
  const double weights = norm<T>(n, [&](std::size_t i) { return value[i]; });
  const double size = norm<T>(n, [&](std::size_t i) { return move(m[i], v[i], value[i]); });
  const T scaled = static_cast<T>(weights > 0 && size > 0 ? rate * weights / size : rate);
  for (std::size_t i = 0; i < n; ++i) value[i] -= scaled * move(m[i], v[i], value[i]);
}

template <class T>
std::ptrdiff_t erf(T* out, const void* const* inputs, std::size_t rows, std::size_t columns,
                   const RowNumber*) {
  const T* x = static_cast<const T*>(inputs[0]);
  for (std::size_t i = 0; i < rows * columns; ++i)
    out[i] = sizeof(T) == 4 ? static_cast<T>(__builtin_erff(static_cast<float>(x[i])))
                            : static_cast<T>(__builtin_erf(static_cast<double>(x[i])));
  return -1;
}

// A new row operator is a kernel, above or if it is long in a header, and a row here.
template <class T>
constexpr RowOperator<T> row_operators[] = {
    {"erf", "m", 'm', erf<T>},
    {"dropout", "bii", 'b', dropout<T>, {"rate", "key", "rows_per_sample"}},
    {"sparse_softmax_cross_entropy", "lm", 'v', sparse_cross_entropy<T>},
    {"sparse_softmax_cross_entropy_gradient", "vlm", 'm', sparse_cross_entropy_gradient<T>},
    {"softmax_cross_entropy", "mm", 'v', cross_entropy<T>},
    {"softmax_cross_entropy_gradient", "vmm", 'm', cross_entropy_gradient<T>},
    {"softmax", "m", 'm', softmax<T>},
    {"normalize", "m", 'm', normalize<T>, {"epsilon"}},
    {"normalize_gradient", "mmm", 'm', normalize_gradient<T>, {"epsilon"}},
};

template <class T>
constexpr FloatKernels<T> float_kernels{
    {adagrad<T>, adam<T>, lamb<T>, lars<T>, lion<T>, rmsprop<T>, sgd<T>},
    {row_operators<T>, row_operators<T> + sizeof(row_operators<T>) / sizeof(RowOperator<T>)},
};

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL

namespace allreduce {

template <>
constinit const TensorKernels LevelTable<TensorKernels, Level::KERNEL_LEVEL>::table{
    KERNEL_LEVEL::float_kernels<float>, KERNEL_LEVEL::float_kernels<double>,
    KERNEL_LEVEL::elementwise_kernels};

}  // namespace allreduce
