#include "bind_roll.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "roll.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

using Told = std::tuple<double, std::string, std::string>;

Notice notice(const Told& told) {
  return {std::get<0>(told), std::get<1>(told), std::get<2>(told)};
}

}  // namespace

void bind_roll(nb::module_& m) {
  nb::class_<Roll>(m, "Roll")
      .def(nb::init<std::string, int, std::string, int, int, std::map<std::string, std::string>>(),
           nb::arg("meeting"), nb::arg("launcher"), nb::arg("variable"), nb::arg("rank"),
           nb::arg("size"), nb::arg("states"))
      .def("late", &Roll::late);
  nb::class_<Vigil>(m, "Vigil")
      .def(
          "__init__",
          [](Vigil* self, const Roll& roll, const Told& late, const Told& over,
             std::vector<std::string> leftovers, int line) {
            new (self) Vigil(roll, notice(late), notice(over), {std::move(leftovers), line});
          },
          nb::arg("roll"), nb::arg("late"), nb::arg("over"), nb::arg("leftovers"), nb::arg("line"))
      .def("end", &Vigil::end);
}

}  // namespace allreduce
