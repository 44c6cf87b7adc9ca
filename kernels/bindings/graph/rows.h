// Row operators bound to NumPy arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>

#include "bindings/graph/python_replay.h"
#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

template <class T>
struct BoundRows {
  const RowOperator<T>* op = nullptr;
  std::size_t rows = 0, columns = 0;
  RowNumber numbers[kMostRowNumbers] = {};

  std::ptrdiff_t run(T* out, const void* const* inputs) const {
    return op->run(out, inputs, rows, columns, numbers);
  }
};

template <class T>
const RowOperator<T>* find_rows(const std::string& name) {
  for (const RowOperator<T>& each : tensor_kernels().of<T>().rows)
    if (name == each.name) return &each;
  throw nb::key_error(name.c_str());
}

// Sets `bound`; returns what is wrong with the arrays, or null. They have to be C-contiguous.
template <class T>
const char* bind_rows(const std::string& name, PyArrayObject* out, const Arrays& inputs,
                      const nb::list& numbers, BoundRows<T>& bound) {
  const RowOperator<T>* op = bound.op = find_rows<T>(name);
  if (inputs.size() != std::strlen(op->inputs)) return "wrong number of arrays";
  const auto size = [](PyArrayObject* array) {
    return static_cast<std::size_t>(PyArray_SIZE(array));
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const int axes = PyArray_NDIM(inputs[i]);
    if (op->inputs[i] == 'm') {
      const int last = axes - 1;
      bound.columns = axes ? static_cast<std::size_t>(PyArray_DIM(inputs[i], last)) : 1;
      if (!bound.columns) return "rows without elements";
      bound.rows = size(inputs[i]) / bound.columns;
    } else if (op->inputs[i] == 'b') {
      bound.rows = axes ? static_cast<std::size_t>(PyArray_DIM(inputs[i], 0)) : 1;
      bound.columns = bound.rows ? size(inputs[i]) / bound.rows : 0;
    }
  }
  for (std::size_t i = 0; i <= inputs.size(); ++i) {
    PyArrayObject* array = i < inputs.size() ? inputs[i] : out;
    const char form = i < inputs.size() ? op->inputs[i] : op->out;
    const bool is_integer = form == 'l' || form == 'i';
    if (is_integer ? PyArray_TYPE(array) != NPY_INT64 : !is_of<T>(array))
      return "arrays of different types";
    if (!is_contiguous(array)) return "an array that is not contiguous";
    const bool is_matrix = form == 'm' || form == 'b';
    if (size(array) != (is_matrix ? bound.rows * bound.columns : form == 'i' ? 1 : bound.rows))
      return "arrays of different sizes";
  }
  std::size_t count = 0;
  while (count < kMostRowNumbers && op->numbers[count]) ++count;
  if (numbers.size() != count) return "wrong number of settings";
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* number = numbers[i].ptr();
    bound.numbers[i].real = PyFloat_AsDouble(number);
    if (PyLong_Check(number)) bound.numbers[i].whole = PyLong_AsUnsignedLongLongMask(number);
    if (PyErr_Occurred()) throw nb::python_error();
  }
  return nullptr;
}

}  // namespace allreduce
