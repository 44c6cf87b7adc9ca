// Calls whose contributions travel with the posts: one message to everybody who needs it, and the
// reduction in member order on each.
#include <cstring>

#include "tcp_member.h"

namespace allreduce::tcp {

std::pair<const std::byte*, std::size_t> contribution(const Request& request, int me, int reader) {
  const std::size_t element = request.element();
  const auto part = [&](std::uint64_t begin, std::uint64_t count) {
    const std::byte* at = request.in == nullptr ? nullptr : request.in + begin * element;
    return std::pair(at, static_cast<std::size_t>(count) * element);
  };
  const std::pair<const std::byte*, std::size_t> nothing{nullptr, 0};
  switch (request.collective) {
    case Collective::all_reduce:
      return part(0, request.count);
    case Collective::reduce:
      return reader == request.root ? part(0, request.count) : nothing;
    case Collective::reduce_scatter:
      return part(request.begin(reader), request.share(reader));
    case Collective::all_gather:
      return part(0, request.share(me));
    case Collective::gather:
      return reader == request.root ? part(0, request.share(me)) : nothing;
    case Collective::scatter:
      return me == request.root ? part(request.begin(reader), request.share(reader)) : nothing;
    case Collective::broadcast:
      return me == request.root ? part(0, request.count) : nothing;
    case Collective::all_to_all:
      return part(request.begin(reader), request.share(reader));
    case Collective::barrier:
    case Collective::empty:
    case Collective::send:
    case Collective::recv:
      return nothing;
  }
  return nothing;
}

namespace {

// Lays the members' parts one after the other.
void join(const Request& request, int members, const std::vector<const std::byte*>& parts) {
  std::byte* to = request.out;
  for (int member = 0; member < members; ++member) {
    const std::size_t bytes = request.received(member) * request.element();
    if (bytes != 0) std::memmove(to, parts[static_cast<std::size_t>(member)], bytes);
    to += bytes;
  }
}

}  // namespace

void finish_small(const Request& request, int me, int members,
                  const std::vector<const std::byte*>& received) {
  std::vector<const std::byte*> parts = received;
  parts[static_cast<std::size_t>(me)] = contribution(request, me, me).first;
  switch (request.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::reduce_scatter: {
      if (request.collective == Collective::reduce && me != request.root) return;
      const bool scatter = request.collective == Collective::reduce_scatter;
      const std::vector<const void*> in(parts.begin(), parts.end());
      return fold(request.op, request.type, in.data(), members, request.out,
                  scatter ? request.share(me) : request.count, true, members);
    }
    case Collective::gather:
      if (me != request.root) return;
      [[fallthrough]];
    case Collective::all_gather:
    case Collective::all_to_all:
      return join(request, members, parts);
    case Collective::scatter:
    case Collective::broadcast: {
      const std::uint64_t count =
          request.collective == Collective::scatter ? request.share(me) : request.count;
      const std::byte* from = parts[static_cast<std::size_t>(request.root)];
      if (count != 0 && from != request.out)
        std::memmove(request.out, from, count * request.element());
      return;
    }
    case Collective::barrier:
    case Collective::empty:
    case Collective::send:
    case Collective::recv:
      return;
  }
}

}  // namespace allreduce::tcp
