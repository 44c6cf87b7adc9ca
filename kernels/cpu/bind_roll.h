// Who is late, for the native module.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_roll(nanobind::module_& m);

}  // namespace allreduce
