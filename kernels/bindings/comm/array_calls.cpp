#include "bindings/comm/array_calls.h"

#include <optional>

#include "core/gil.h"
#include "core/segments.h"
#include "core/signals.h"

namespace nb = nanobind;

namespace allreduce {

Outcome wait(Member& member, Work& work, double seconds) {
  Outcome outcome;
  {
    const GilRelease release;
    outcome = Engine::instance().wait(member, work, seconds, interrupted);
  }
  if (outcome == Outcome::interrupted) throw nb::python_error();
  return outcome;
}

std::uint64_t count_of(const Call& call, const Details& details, const View& in, const View& out,
                       std::uint64_t members) {
  switch (call.collective) {
    case Collective::all_to_all:
      return details.offsets.empty() ? in.count() / members : 0;
    case Collective::reduce_scatter:
    case Collective::scatter:
      return details.offsets.empty() ? out.count() : details.offsets.back();
    case Collective::all_gather:
    case Collective::gather:
      return details.offsets.empty() ? in.count() : details.offsets.back();
    default:
      return in.held() ? in.count() : out.count();
  }
}

std::uint64_t detail_hash(const Call& call, const Details& details, const View& array) {
  const bool whole = call.collective == Collective::all_reduce ||
                     call.collective == Collective::reduce ||
                     call.collective == Collective::broadcast;
  std::uint64_t hash = array.shape_hash(whole ? 0 : 1);
  if (call.collective != Collective::all_to_all)
    for (std::uint64_t offset : details.offsets) hash = (hash ^ offset) * 0x100000001b3;
  return hash + (call.collective == Collective::all_to_all && !details.offsets.empty() ? 1 : 0);
}

std::shared_ptr<Work> begin(Member& member, const Call& call, const View& in, std::byte* out,
                            Details details) {
  std::optional<GilRelease> release;
  if (member.group().members() == 1 && in.bytes() > kSmall) release.emplace();
  return member.start(call, in.data(), out, std::move(details));
}

}  // namespace allreduce
