#pragma once

#include <nanobind/nanobind.h>

#include "protocol.h"

namespace allreduce {

// Group, Member and Work of the shared transport.
void bind_comm(nanobind::module_& m);
void bind_member(nanobind::module_& m);
// Which elements members exchange in a call, for plans.
void bind_segments(nanobind::module_& m);
// What optimizers hand to calls that update.
void bind_updates(nanobind::module_& m);
// Methods of communicators that are native for plain arrays.
void bind_quick_method(nanobind::module_& m);

// A call as a tuple, in the order of its signature.
nanobind::tuple describe(const Call& call);

}  // namespace allreduce
