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
void sgd(T* __restrict__ value, const T* __restrict__ gradient, T* __restrict__ velocity,
         const SgdStep<T>& step, std::size_t n) {
  const T count = step.count, rate = step.learning_rate, momentum = step.momentum;
  const bool live = count > 0;
  if (!velocity) {
    for (std::size_t i = 0; i < n; ++i) value[i] -= rate * mean_gradient(gradient[i], count, live);
  } else if (step.nesterov) {
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
void adam(T* __restrict__ value, const T* __restrict__ gradient, T* __restrict__ m,
          T* __restrict__ v, const AdamStep<T>& step, std::size_t n) {
  const T count = step.count, rate = step.rate, epsilon = step.epsilon, keep = step.keep;
  const T beta1 = step.beta1, rest1 = step.rest1, beta2 = step.beta2, rest2 = step.rest2;
  const bool live = count > 0;
  for (std::size_t i = 0; i < n; ++i) {
    const T g = mean_gradient(gradient[i], count, live);
    m[i] = beta1 * m[i] + rest1 * g;
    v[i] = beta2 * v[i] + rest2 * (g * g);
    value[i] = keep * value[i] - rate * m[i] / (square_root(v[i]) + epsilon);
  }
}

template <class T>
constexpr FloatKernels<T> float_kernels{
    sgd<T>,
    adam<T>,
    dropout<T>,
    sparse_cross_entropy<T>,
    sparse_cross_entropy_gradient<T>,
    cross_entropy<T>,
    cross_entropy_gradient<T>,
    softmax<T>,
    normalize<T>,
    normalize_gradient<T>,
};

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL

namespace allreduce {

template <>
constinit const TensorKernels LevelTable<TensorKernels, Level::KERNEL_LEVEL>::table{
    KERNEL_LEVEL::float_kernels<float>, KERNEL_LEVEL::float_kernels<double>,
    KERNEL_LEVEL::elementwise_kernels};

}  // namespace allreduce
