// Computes a kernel's parameters from an optimizer's settings.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

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

// The settings of an optimizer of the table; the first, the count of samples, is left open.
template <class T>
struct RuleStep {
  T numbers[kMostRuleNumbers] = {};
  explicit RuleStep(const std::vector<double>& given = {}) {
    if (given.size() >= kMostRuleNumbers) throw std::invalid_argument("too many numbers");
    for (std::size_t i = 0; i < given.size(); ++i) numbers[i + 1] = static_cast<T>(given[i]);
  }
};

inline std::size_t rule_of(const std::string& name) {
  for (std::size_t i = 0; i < std::size(kRuleNames); ++i)
    if (name == kRuleNames[i]) return i;
  throw std::invalid_argument("no optimizer's kernel is called " + name);
}

}  // namespace allreduce
