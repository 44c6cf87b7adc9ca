// Chains of element-wise operations as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_chain(nanobind::module_& m);

}  // namespace allreduce
