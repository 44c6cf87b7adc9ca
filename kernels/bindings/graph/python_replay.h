// Replays bound to NumPy arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/numpy_api.h"
#include "cpu/elementwise/chain.h"
#include "replay/replay.h"

namespace allreduce {

namespace nb = nanobind;

using Arrays = std::vector<PyArrayObject*>;

inline PyArrayObject* as_array(nb::handle object) {
  if (!PyArray_Check(object.ptr())) throw nb::type_error("a replay takes NumPy arrays");
  return reinterpret_cast<PyArrayObject*>(object.ptr());
}

inline bool is_plain(PyArrayObject* array) {
  return PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array);
}

inline bool is_contiguous(PyArrayObject* array) {
  return is_plain(array) && PyArray_IS_C_CONTIGUOUS(array);
}

template <class T>
bool is_of(PyArrayObject* array) {
  return PyArray_TYPE(array) == (sizeof(T) == 4 ? NPY_FLOAT : NPY_DOUBLE) && is_plain(array);
}

// Calls `work` with a number of the array's type, float or double; returns false for other types.
template <class Work>
bool for_floats(PyArrayObject* array, const Work& work) {
  if (is_of<float>(array)) return work(float{});
  return is_of<double>(array) && work(double{});
}

inline std::ptrdiff_t stride_of(PyArrayObject* array, int axis) {
  return PyArray_DIM(array, axis) == 1 ? 0 : PyArray_STRIDE(array, axis);
}

// The first byte of an array, and the end of its last.
inline std::pair<std::uintptr_t, std::uintptr_t> extent_of(PyArrayObject* array) {
  std::uintptr_t first = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array)), last = first;
  if (!PyArray_SIZE(array)) return {first, first};
  for (int axis = 0; axis < PyArray_NDIM(array); ++axis) {
    const npy_intp reach = (PyArray_DIM(array, axis) - 1) * PyArray_STRIDE(array, axis);
    (reach < 0 ? first : last) += static_cast<std::uintptr_t>(reach);
  }
  return {first, last + static_cast<std::uintptr_t>(PyArray_ITEMSIZE(array))};
}

inline Arrays arrays_of(const nb::list& list) {
  Arrays arrays;
  for (nb::handle each : list) arrays.push_back(as_array(each));
  return arrays;
}

// Each method that adds a task returns false if native code has none for these arrays; Python then
// executes the instruction.
class PythonReplay {
 public:
  // Args: the arrays that each step is given, and, for other arrays that may move, a list and the
  // index at which it must still hold the same array.
  PythonReplay(const nb::list& given, const nb::list& held);
  PythonReplay(const PythonReplay&) = delete;
  PythonReplay& operator=(const PythonReplay&) = delete;

  // Whether this step's arrays have the bound shapes and strides, and held arrays have not moved;
  // only then may tasks run.
  bool begin(const nb::list& given);
  Py_ssize_t run(std::size_t first, std::size_t last);
  // Runs all tasks; returns copies of these arrays, or none if the given arrays do not fit, or a
  // task has rejected its input.
  nb::object step(const nb::list& given, const nb::list& results);
  std::size_t size() const { return replay_.size(); }

  bool add_chain(nb::handle chain, nb::handle out, const nb::list& inputs);
  bool add_copy(nb::handle out, nb::handle value);
  bool add_product(nb::handle out, nb::handle a, nb::handle b);
  bool add_column_sums(nb::handle out, nb::handle x);
  // A row operator, by its name in kernels/cpu/nn/tensor_kernels.cpp.
  bool add_rows(const std::string& name, nb::handle out, const nb::list& inputs,
                const nb::list& numbers);

 private:
  // A description of the first array, which may be large and is not kept.
  struct Given {
    int type;
    std::vector<npy_intp> shape, strides;
    std::uintptr_t address, first, last;
  };
  struct Held {
    nb::object list, array;
    std::size_t index;
  };

  // The address of an array; arrays that are not passed in each step are kept alive.
  Place place(PyArrayObject* array);
  bool bind_chain_task(const Chain& chain, PyArrayObject* out, const Arrays& inputs);

  std::vector<Given> given_;
  std::vector<Held> held_;
  std::vector<nb::object> kept_;
  Replay replay_;
};

}  // namespace allreduce
