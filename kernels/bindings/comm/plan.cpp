// Plans of calls of the shared transport, and the sizes of any call's arrays: pure, and asked
// without a communicator.
#include "shm/plan.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/segments.h"
#include "core/slices.h"
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

nb::tuple shared_plan(const nb::tuple& words, const Choices& choices, int me, int members,
                      bool symmetric, bool in_place) {
  const CallPlan plan = plan_call(spec_of(words), choices, me, members, {symmetric, in_place});
  nb::list steps;
  for (const PlanStep& step : plan.steps) steps.append(nb::make_tuple(step.name, step.past));
  return nb::make_tuple(static_cast<int>(plan.path), plan.way.chunk, plan.way.streaming,
                        plan.chunks, plan.staging, steps);
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("shared_plan", &shared_plan, nb::arg("words"), nb::arg("choices"), nb::arg("me"),
        nb::arg("members"), nb::arg("symmetric"), nb::arg("in_place"));
  m.def(
      "call_elements",
      [](const nb::tuple& words, int me, int members) {
        const CallSpec spec = spec_of(words);
        return nb::make_tuple(input_elements(spec, members, me),
                              output_elements(spec, members, me));
      },
      nb::arg("words"), nb::arg("me"), nb::arg("members"));
  m.def(
      "slice_bounds",
      [](std::uint64_t count, std::size_t item, int members, int member) {
        const Slice slice = slice_of(count, item, members, member);
        return nb::make_tuple(slice.low, slice.high);
      },
      nb::arg("count"), nb::arg("item"), nb::arg("members"), nb::arg("member"));
}

}  // namespace allreduce
