// Optimizers' kernels by name, and their numbers.
#pragma once

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

// The settings of an optimizer of the table; the first, the count of samples, is left open.
template <class T>
struct RuleStep {
  T numbers[kMostRuleNumbers] = {};
  explicit RuleStep(const std::vector<double>& given = {}) {
    if (given.size() >= kMostRuleNumbers) throw std::invalid_argument("too many numbers");
    for (std::size_t i = 0; i < given.size(); ++i) numbers[i + 1] = static_cast<T>(given[i]);
  }
};

// Returns the kernel of the optimizer of this name, which gets so many slots.
template <class T>
RuleKernel<T> rule_kernel(const std::string& name, std::size_t slots) {
  for (std::size_t i = 0; i < std::size(kRules); ++i) {
    if (name != kRules[i].name) continue;
    if (slots < kRules[i].slots || slots > kMostRuleSlots)
      throw std::invalid_argument(name + " takes another number of slots");
    return tensor_kernels().of<T>().rules[i];
  }
  throw std::invalid_argument("no optimizer's kernel is called " + name);
}

}  // namespace allreduce
