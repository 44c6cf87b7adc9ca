// Replays as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_replay(nanobind::module_& m);

}  // namespace allreduce
