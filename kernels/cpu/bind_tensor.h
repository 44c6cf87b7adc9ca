// The graph's kernels as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_tensor(nanobind::module_& m);

}  // namespace allreduce
