#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

// TcpMember and TcpWork of the tcp transport.
void bind_tcp(nanobind::module_& m);

}  // namespace allreduce
