// Tasks on matrices: products, sums of rows, and losses.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/chain.h"
#include "bindings/python_replay.h"
#include "bindings/tensor.h"
#include "replay/tasks.h"

namespace allreduce {
namespace {

// The matrix of an array's last two axes.
Matrix matrix_of(PyArrayObject* array) {
  const int axes = PyArray_NDIM(array);
  return {PyArray_DIM(array, axes - 2), PyArray_DIM(array, axes - 1),
          PyArray_STRIDE(array, axes - 2), PyArray_STRIDE(array, axes - 1)};
}

// Whether NumPy would see one matrix and its own transposed.
bool is_one(PyArrayObject* a, PyArrayObject* b) { return PyArray_DATA(a) == PyArray_DATA(b); }

}  // namespace

template <class T>
bool PythonReplay::product_of(PyArrayObject* out, PyArrayObject* a, PyArrayObject* b) {
  if (!is_of<T>(out) || !is_of<T>(a) || !is_of<T>(b) || is_one(a, b)) return false;
  const std::optional<Product<T>> product =
      Product<T>::of(matrix_of(out), matrix_of(a), matrix_of(b));
  if (!product) return false;
  std::vector<typename ProductTask<T>::Axis> axes;
  const int leading = PyArray_NDIM(out) - 2;
  for (int axis = 0; axis < leading; ++axis) {
    const auto step = [&](PyArrayObject* array) -> std::ptrdiff_t {
      const int own = axis - (PyArray_NDIM(out) - PyArray_NDIM(array));
      return own < 0 ? 0 : stride_of(array, own);
    };
    axes.push_back({static_cast<std::size_t>(PyArray_DIM(out, axis)), step(out), step(a), step(b)});
  }
  const auto operand = [&](PyArrayObject* array) -> typename ProductTask<T>::Operand {
    const auto [first, last] = extent_of(array);
    const auto address = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array));
    return {place(array), static_cast<std::ptrdiff_t>(first - address),
            static_cast<std::ptrdiff_t>(last - address)};
  };
  replay_.add(std::make_unique<ProductTask<T>>(*product, std::move(axes), place(out), operand(a),
                                               operand(b)));
  return true;
}

bool PythonReplay::add_product(nb::handle out, nb::handle a, nb::handle b) {
  PyArrayObject *to = as_array(out), *left = as_array(a), *right = as_array(b);
  if (PyArray_NDIM(left) < 2 || PyArray_NDIM(right) < 2) return false;
  return product_of<float>(to, left, right) || product_of<double>(to, left, right);
}

template <class T>
bool PythonReplay::epilogue_of(const Chain& chain, PyArrayObject* out, PyArrayObject* a,
                               PyArrayObject* b, const Arrays& rest, std::int64_t rows,
                               bool in_place) {
  using Task = EpilogueTask<T>;
  if (!is_of<T>(a) || !is_of<T>(b) || is_one(a, b) || !is_contiguous(out)) return false;
  const Scalar type = sizeof(T) == 4 ? Scalar::float32 : Scalar::float64;
  bool fits = chain.inputs.size() == rest.size() + 1 && chain.inputs[0] == type &&
              scalar_of(PyArray_TYPE(out)) == chain.ops.back().out && (!in_place || is_of<T>(out));
  for (std::size_t i = 0; fits && i < rest.size(); ++i)
    fits = array_of(reinterpret_cast<PyObject*>(rest[i]), chain.inputs[i + 1]) != nullptr;
  const npy_intp all = PyArray_DIM(out, 0), columns = PyArray_DIM(out, 1);
  const auto size = static_cast<std::ptrdiff_t>(sizeof(T));
  const Matrix made{all, columns, columns * size, size};
  const std::optional<Product<T>> product = Product<T>::of(made, matrix_of(a), matrix_of(b));
  rows = std::min<std::int64_t>(rows, all);
  // A single row is a vector, which goes another way.
  if (!fits || !product || rows < 2 || all % rows == 1) return false;
  std::vector<typename Task::Input> others;
  for (PyArrayObject* each : rest) {
    const bool has_rows = PyArray_NDIM(each) == 2 && PyArray_DIM(each, 0) != 1;
    others.push_back({place(each), has_rows ? PyArray_STRIDE(each, 0) : 0});
  }
  const auto bound = [&](npy_intp count) -> std::optional<BoundChain> {
    // Views of as many rows, for their strides; the product itself is made where there is room.
    std::vector<nb::object> owners;
    Arrays inputs;
    const auto view = [&](npy_intp* shape, npy_intp* strides, PyArrayObject* like, int axes) {
      PyArray_Descr* type = PyArray_DESCR(like);
      Py_INCREF(type);
      owners.push_back(nb::steal(PyArray_NewFromDescr(&PyArray_Type, type, axes, shape, strides,
                                                      PyArray_DATA(like), 0, nullptr)));
      inputs.push_back(as_array(owners.back()));
    };
    npy_intp shape[2] = {count, columns}, strides[2] = {columns * size, size};
    view(shape, strides, a, 2);
    for (std::size_t i = 0; i < rest.size(); ++i) {
      if (!others[i].down) {
        inputs.push_back(rest[i]);
        continue;
      }
      npy_intp own[2] = {count, PyArray_DIM(rest[i], 1)};
      view(own, PyArray_STRIDES(rest[i]), rest[i], 2);
    }
    return bound_to(chain, 2, shape, inputs.data());
  };
  std::optional<BoundChain> whole = bound(rows), last;
  if (all % rows) last = bound(all % rows);
  if (!whole || (all % rows && !last)) return false;
  replay_.add(std::make_unique<Task>(
      *product, typename Task::Parts{rows, std::move(*whole), std::move(last)}, chain.ops.size(),
      typename Task::Input{place(out), PyArray_STRIDE(out, 0)},
      typename Task::Input{place(a), PyArray_STRIDE(a, 0)}, place(b), std::move(others), in_place,
      static_cast<std::size_t>(columns)));
  return true;
}

bool PythonReplay::add_epilogue(nb::handle chain, nb::handle out, nb::handle a, nb::handle b,
                                const nb::list& rest, std::int64_t rows, bool in_place) {
  const Chain& behind = chain_of(chain);
  PyArrayObject *to = as_array(out), *left = as_array(a), *right = as_array(b);
  if (PyArray_NDIM(to) != 2 || PyArray_NDIM(left) != 2 || PyArray_NDIM(right) != 2) return false;
  const Arrays others = arrays_of(rest);
  return epilogue_of<float>(behind, to, left, right, others, rows, in_place) ||
         epilogue_of<double>(behind, to, left, right, others, rows, in_place);
}

template <class T>
bool PythonReplay::sums_of(PyArrayObject* out, PyArrayObject* x) {
  const npy_intp columns = PyArray_DIM(out, 0),
                 rows = PyArray_SIZE(x) / std::max<npy_intp>(columns, 1);
  const bool fits = is_of<T>(out) && is_of<T>(x) && is_contiguous(out) && is_contiguous(x);
  if (!fits || !blas<T>().gemv || rows < 2 || columns < 2 || (rows | columns) >> 31) return false;
  replay_.add(std::make_unique<ColumnSumsTask<T>>(rows, columns, place(out), place(x)));
  return true;
}

bool PythonReplay::add_column_sums(nb::handle out, nb::handle x) {
  PyArrayObject *to = as_array(out), *from = as_array(x);
  const int axes = PyArray_NDIM(from);
  if (PyArray_NDIM(to) != 1 || axes < 2 || PyArray_DIM(from, axes - 1) != PyArray_DIM(to, 0))
    return false;
  return sums_of<float>(to, from) || sums_of<double>(to, from);
}

template <class T>
bool PythonReplay::loss_of(bool is_sparse, PyArrayObject* out, PyArrayObject* dy,
                           PyArrayObject* targets, PyArrayObject* logits) {
  const bool fits =
      is_of<T>(out) && (!dy || is_of<T>(dy)) && is_of<T>(logits) &&
      (is_sparse ? scalar_of(PyArray_TYPE(targets)) == Scalar::int64 : is_of<T>(targets));
  if (!fits || !PyArray_NDIM(logits)) return false;
  const npy_intp columns = PyArray_DIM(logits, PyArray_NDIM(logits) - 1);
  if (!columns || !PyArray_SIZE(logits)) return false;
  const npy_intp rows = PyArray_SIZE(logits) / columns;
  const bool sizes = PyArray_SIZE(out) == (dy ? PyArray_SIZE(logits) : rows) &&
                     PyArray_SIZE(targets) == (is_sparse ? rows : PyArray_SIZE(logits)) &&
                     (!dy || PyArray_SIZE(dy) == rows);
  if (!sizes) return false;
  const typename LossTask<T>::Places places{place(out), place(dy ? dy : out), place(targets),
                                            place(logits)};
  replay_.add(std::make_unique<LossTask<T>>(tensor_kernels().of<T>(), is_sparse, dy != nullptr,
                                            places, static_cast<std::size_t>(rows),
                                            static_cast<std::size_t>(columns)));
  return true;
}

bool PythonReplay::add_loss(bool is_sparse, nb::handle out, nb::handle dy, nb::handle targets,
                            nb::handle logits) {
  PyArrayObject *to = as_array(out), *slope = dy.is_none() ? nullptr : as_array(dy);
  PyArrayObject *from = as_array(targets), *rows = as_array(logits);
  for (PyArrayObject* each : {to, slope, from, rows})
    if (each && !is_contiguous(each)) return false;
  return loss_of<float>(is_sparse, to, slope, from, rows) ||
         loss_of<double>(is_sparse, to, slope, from, rows);
}

}  // namespace allreduce
