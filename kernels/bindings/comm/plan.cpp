// Plans of calls of the shared transport, and the sizes of any call's arrays: pure, and asked
// without a communicator.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "core/segments.h"
#include "core/slices.h"
#include "shm/paths.h"
#include "shm/progress/protocol.h"

namespace nb = nanobind;

namespace allreduce {

CallSpec spec_of(const nb::tuple& words) {
  using Counts = std::optional<std::vector<std::uint64_t>>;
  CallSpec spec;
  spec.call = {.collective = static_cast<Collective>(nb::cast<int>(words[0])),
               .op = static_cast<Op>(nb::cast<int>(words[1])),
               .type = static_cast<Type>(nb::cast<int>(words[2])),
               .root = nb::cast<int>(words[3]),
               .count = nb::cast<std::uint64_t>(words[4])};
  spec.details.offsets = offsets_of(nb::cast<Counts>(words[5]));
  spec.details.receives = offsets_of(nb::cast<Counts>(words[6]));
  return spec;
}

namespace {

// Bytes of staging memory that a call uses at most.
std::uint64_t staging_bytes(const Call& call) {
  const std::uint64_t moved = call.count * size_of(call.type);
  const bool message = is_message(call.collective);
  if (call.path == Path::eager) return message ? moved : kSmall;
  if (call.path == Path::pairwise) return kLap * kPlace;
  if (call.path != Path::staged) return 0;
  if (!message) return kRing * kPlace;
  const bool sends = call.collective == Collective::send;
  return sends ? std::min<std::uint64_t>(moved, kWindowsPerReceiver * kWindow) : 0;
}

// Path, bytes of a chunk, whether chunks are stored past the caches, and bytes of staging memory.
nb::tuple shared_plan(const nb::tuple& words, const Choices& choices, int members, bool symmetric) {
  Work work;
  static_cast<CallSpec&>(work) = spec_of(words);
  if (!is_message(work.call.collective)) {
    if (members == 1) return nb::make_tuple(static_cast<int>(Path::eager), 0, false, 0);
    choose_path(work, choices, members, [&] { return symmetric; });
  } else {
    work.call.path = message_path(work.call, symmetric);
    if (work.call.path == Path::staged) work.way.chunk = kWindow;
  }
  return nb::make_tuple(static_cast<int>(work.call.path), work.way.chunk, work.way.streaming,
                        staging_bytes(work.call));
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("shared_plan", &shared_plan, nb::arg("words"), nb::arg("choices"), nb::arg("members"),
        nb::arg("symmetric"));
  m.def(
      "call_elements",
      [](const nb::tuple& words, int me, int members) {
        const CallSpec spec = spec_of(words);
        return nb::make_tuple(input_elements(spec, members, me),
                              output_elements(spec, members, me));
      },
      nb::arg("words"), nb::arg("me"), nb::arg("members"));
  m.def(
      "carries",
      [](std::uint8_t op, std::uint8_t type) {
        return !lacks_kernel(
            {Collective::all_reduce, static_cast<Op>(op), static_cast<Type>(type)});
      },
      nb::arg("op"), nb::arg("type"));
  m.def(
      "slice_bounds",
      [](std::uint64_t count, std::size_t item, int members, int member) {
        const Slice slice = slice_of(count, item, members, member);
        return nb::make_tuple(slice.low, slice.high);
      },
      nb::arg("count"), nb::arg("item"), nb::arg("members"), nb::arg("member"));
}

}  // namespace allreduce
