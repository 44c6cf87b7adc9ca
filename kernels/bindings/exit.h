// What a process does for MPI as it exits.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_exit(nanobind::module_& m);

}  // namespace allreduce
