#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

// Group, Member and Work of the shared transport.
void bind_comm(nanobind::module_& m);

}  // namespace allreduce
