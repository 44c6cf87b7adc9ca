// From Python's arrays to calls: shared by the bindings of the shared transport's member.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/comm/array_view.h"
#include "shm/progress/engine.h"
#include "shm/progress/protocol.h"

namespace allreduce {

// A call's kind as one integer, made once per operator by Python: collective, operator, root.
inline Call decode(std::uint32_t kind) {
  Call call;
  call.collective = static_cast<Collective>(kind & 15);
  call.op = static_cast<Op>(kind >> 4 & 15);
  call.root = static_cast<int>(kind >> 8);
  return call;
}

// Elements of the call, which the arrays must fit.
std::uint64_t count_of(const Call& call, const Details& details, const View& in, const View& out,
                       std::uint64_t members);
// A hash of everything that must agree on all members besides the signature.
std::uint64_t detail_hash(const Call& call, const Details& details, const View& array);
// Starts a call. A member without peers copies at once, and lets other threads run meanwhile.
std::shared_ptr<Work> begin(Member& member, const Call& call, const View& in, std::byte* out,
                            Details details);
// Waits without the GIL; raises the exception of a signal handler.
Outcome wait(Member& member, Work& work, double seconds);

}  // namespace allreduce
