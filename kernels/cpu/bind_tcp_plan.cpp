// Calls of the tcp transport as Python describes them, and the plans that are made of them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind_tcp.h"
#include "segments.h"
#include "tcp_plan.h"

namespace nb = nanobind;

namespace allreduce {

using Counts = std::optional<std::vector<std::uint64_t>>;

tcp::Request tcp_request(const nb::tuple& words) {
  tcp::Request request;
  request.call.collective = static_cast<Collective>(nb::cast<int>(words[0]));
  request.call.path = static_cast<Path>(nb::cast<int>(words[1]));
  request.call.op = static_cast<Op>(nb::cast<int>(words[2]));
  request.call.type = static_cast<Type>(nb::cast<int>(words[3]));
  request.call.root = nb::cast<int>(words[4]);
  request.tag = nb::cast<std::int64_t>(words[5]);
  request.call.count = nb::cast<std::uint64_t>(words[6]);
  request.details.offsets = offsets_of(nb::cast<Counts>(words[7]));
  request.details.receives = offsets_of(nb::cast<Counts>(words[8]));
  request.chunk = nb::cast<std::uint64_t>(words[9]);
  return request;
}

namespace {

// A member's plan: elements of a chunk, staged chunks of a source at a time, and of each stage its
// sources, its elements, and to whom they go; whether they are reduced, stored in the output, and
// staged here.
nb::tuple plan(const nb::tuple& words, int index, int members) {
  const tcp::Plan made = tcp::make_plan(tcp_request(words), index, members);
  nb::list stages;
  for (const tcp::Stage& stage : made.stages) {
    std::vector<int> to;
    for (const tcp::Link& link : stage.to) to.push_back(link.peer);
    stages.append(nb::make_tuple(stage.from, stage.elements, to, stage.reduce,
                                 stage.out != tcp::kNowhere, stage.windowed));
  }
  return nb::make_tuple(made.chunk, made.window, stages);
}

}  // namespace

void bind_tcp_plan(nb::module_& m) {
  m.attr("TCP_FIRST_DATA") = tcp::kData;
  m.def("tcp_plan", &plan, nb::arg("words"), nb::arg("index"), nb::arg("members"));
  m.def(
      "tcp_carries",
      [](int op, int type) {
        return op >= 0 && op < kOps && type >= 0 && type < kTypes &&
               kernels().reduce[op][type] != nullptr;
      },
      nb::arg("op"), nb::arg("type"));
}

}  // namespace allreduce
