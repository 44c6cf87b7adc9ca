// Calls whose contributions travel with the posts: one message to every member that needs it, and a
// reduction in member order on each.
#include <cstring>

#include "core/segments.h"
#include "tcp/member/member.h"

namespace allreduce::tcp {

std::pair<const std::byte*, std::size_t> contribution(const Request& request, int me, int reader) {
  const Segment part = given_in_post(request, me, reader);
  if (part.count == 0) return {nullptr, 0};
  return {request.in + part.low * request.element(), part.count * request.element()};
}

void finish_eager(const Request& request, int me, int members,
                  const std::vector<const std::byte*>& received) {
  const Call& call = request.call;
  std::vector<const std::byte*> parts = received;
  parts[static_cast<std::size_t>(me)] = contribution(request, me, me).first;
  if (reduces(call.collective)) {
    const std::uint64_t count = given_in_post(request, me, me).count;
    const std::vector<const void*> in(parts.begin(), parts.end());
    void* const out = request.out;
    if (count != 0) reduce_all(call.op, call.type, in.data(), members, &out, 1, count);
    return;
  }
  for (int from = 0; from < members; ++from) {
    const Segment to = taken(request, me, from);
    if (to.count == 0) continue;
    std::memmove(request.out + to.low * request.element(), parts[static_cast<std::size_t>(from)],
                 to.count * request.element());
  }
}

}  // namespace allreduce::tcp
