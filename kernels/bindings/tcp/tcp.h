#pragma once

#include <nanobind/nanobind.h>

#include "tcp/io/protocol.h"

namespace allreduce {

// TcpMember and TcpWork of the tcp transport.
void bind_tcp(nanobind::module_& m);
void bind_tcp_plan(nanobind::module_& m);

// A call as words() in comm/transports/tcp/calls.py has it.
tcp::Request tcp_request(const nanobind::tuple& words);

}  // namespace allreduce
