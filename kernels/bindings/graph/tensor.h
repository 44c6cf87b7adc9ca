// The graph's kernels as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

// NumPy's own threshold is 500 elements; below it, asking for the lock again costs more than it
// frees.
constexpr std::size_t kWorthUnlocking = 2048;

// The name of an argument that is an array as it is: none is converted.
inline auto operator""_array(const char* name, std::size_t) {
  return nanobind::arg(name).noconvert();
}

}  // namespace allreduce
