// Python's view of replays, and the tasks that copy and compute element by element.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/graph/chain.h"
#include "bindings/graph/python_replay.h"
#include "bindings/graph/rows.h"
#include "bindings/graph/tensor.h"
#include "core/gil.h"
#include "core/signals.h"
#include "replay/blas.h"

namespace allreduce {

PythonReplay::PythonReplay(const nb::list& given, const nb::list& held) : replay_(given.size()) {
  for (nb::handle each : given) {
    PyArrayObject* array = as_array(each);
    const int axes = PyArray_NDIM(array);
    const auto [first, last] = extent_of(array);
    Given like{PyArray_TYPE(array),
               {PyArray_DIMS(array), PyArray_DIMS(array) + axes},
               {},
               reinterpret_cast<std::uintptr_t>(PyArray_DATA(array)),
               first,
               last};
    for (int axis = 0; axis < axes; ++axis) like.strides.push_back(stride_of(array, axis));
    given_.push_back(std::move(like));
  }
  for (nb::handle each : held) {
    const auto pair = nb::cast<nb::tuple>(each);
    const auto index = nb::cast<std::size_t>(pair[1]);
    held_.push_back({nb::borrow(pair[0]), nb::borrow(nb::cast<nb::list>(pair[0])[index]), index});
  }
}

bool PythonReplay::begin(const nb::list& given) {
  if (given.size() != given_.size()) return false;
  for (const Held& each : held_)
    if (PyList_GET_ITEM(each.list.ptr(), static_cast<Py_ssize_t>(each.index)) != each.array.ptr())
      return false;
  for (std::size_t i = 0; i < given_.size(); ++i) {
    PyObject* object = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    const Given& like = given_[i];
    if (!PyArray_Check(object)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    const auto axes = static_cast<std::size_t>(PyArray_NDIM(array));
    if (PyArray_TYPE(array) != like.type || axes != like.shape.size() || !is_plain(array))
      return false;
    for (std::size_t axis = 0; axis < axes; ++axis)
      if (PyArray_DIMS(array)[axis] != like.shape[axis] ||
          stride_of(array, static_cast<int>(axis)) != like.strides[axis])
        return false;
    replay_.move(i, PyArray_DATA(array));
  }
  return true;
}

Py_ssize_t PythonReplay::run(std::size_t first, std::size_t last) {
  if (last > replay_.size() || first > last) throw nb::index_error("no such tasks");
  std::size_t done;
  {
    const GilRelease released;
    done = replay_.run(first, last, interrupted);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return done == last - first ? -1 : static_cast<Py_ssize_t>(done);
}

nb::object PythonReplay::step(const nb::list& given, const nb::list& results) {
  if (!begin(given) || run(0, size()) >= 0) return nb::none();
  nb::list copies;
  for (nb::handle each : results) {
    PyObject* made = PyArray_NewCopy(as_array(each), NPY_CORDER);
    if (made == nullptr) throw nb::python_error();
    copies.append(nb::steal(made));
  }
  return copies;
}

Place PythonReplay::place(PyArrayObject* array) {
  const auto [first, last] = extent_of(array);
  const auto address = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array));
  for (std::size_t i = 0; i < given_.size(); ++i)
    if (first < last && given_[i].first <= first && last <= given_[i].last)
      return {i + 1, address - given_[i].address};
  kept_.push_back(nb::borrow(reinterpret_cast<PyObject*>(array)));
  return {0, address};
}

bool PythonReplay::bind_chain_task(const Chain& chain, PyArrayObject* out, const Arrays& inputs) {
  bool fits = chain.inputs.size() == inputs.size() && is_contiguous(out) &&
              scalar_of(PyArray_TYPE(out)) == chain.ops.back().out;
  for (std::size_t i = 0; fits && i < inputs.size(); ++i)
    fits = array_of(reinterpret_cast<PyObject*>(inputs[i]), chain.inputs[i]) != nullptr;
  if (!fits) return false;
  std::optional<BoundChain> bound =
      bound_to(chain, PyArray_NDIM(out), PyArray_DIMS(out), inputs.data());
  if (!bound) return false;
  std::vector<Place> places;
  for (PyArrayObject* each : inputs) places.push_back(place(each));
  const std::size_t work = bound->elements() * chain.ops.size();
  replay_.add(work, [chain = std::move(*bound), places, to = place(out)](const Bases& bases) {
    const char* addresses[kMaxInputs];
    for (std::size_t i = 0; i < places.size(); ++i) addresses[i] = places[i].in(bases);
    chain.run(to.in(bases), addresses);
    return true;
  });
  return true;
}

bool PythonReplay::add_chain(nb::handle chain, nb::handle out, const nb::list& inputs) {
  return bind_chain_task(chain_of(chain), as_array(out), arrays_of(inputs));
}

bool PythonReplay::add_copy(nb::handle out, nb::handle value) {
  PyArrayObject *to = as_array(out), *from = as_array(value);
  const std::optional<Scalar> target = scalar_of(PyArray_TYPE(to));
  const std::optional<Scalar> source = scalar_of(PyArray_TYPE(from));
  if (!target || !source) return false;
  const ElementwiseOp op = target == source ? ElementwiseOp::copy : ElementwiseOp::cast;
  if (!tensor_kernels().ops.find(op, *source, *target)) return false;
  const Chain chain{{ChainOp{op, *source, *target, 1, {0, 0, 0}, 0}}, {*source}};
  return bind_chain_task(chain, to, {from});
}

bool PythonReplay::add_rows(const std::string& name, nb::handle out, const nb::list& inputs,
                            const nb::list& numbers) {
  PyArrayObject* to = as_array(out);
  const Arrays from = arrays_of(inputs);
  return for_floats(to, [&](auto zero) {
    using T = decltype(zero);
    BoundRows<T> bound;
    if (bind_rows<T>(name, to, from, numbers, bound) || !bound.rows) return false;
    std::vector<Place> places;
    for (PyArrayObject* each : from) places.push_back(place(each));
    replay_.add(bound.rows * bound.columns * 8, [=, there = place(to)](const Bases& bases) {
      const void* addresses[kMostRowInputs];
      for (std::size_t i = 0; i < places.size(); ++i) addresses[i] = places[i].in(bases);
      return bound.run(there.in<T>(bases), addresses) < 0;
    });
    return true;
  });
}

void bind_replay(nb::module_& m) {
  nb::class_<PythonReplay>(m, "Replay")
      .def(nb::init<nb::list, nb::list>(), nb::arg("given"), nb::arg("held"))
      .def("begin", &PythonReplay::begin, nb::arg("given"))
      .def("run", &PythonReplay::run, nb::arg("first"), nb::arg("last"))
      .def("step", &PythonReplay::step, nb::arg("given"), nb::arg("results"))
      .def("__len__", &PythonReplay::size)
      .def("add_chain", &PythonReplay::add_chain, nb::arg("chain"), nb::arg("out"),
           nb::arg("inputs"))
      .def("add_copy", &PythonReplay::add_copy, nb::arg("out"), nb::arg("value"))
      .def("add_product", &PythonReplay::add_product, nb::arg("out"), nb::arg("a"), nb::arg("b"))
      .def("add_column_sums", &PythonReplay::add_column_sums, nb::arg("out"), nb::arg("x"))
      .def("add_rows", &PythonReplay::add_rows, nb::arg("name"), nb::arg("out"), nb::arg("inputs"),
           nb::arg("numbers"));
  m.def("find_blas", &find_blas, nb::arg("module"));
}

}  // namespace allreduce
