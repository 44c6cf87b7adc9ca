// Text of the native side for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace allreduce {

// UTF-8 that may have been truncated: invalid bytes become U+FFFD.
inline nanobind::object text_of(std::string_view text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

}  // namespace allreduce
