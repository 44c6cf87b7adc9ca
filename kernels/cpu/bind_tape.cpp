// Python's view of tapes. Each method that adds a task returns whether there is one for these
// arrays; where there is none, Python carries the instruction out.
#include "bind_tape.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind_chain.h"
#include "bind_tensor.h"
#include "numpy_api.h"
#include "tape.h"
#include "tasks.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

using Arrays = std::vector<PyArrayObject*>;

PyArrayObject* as_array(nb::handle object) {
  if (!PyArray_Check(object.ptr())) throw nb::type_error("a tape takes arrays of NumPy");
  return reinterpret_cast<PyArrayObject*>(object.ptr());
}

bool is_plain(PyArrayObject* array) {
  return PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array);
}

bool is_contiguous(PyArrayObject* array) {
  return is_plain(array) && PyArray_IS_C_CONTIGUOUS(array);
}

template <class T>
bool is_of(PyArrayObject* array) {
  return PyArray_TYPE(array) == (sizeof(T) == 4 ? NPY_FLOAT : NPY_DOUBLE) && is_plain(array);
}

bool interrupted() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

std::ptrdiff_t stride_of(PyArrayObject* array, int axis) {
  return PyArray_DIM(array, axis) == 1 ? 0 : PyArray_STRIDE(array, axis);
}

class PythonTape {
 public:
  // Args: what each step is given, and of what else may move a list and a place in it, which still
  // has to hold the same array.
  PythonTape(const nb::list& given, const nb::list& held);
  PythonTape(const PythonTape&) = delete;
  PythonTape& operator=(const PythonTape&) = delete;

  // Whether this step's arrays lie as those did, and others where they were; then tasks may run.
  bool begin(const nb::list& given);
  Py_ssize_t run(std::size_t first, std::size_t last);
  std::size_t size() const { return tape_.size(); }

  bool add_chain(nb::handle chain, nb::handle out, const nb::list& inputs);
  bool add_copy(nb::handle out, nb::handle value);
  bool add_product(nb::handle out, nb::handle a, nb::handle b);
  bool add_epilogue(nb::handle chain, nb::handle out, nb::handle a, nb::handle b,
                    const nb::list& rest, std::int64_t rows, bool in_place);
  bool add_column_sums(nb::handle out, nb::handle x);
  bool add_constant(nb::handle out, nb::handle value);
  bool add_loss(bool is_sparse, nb::handle out, nb::handle dy, nb::handle targets,
                nb::handle logits);

 private:
  // What the first of the arrays was like; it may be large, and is not kept.
  struct Given {
    int type;
    std::vector<npy_intp> shape, strides;
    std::uintptr_t address, first, last;
  };
  struct Held {
    nb::object list, array;
    std::size_t index;
  };

  // Where an array lies; what is not given to each step is kept alive.
  Place place(PyArrayObject* array);
  bool bind_chain_task(const Chain& chain, PyArrayObject* out, const Arrays& inputs);
  template <class T>
  bool product_of(PyArrayObject* out, PyArrayObject* a, PyArrayObject* b);
  template <class T>
  bool epilogue_of(const Chain& chain, PyArrayObject* out, PyArrayObject* a, PyArrayObject* b,
                   const Arrays& rest, std::int64_t rows, bool in_place);
  template <class T>
  bool sums_of(PyArrayObject* out, PyArrayObject* x);
  template <class T>
  bool loss_of(bool is_sparse, PyArrayObject* out, PyArrayObject* dy, PyArrayObject* targets,
               PyArrayObject* logits);

  std::vector<Given> given_;
  std::vector<Held> held_;
  std::vector<nb::object> kept_;
  Tape tape_;
};

// The first byte of an array and the one behind its last.
std::pair<std::uintptr_t, std::uintptr_t> extent_of(PyArrayObject* array) {
  std::uintptr_t first = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array)), last = first;
  if (!PyArray_SIZE(array)) return {first, first};
  for (int axis = 0; axis < PyArray_NDIM(array); ++axis) {
    const npy_intp reach = (PyArray_DIM(array, axis) - 1) * PyArray_STRIDE(array, axis);
    (reach < 0 ? first : last) += static_cast<std::uintptr_t>(reach);
  }
  return {first, last + static_cast<std::uintptr_t>(PyArray_ITEMSIZE(array))};
}

PythonTape::PythonTape(const nb::list& given, const nb::list& held) : tape_(given.size()) {
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

bool PythonTape::begin(const nb::list& given) {
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
    for (std::size_t j = 0; j < i; ++j)  // a product of a matrix with itself goes another way
      if (PyArray_DATA(reinterpret_cast<PyArrayObject*>(
              PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(j)))) == PyArray_DATA(array))
        return false;
    tape_.move(i, PyArray_DATA(array));
  }
  return true;
}

Py_ssize_t PythonTape::run(std::size_t first, std::size_t last) {
  if (last > tape_.size() || first > last) throw nb::index_error("no such tasks");
  std::size_t done;
  {
    const nb::gil_scoped_release released;
    static const std::function<bool()> kInterrupted = interrupted;
    done = tape_.run(first, last, kInterrupted);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return done == last - first ? -1 : static_cast<Py_ssize_t>(done);
}

Place PythonTape::place(PyArrayObject* array) {
  const auto [first, last] = extent_of(array);
  const auto address = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array));
  for (std::size_t i = 0; i < given_.size(); ++i)
    if (first < last && given_[i].first <= first && last <= given_[i].last)
      return {i + 1, address - given_[i].address};
  kept_.push_back(nb::borrow(reinterpret_cast<PyObject*>(array)));
  return {0, address};
}

Arrays arrays_of(const nb::list& list) {
  Arrays arrays;
  for (nb::handle each : list) arrays.push_back(as_array(each));
  return arrays;
}

bool PythonTape::bind_chain_task(const Chain& chain, PyArrayObject* out, const Arrays& inputs) {
  bool fits = chain.inputs.size() == inputs.size() && is_contiguous(out) &&
              scalar_of(PyArray_TYPE(out)) == chain.links.back().out;
  for (std::size_t i = 0; fits && i < inputs.size(); ++i)
    fits = array_of(reinterpret_cast<PyObject*>(inputs[i]), chain.inputs[i]) != nullptr;
  if (!fits) return false;
  std::optional<BoundChain> bound =
      bound_to(chain, PyArray_NDIM(out), PyArray_DIMS(out), inputs.data());
  if (!bound) return false;
  std::vector<Place> places;
  for (PyArrayObject* each : inputs) places.push_back(place(each));
  tape_.add(std::make_unique<ChainTask>(std::move(*bound), chain.links.size(), place(out),
                                        std::move(places)));
  return true;
}

bool PythonTape::add_chain(nb::handle chain, nb::handle out, const nb::list& inputs) {
  return bind_chain_task(chain_of(chain), as_array(out), arrays_of(inputs));
}

bool PythonTape::add_copy(nb::handle out, nb::handle value) {
  PyArrayObject *to = as_array(out), *from = as_array(value);
  const std::optional<Scalar> target = scalar_of(PyArray_TYPE(to));
  const std::optional<Scalar> source = scalar_of(PyArray_TYPE(from));
  if (!target || !source) return false;
  const LinkOp op = target == source ? LinkOp::copy : LinkOp::cast;
  if (!kernels_in_use().links.find(op, *source, *target)) return false;
  const Chain chain{{Link{op, *source, *target, 1, {0, 0, 0}, 0}}, {*source}};
  return bind_chain_task(chain, to, {from});
}

// The matrix of an array's last two axes.
Matrix matrix_of(PyArrayObject* array) {
  const int axes = PyArray_NDIM(array);
  return {PyArray_DIM(array, axes - 2), PyArray_DIM(array, axes - 1),
          PyArray_STRIDE(array, axes - 2), PyArray_STRIDE(array, axes - 1)};
}

// Whether NumPy would see one matrix and its own transposed.
bool is_one(PyArrayObject* a, PyArrayObject* b) { return PyArray_DATA(a) == PyArray_DATA(b); }

template <class T>
bool PythonTape::product_of(PyArrayObject* out, PyArrayObject* a, PyArrayObject* b) {
  if (!is_of<T>(out) || !is_of<T>(a) || !is_of<T>(b) || is_one(a, b)) return false;
  const std::optional<Product<T>> product =
      Product<T>::of(matrix_of(out), matrix_of(a), matrix_of(b));
  if (!product) return false;
  std::vector<typename ProductTask<T>::Axis> axes;
  const int leading = PyArray_NDIM(out) - 2;
  const auto [first, last] = extent_of(a);
  const auto [begin, end] = extent_of(b);
  const bool overlap = first < end && begin < last;
  for (int axis = 0; axis < leading; ++axis) {
    const auto step = [&](PyArrayObject* array) -> std::ptrdiff_t {
      const int own = axis - (PyArray_NDIM(out) - PyArray_NDIM(array));
      return own < 0 ? 0 : stride_of(array, own);
    };
    axes.push_back({static_cast<std::size_t>(PyArray_DIM(out, axis)), step(out), step(a), step(b)});
    // Somewhere it could be a matrix and its own transposed.
    if (overlap && step(a) != step(b)) return false;
  }
  tape_.add(
      std::make_unique<ProductTask<T>>(*product, std::move(axes), place(out), place(a), place(b)));
  return true;
}

bool PythonTape::add_product(nb::handle out, nb::handle a, nb::handle b) {
  PyArrayObject *to = as_array(out), *left = as_array(a), *right = as_array(b);
  if (PyArray_NDIM(left) < 2 || PyArray_NDIM(right) < 2) return false;
  return product_of<float>(to, left, right) || product_of<double>(to, left, right);
}

template <class T>
bool PythonTape::epilogue_of(const Chain& chain, PyArrayObject* out, PyArrayObject* a,
                             PyArrayObject* b, const Arrays& rest, std::int64_t rows,
                             bool in_place) {
  using Task = EpilogueTask<T>;
  if (!is_of<T>(a) || !is_of<T>(b) || is_one(a, b) || !is_contiguous(out)) return false;
  const Scalar type = sizeof(T) == 4 ? Scalar::float32 : Scalar::float64;
  bool fits = chain.inputs.size() == rest.size() + 1 && chain.inputs[0] == type &&
              scalar_of(PyArray_TYPE(out)) == chain.links.back().out &&
              (!in_place || is_of<T>(out));
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
  tape_.add(std::make_unique<Task>(
      *product, typename Task::Parts{rows, std::move(*whole), std::move(last)}, chain.links.size(),
      typename Task::Input{place(out), PyArray_STRIDE(out, 0)},
      typename Task::Input{place(a), PyArray_STRIDE(a, 0)}, place(b), std::move(others), in_place,
      static_cast<std::size_t>(columns)));
  return true;
}

bool PythonTape::add_epilogue(nb::handle chain, nb::handle out, nb::handle a, nb::handle b,
                              const nb::list& rest, std::int64_t rows, bool in_place) {
  const Chain& behind = chain_of(chain);
  PyArrayObject *to = as_array(out), *left = as_array(a), *right = as_array(b);
  if (PyArray_NDIM(to) != 2 || PyArray_NDIM(left) != 2 || PyArray_NDIM(right) != 2) return false;
  const Arrays others = arrays_of(rest);
  return epilogue_of<float>(behind, to, left, right, others, rows, in_place) ||
         epilogue_of<double>(behind, to, left, right, others, rows, in_place);
}

template <class T>
bool PythonTape::sums_of(PyArrayObject* out, PyArrayObject* x) {
  const npy_intp columns = PyArray_DIM(out, 0),
                 rows = PyArray_SIZE(x) / std::max<npy_intp>(columns, 1);
  const bool fits = is_of<T>(out) && is_of<T>(x) && is_contiguous(out) && is_contiguous(x);
  if (!fits || !blas<T>().gemv || rows < 2 || columns < 2 || (rows | columns) >> 31) return false;
  tape_.add(std::make_unique<ColumnSumsTask<T>>(rows, columns, place(out), place(x)));
  return true;
}

bool PythonTape::add_column_sums(nb::handle out, nb::handle x) {
  PyArrayObject *to = as_array(out), *from = as_array(x);
  const int axes = PyArray_NDIM(from);
  if (PyArray_NDIM(to) != 1 || axes < 2 || PyArray_DIM(from, axes - 1) != PyArray_DIM(to, 0))
    return false;
  return sums_of<float>(to, from) || sums_of<double>(to, from);
}

bool PythonTape::add_constant(nb::handle out, nb::handle value) {
  PyArrayObject *to = as_array(out), *from = as_array(value);
  if (!is_contiguous(to) || !is_contiguous(from) || PyArray_NBYTES(to) != PyArray_NBYTES(from))
    return false;
  const char* bytes = PyArray_BYTES(from);
  tape_.add(std::make_unique<ConstantTask>(std::vector<char>(bytes, bytes + PyArray_NBYTES(from)),
                                           place(to)));
  return true;
}

template <class T>
bool PythonTape::loss_of(bool is_sparse, PyArrayObject* out, PyArrayObject* dy,
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
  tape_.add(std::make_unique<LossTask<T>>(kernels_in_use().of<T>(), is_sparse, dy != nullptr,
                                          places, static_cast<std::size_t>(rows),
                                          static_cast<std::size_t>(columns)));
  return true;
}

bool PythonTape::add_loss(bool is_sparse, nb::handle out, nb::handle dy, nb::handle targets,
                          nb::handle logits) {
  PyArrayObject *to = as_array(out), *slope = dy.is_none() ? nullptr : as_array(dy);
  PyArrayObject *from = as_array(targets), *rows = as_array(logits);
  for (PyArrayObject* each : {to, slope, from, rows})
    if (each && !is_contiguous(each)) return false;
  return loss_of<float>(is_sparse, to, slope, from, rows) ||
         loss_of<double>(is_sparse, to, slope, from, rows);
}

}  // namespace

void bind_tape(nb::module_& m) {
  nb::class_<PythonTape>(m, "Tape")
      .def(nb::init<nb::list, nb::list>(), nb::arg("given"), nb::arg("held"))
      .def("begin", &PythonTape::begin, nb::arg("given"))
      .def("run", &PythonTape::run, nb::arg("first"), nb::arg("last"))
      .def("__len__", &PythonTape::size)
      .def("add_chain", &PythonTape::add_chain, nb::arg("chain"), nb::arg("out"), nb::arg("inputs"))
      .def("add_copy", &PythonTape::add_copy, nb::arg("out"), nb::arg("value"))
      .def("add_product", &PythonTape::add_product, nb::arg("out"), nb::arg("a"), nb::arg("b"))
      .def("add_epilogue", &PythonTape::add_epilogue, nb::arg("chain"), nb::arg("out"),
           nb::arg("a"), nb::arg("b"), nb::arg("rest"), nb::arg("rows"), nb::arg("in_place"))
      .def("add_column_sums", &PythonTape::add_column_sums, nb::arg("out"), nb::arg("x"))
      .def("add_constant", &PythonTape::add_constant, nb::arg("out"), nb::arg("value"))
      .def("add_loss", &PythonTape::add_loss, nb::arg("is_sparse"), nb::arg("out"),
           nb::arg("dy").none(), nb::arg("targets"), nb::arg("logits"));
  m.def("find_blas", &find_blas, nb::arg("module"));
}

}  // namespace allreduce
