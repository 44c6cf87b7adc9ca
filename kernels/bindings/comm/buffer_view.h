// Arrays of Python: NumPy's by their own fields, others by the buffer protocol.
#pragma once

#include <Python.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "bindings/numpy_api.h"
#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// A C-contiguous array of a type that collectives carry, held for the time of a call's start.
class View {
 public:
  // Of None there is nothing: no bytes, of Type::none.
  View(PyObject* object, bool writable) {
    if (object == Py_None) return;
    if (PyArray_CheckExact(object)) look(reinterpret_cast<PyArrayObject*>(object), writable);
    if (!held_) borrow(object, writable);
  }
  ~View() {
    if (borrowed_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  bool held() const { return held_; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t count() const { return bytes() / size_of(type()); }

  // Type::none if this is no array that can be carried.
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
  // Reads a plain array's own fields if they suffice: the buffer protocol takes 130
  // ns.
  void look(PyArrayObject* array, bool writable) {
    const int needed = NPY_ARRAY_C_CONTIGUOUS | (writable ? NPY_ARRAY_WRITEABLE : 0);
    if (!PyArray_CHKFLAGS(array, needed) || !PyArray_ISNOTSWAPPED(array)) return;
    type_ = PyArray_TYPE(array) < NPY_USERDEF   ? type_of(PyArray_TYPE(array))
            : is_bfloat16(PyArray_DESCR(array)) ? Type::bfloat16
                                                : Type::none;
    if (type_ == Type::none) return;
    data_ = PyArray_DATA(array);
    axes_ = PyArray_NDIM(array);
    shape_ = PyArray_DIMS(array);
    bytes_ = size_of(type_);
    for (int axis = 0; axis < axes_; ++axis) bytes_ *= static_cast<std::uint64_t>(shape_[axis]);
    held_ = true;
  }
  void borrow(PyObject* object, bool writable) {
    const int flags =
        PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    borrowed_ = PyObject_GetBuffer(object, &buffer_, flags) == 0;
    if (borrowed_) {
      type_ = type_of(buffer_);
    } else {
      PyErr_Clear();
      PyObject* words = bfloat16_words(object);
      borrowed_ = words != nullptr && PyObject_GetBuffer(words, &buffer_, flags) == 0;
      if (borrowed_ && type_of(buffer_) == Type::uint16) type_ = Type::bfloat16;
      Py_XDECREF(words);
      PyErr_Clear();
    }
    held_ = borrowed_;
    if (!held_) return;
    data_ = buffer_.buf;
    bytes_ = static_cast<std::uint64_t>(buffer_.len);
    axes_ = buffer_.ndim;
    shape_ = buffer_.shape;
  }

  bool same_axes(const View& other, int first) const {
    if (axes_ != other.axes_) return false;
    for (int axis = first; axis < axes_; ++axis)
      if (shape_[axis] != other.shape_[axis]) return false;
    return true;
  }

  // By the name of its scalars' type, without Python: another thread could make a call meanwhile.
  static bool is_bfloat16(const PyArray_Descr* descr) {
    const std::string_view name = descr->typeobj->tp_name;
    return name == "bfloat16" || name.ends_with(".bfloat16");
  }
  static Type type_of(int numpy) {
    switch (numpy) {
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
      case NPY_INT:
        return Type::int32;
      case NPY_LONG:
      case NPY_LONGLONG:
        return Type::int64;
      default:  // the buffer protocol knows them
        return Type::none;
    }
  }
  // Python's struct module lists the formats; NumPy adds Z for complex numbers. The size of an
  // integer's letter depends on the platform, so the type follows from the item size.
  static Type type_of(const Py_buffer& buffer) {
    const char* format = buffer.format;
    if (format == nullptr) return Type::none;
    constexpr char kNative = std::endian::native == std::endian::little ? '<' : '>';
    if (*format == '@' || *format == '=' || *format == kNative) ++format;
    const bool is_complex = format[0] == 'Z';
    if (is_complex) ++format;
    if (format[0] == 0 || format[1] != 0) return Type::none;
    const char letter = format[0];
    if (is_complex)
      return letter == 'f' ? Type::complex64 : letter == 'd' ? Type::complex128 : Type::none;
    if (letter == 'f') return Type::float32;
    if (letter == 'd') return Type::float64;
    if (letter == 'e') return Type::float16;
    if (letter == '?') return buffer.itemsize == 1 ? Type::boolean : Type::none;
    if (std::strchr("bhilq", letter))
      return of_size(buffer.itemsize, Type::int8, Type::int16, Type::int32, Type::int64);
    if (std::strchr("BHILQ", letter))
      return of_size(buffer.itemsize, Type::uint8, Type::uint16, Type::uint32, Type::uint64);
    return Type::none;
  }
  static Type of_size(Py_ssize_t bytes, Type one, Type two, Type four, Type eight) {
    switch (bytes) {
      case 1:
        return one;
      case 2:
        return two;
      case 4:
        return four;
      case 8:
        return eight;
      default:
        return Type::none;
    }
  }
  // The buffer protocol has no name for ml_dtypes' bfloat16, and NumPy no buffer of such arrays:
  // their bytes are taken as uint16. Returns null, perhaps with an exception, for other objects,
  // and for swapped bytes. No Python runs: a signal's handler could raise in it, and be cleared.
  static PyObject* bfloat16_words(PyObject* object) {
    if (!PyArray_Check(object)) return nullptr;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (!is_bfloat16(PyArray_DESCR(array)) || !PyArray_ISNOTSWAPPED(array)) return nullptr;
    return PyArray_View(array, PyArray_DescrFromType(NPY_UINT16), &PyArray_Type);
  }

  Py_buffer buffer_;
  bool held_ = false, borrowed_ = false;
  Type type_ = Type::none;
  void* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  int axes_ = 0;
  const Py_ssize_t* shape_ = nullptr;
};

}  // namespace allreduce
