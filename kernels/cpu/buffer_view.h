// Arrays of Python, by the buffer protocol.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

#include "reduce_kernels.h"

namespace allreduce {

// A C-contiguous array of a type that collectives carry, held for the time of a call's start.
class View {
 public:
  View(PyObject* object, bool writable) {
    const int flags =
        PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    held_ = PyObject_GetBuffer(object, &buffer_, flags) == 0;
    if (!held_) PyErr_Clear();
  }
  ~View() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_.buf); }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(buffer_.len); }
  std::uint64_t count() const { return bytes() / size_of(type()); }

  // Type::none if this is no array that can be carried.
  Type type() const {
    if (!held_ || buffer_.format == nullptr) return Type::none;
    const char* format = buffer_.format;
    if (*format == '@' || *format == '=') ++format;
    if (format[0] == 0 || format[1] != 0) return Type::none;
    switch (format[0]) {
      case 'f':
        return Type::float32;
      case 'd':
        return Type::float64;
      case 'i':
        return Type::int32;
      case 'l':
        return sizeof(long) == 8 ? Type::int64 : Type::int32;
      case 'q':
        return Type::int64;
      default:
        return Type::none;
    }
  }
  bool same_shape(const View& other) const {
    if (buffer_.ndim != other.buffer_.ndim) return false;
    for (int axis = 0; axis < buffer_.ndim; ++axis)
      if (buffer_.shape[axis] != other.buffer_.shape[axis]) return false;
    return true;
  }
  // Neither the same memory nor apart.
  bool partly_overlaps(const View& other) const {
    return data() != other.data() && data() < other.data() + other.bytes() &&
           other.data() < data() + bytes();
  }

 private:
  Py_buffer buffer_;
  bool held_ = false;
};

}  // namespace allreduce
