// The graph's kernels as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

// NumPy's own threshold is 500 elements; below it, asking for the lock again costs more than it
// frees.
constexpr std::size_t kWorthUnlocking = 2048;

void bind_tensor(nanobind::module_& m);

}  // namespace allreduce
