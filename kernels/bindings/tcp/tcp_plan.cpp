// Calls of the tcp transport as Python describes them, and their plans.
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/segments.h"
#include "tcp/calls/plan.h"
#include "tcp/io/protocol.h"

namespace nb = nanobind;

namespace allreduce {

tcp::Request tcp_request(const nb::tuple& words) {
  tcp::Request request;
  static_cast<CallSpec&>(request) = spec_of(nb::cast<nb::tuple>(words[0]));
  request.call.path = static_cast<Path>(nb::cast<int>(words[1]));
  request.tag = nb::cast<std::int64_t>(words[2]);
  request.chunk = nb::cast<std::uint64_t>(words[3]);
  return request;
}

namespace {

// A member's plan: elements per chunk, staged chunks per source, and for each stage its sources,
// elements and destinations, and whether it reduces, stores and stages here.
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

// Elements that a member sends, gets from others and takes from its own input in a call whose
// contributions travel with the posts.
nb::tuple eager_plan(const nb::tuple& words, int me, int members) {
  const tcp::Request request = tcp_request(words);
  const bool gets = request.call.collective != Collective::reduce || me == request.call.root;
  std::uint64_t sent = 0, got = 0;
  for (int member = 0; member < members; ++member) {
    if (member == me) continue;
    sent += given_in_post(request, me, member).count;
    if (gets) got += taken(request, me, member).count;
  }
  return nb::make_tuple(sent, got, gets ? taken(request, me, me).count : 0);
}

}  // namespace

void bind_tcp_plan(nb::module_& m) {
  m.def("tcp_eager_plan", &eager_plan, nb::arg("words"), nb::arg("me"), nb::arg("members"));
  m.attr("TCP_FIRST_DATA") = tcp::kData;
  m.def("tcp_plan", &plan, nb::arg("words"), nb::arg("index"), nb::arg("members"));
}

}  // namespace allreduce
