// Which elements a call moves between two members, asked without a communicator: for plans.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind_comm.h"
#include "segments.h"
#include "slices.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

using Counts = std::optional<std::vector<std::uint64_t>>;

// The part of a call that segments.h reads.
class Segments {
 public:
  Segments(int collective, std::uint64_t count, int root, const Counts& counts,
           const Counts& receives, int members)
      : members_(members) {
    spec_.call.collective = static_cast<Collective>(collective);
    spec_.call.count = count;
    spec_.call.root = root;
    spec_.details.offsets = offsets_of(counts);
    spec_.details.receives = offsets_of(receives);
  }

  std::uint64_t given_to(int from, int to) const { return given(spec_, from, to).count; }
  std::uint64_t taken_from(int me, int from) const { return taken(spec_, me, from).count; }
  std::uint64_t input(int member) const { return input_elements(spec_, members_, member); }

 private:
  CallSpec spec_;
  int members_;
};

}  // namespace

void bind_segments(nb::module_& m) {
  nb::class_<Segments>(m, "Segments")
      .def(nb::init<int, std::uint64_t, int, const Counts&, const Counts&, int>(),
           nb::arg("collective"), nb::arg("count"), nb::arg("root"), nb::arg("counts").none(),
           nb::arg("receives").none(), nb::arg("members"))
      .def("given", &Segments::given_to, nb::arg("source"), nb::arg("to"))
      .def("taken", &Segments::taken_from, nb::arg("me"), nb::arg("source"))
      .def("input", &Segments::input, nb::arg("member"));
  m.def(
      "slice_bounds",
      [](std::uint64_t count, std::size_t item, int members, int member) {
        const Slice slice = slice_of(count, item, members, member);
        return nb::make_tuple(slice.low, slice.high);
      },
      nb::arg("count"), nb::arg("item"), nb::arg("members"), nb::arg("member"));
}

}  // namespace allreduce
