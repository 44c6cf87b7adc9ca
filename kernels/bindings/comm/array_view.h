// NumPy arrays as collectives see them.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "bindings/numpy_api.h"
#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// A C-contiguous array of a type that collectives carry; its owner outlives it.
class View {
 public:
  // Of None, and of anything that collectives cannot carry, there is nothing: no bytes, of
  // Type::none. Reads the array's own fields: its buffer would take 130 ns.
  View(PyObject* object, bool writable) {
    if (!PyArray_Check(object)) return;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    const int needed = NPY_ARRAY_C_CONTIGUOUS | (writable ? NPY_ARRAY_WRITEABLE : 0);
    if (!PyArray_CHKFLAGS(array, needed) || !PyArray_ISNOTSWAPPED(array)) return;
    type_ = type_of(array);
    if (type_ == Type::none) return;
    data_ = PyArray_DATA(array);
    axes_ = PyArray_NDIM(array);
    shape_ = PyArray_DIMS(array);
    bytes_ = size_of(type_);
    for (int axis = 0; axis < axes_; ++axis) bytes_ *= static_cast<std::uint64_t>(shape_[axis]);
  }

  // Whether there is an array.
  bool held() const { return type_ != Type::none; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t count() const { return bytes() / size_of(type()); }

  Type type() const { return type_; }
  bool same_shape(const View& other) const { return same_axes(other, 0); }
  // Whether both have an axis 0, and are alike beyond it.
  bool same_rows(const View& other) const { return axes_ > 0 && same_axes(other, 1); }
  // The length of axis 0, which must be there.
  std::uint64_t rows() const { return static_cast<std::uint64_t>(shape_[0]); }
  // A hash of the lengths of the axes from `first` on (FNV-1a, by axes).
  std::uint64_t shape_hash(int first) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (int axis = first; axis < axes_; ++axis)
      hash = (hash ^ static_cast<std::uint64_t>(shape_[axis])) * 0x100000001b3;
    return hash;
  }
  bool overlaps(const View& other) const {
    return data() < other.data() + other.bytes() && other.data() < data() + bytes();
  }

 private:
  bool same_axes(const View& other, int first) const {
    if (axes_ != other.axes_) return false;
    for (int axis = first; axis < axes_; ++axis)
      if (shape_[axis] != other.shape_[axis]) return false;
    return true;
  }

  // The size of an integer's number depends on the platform, so its type follows from the item
  // size. bfloat16 is known by the name of its scalars' type, without Python: another thread could
  // make a call meanwhile.
  static Type type_of(PyArrayObject* array) {
    const int number = PyArray_TYPE(array);
    switch (number) {
      case NPY_BOOL:
        return Type::boolean;
      case NPY_HALF:
        return Type::float16;
      case NPY_FLOAT:
        return Type::float32;
      case NPY_DOUBLE:
        return Type::float64;
      case NPY_CFLOAT:
        return Type::complex64;
      case NPY_CDOUBLE:
        return Type::complex128;
      default:
        break;
    }
    if (PyTypeNum_ISSIGNED(number))
      return of_size(array, Type::int8, Type::int16, Type::int32, Type::int64);
    if (PyTypeNum_ISUNSIGNED(number))
      return of_size(array, Type::uint8, Type::uint16, Type::uint32, Type::uint64);
    if (number < NPY_USERDEF) return Type::none;
    const std::string_view name = PyArray_DESCR(array)->typeobj->tp_name;
    return name == "bfloat16" || name.ends_with(".bfloat16") ? Type::bfloat16 : Type::none;
  }
  static Type of_size(PyArrayObject* array, Type one, Type two, Type four, Type eight) {
    const npy_intp bytes = PyArray_ITEMSIZE(array);
    return bytes == 1 ? one : bytes == 2 ? two : bytes == 4 ? four : eight;
  }

  Type type_ = Type::none;
  void* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  int axes_ = 0;
  const npy_intp* shape_ = nullptr;
};

}  // namespace allreduce
