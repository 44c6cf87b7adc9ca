// What to do for MPI when a process exits.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_exit(nanobind::module_& m);

}  // namespace allreduce
