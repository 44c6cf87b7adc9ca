// Computes a kernel's parameters from an optimizer's settings.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

// Step `number` of Adam, from 1; the count of samples is left open.
template <class T>
AdamStep<T> adam_step(double learning_rate, double beta1, double beta2, double epsilon,
                      double weight_decay, std::int64_t number) {
  const double t = static_cast<double>(number);
  const double rate = learning_rate * std::sqrt(1 - std::pow(beta2, t)) / (1 - std::pow(beta1, t));
  return {T(0),
          static_cast<T>(rate),
          static_cast<T>(beta1),
          static_cast<T>(1 - beta1),
          static_cast<T>(beta2),
          static_cast<T>(1 - beta2),
          static_cast<T>(epsilon),
          static_cast<T>(1 - learning_rate * weight_decay)};
}

}  // namespace allreduce
