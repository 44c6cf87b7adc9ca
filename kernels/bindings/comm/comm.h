#pragma once

#include <nanobind/nanobind.h>

#include "shm/progress/protocol.h"

namespace allreduce {

// Group, Member and Work of the shared transport.
void bind_comm(nanobind::module_& m);
void bind_member(nanobind::module_& m);
// Plans of calls, and which elements members exchange in them.
void bind_plan(nanobind::module_& m);
// The updates that optimizers pass to calls.
void bind_updates(nanobind::module_& m);
// Methods of communicators that are native for plain arrays.
void bind_fast_method(nanobind::module_& m);

// A call as native_words() in comm/calls/call.py has it.
CallSpec spec_of(const nanobind::tuple& words);
// A call as a tuple, in the order of its signature.
nanobind::tuple describe(const Call& call);

}  // namespace allreduce
