// Python's view of chains of element-wise operations.
#include "bindings/graph/chain.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/graph/tensor.h"
#include "bindings/numpy_api.h"
#include "core/gil.h"
#include "cpu/elementwise/chain.h"

namespace nb = nanobind;

namespace allreduce {

std::optional<Scalar> scalar_of(int number) {
  switch (number) {
    case NPY_BOOL:
      return Scalar::boolean;
    case NPY_FLOAT:
      return Scalar::float32;
    case NPY_DOUBLE:
      return Scalar::float64;
    default:
      break;
  }
  if (!PyTypeNum_ISINTEGER(number) || PyTypeNum_ISUNSIGNED(number)) return std::nullopt;
  if (number == NPY_INT || (number == NPY_LONG && sizeof(long) == 4)) return Scalar::int32;
  if (number == NPY_LONG || number == NPY_LONGLONG) return Scalar::int64;
  return std::nullopt;
}

PyArrayObject* array_of(PyObject* object, Scalar type) {
  if (!PyArray_Check(object)) return nullptr;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const bool fits = scalar_of(PyArray_TYPE(array)) == type && PyArray_ISALIGNED(array) &&
                    PyArray_ISNOTSWAPPED(array);
  return fits ? array : nullptr;
}

namespace {

struct Named {
  std::string_view name;
  int operands;
};

// In the order of `ElementwiseOp`.
constexpr Named kOps[] = {
    {"add", 2},           {"subtract", 2},    {"multiply", 2},    {"divide", 2},
    {"maximum", 2},       {"minimum", 2},     {"negative", 1},    {"absolute", 1},
    {"sign", 1},          {"square", 1},      {"sqrt", 1},        {"relu", 1},
    {"relu_gradient", 2}, {"less", 2},        {"less_equal", 2},  {"greater", 2},
    {"greater_equal", 2}, {"equal", 2},       {"not_equal", 2},   {"logical_and", 2},
    {"logical_or", 2},    {"logical_xor", 2}, {"logical_not", 1}, {"isfinite", 1},
    {"isnan", 1},         {"isinf", 1},       {"where", 3},       {"cast", 1},
    {"copy", 1}};

std::optional<ElementwiseOp> op_of(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kOps); ++i)
    if (kOps[i].name == name) return static_cast<ElementwiseOp>(i);
  return std::nullopt;
}

// An operation's name, what it reads, the number of its dtype, and its scratch slot.
using Row = std::tuple<std::string, std::vector<int>, int, int>;

// A chain, and the shapes and strides that it was last bound to.
class PythonChain {
 public:
  explicit PythonChain(Chain chain) : chain_(std::move(chain)) {}

  const Chain& chain() const { return chain_; }

  // False if an array has the wrong dtype, shape or strides; then nothing is done.
  bool run(nb::handle out, const nb::list& inputs);

 private:
  struct Bound {
    const ElementwiseKernels* kernels;
    std::vector<std::size_t> shape;
    std::vector<std::vector<std::ptrdiff_t>> strides;
    BoundChain chain;
  };

  std::shared_ptr<const Bound> bind(PyArrayObject* out, PyArrayObject* const* inputs);

  Chain chain_;
  std::shared_ptr<const Bound> bound_;  // read and changed with the interpreter's lock
};

// Bytes from one element to the next along an axis of the result; nothing where they do not fit.
std::optional<std::ptrdiff_t> stride_along(PyArrayObject* input, int axes, const npy_intp* shape,
                                           int axis) {
  const int own = axis - (axes - PyArray_NDIM(input));
  if (own < 0 || PyArray_DIM(input, own) == 1) return 0;
  if (PyArray_DIM(input, own) != shape[axis]) return std::nullopt;
  return PyArray_STRIDE(input, own);
}

bool PythonChain::run(nb::handle out, const nb::list& inputs) {
  PyArrayObject* const target = array_of(out.ptr(), chain_.ops.back().out);
  const std::size_t count = chain_.inputs.size();
  if (!target || !PyArray_IS_C_CONTIGUOUS(target) || !PyArray_ISWRITEABLE(target)) return false;
  if (inputs.size() != count) return false;
  PyArrayObject* arrays[kMaxInputs];
  const char* data[kMaxInputs];
  for (std::size_t i = 0; i < count; ++i) {
    arrays[i] =
        array_of(PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i)), chain_.inputs[i]);
    if (!arrays[i]) return false;
    data[i] = PyArray_BYTES(arrays[i]);
  }
  const std::shared_ptr<const Bound> bound = bind(target, arrays);
  if (!bound) return false;
  char* const place = PyArray_BYTES(target);
  std::optional<GilRelease> released;
  if (bound->chain.elements() * chain_.ops.size() >= kWorthUnlocking) released.emplace();
  bound->chain.run(place, data);
  return true;
}

std::shared_ptr<const PythonChain::Bound> PythonChain::bind(PyArrayObject* out,
                                                            PyArrayObject* const* inputs) {
  const int axes = PyArray_NDIM(out);
  const ElementwiseKernels* kernels = &tensor_kernels().ops;
  const std::size_t count = chain_.inputs.size();
  bool same = bound_ && bound_->kernels == kernels &&
              bound_->shape.size() == static_cast<std::size_t>(axes);
  for (int axis = 0; same && axis < axes; ++axis) {
    same = static_cast<npy_intp>(bound_->shape[axis]) == PyArray_DIM(out, axis);
    for (std::size_t i = 0; same && i < count; ++i)
      same = stride_along(inputs[i], axes, PyArray_DIMS(out), axis) == bound_->strides[i][axis];
  }
  if (same) return bound_;
  std::optional<BoundChain> chain = bound_to(chain_, axes, PyArray_DIMS(out), inputs);
  if (!chain) return nullptr;
  auto bound = std::make_shared<Bound>(Bound{kernels, {}, {}, std::move(*chain)});
  bound->shape.assign(PyArray_DIMS(out), PyArray_DIMS(out) + axes);
  bound->strides.resize(count);
  for (std::size_t i = 0; i < count; ++i)
    for (int axis = 0; axis < axes; ++axis)
      bound->strides[i].push_back(*stride_along(inputs[i], axes, PyArray_DIMS(out), axis));
  bound_ = std::move(bound);
  return bound_;
}

// The type of the value that an operation appended to a chain reads.
Scalar type_of(const Chain& chain, int read) {
  const auto place = static_cast<std::size_t>(read >= 0 ? read : -1 - read);
  if (place >= (read >= 0 ? chain.inputs.size() : chain.ops.size()))
    throw nb::value_error("an operation reads a value that does not exist");
  return read >= 0 ? chain.inputs[place] : chain.ops[place].out;
}

// Whether all operands of an operation appended to a chain have its type.
bool fits(const Chain& chain, const ChainOp& entry) {
  if (entry.count != kOps[static_cast<std::size_t>(entry.op)].operands)
    throw nb::value_error("an operation has the wrong number of operands");
  bool is_one_type = true;
  for (int i = 0; i < entry.count; ++i) {
    const bool is_condition = entry.op == ElementwiseOp::where && i == 0;
    const Scalar wanted = is_condition ? Scalar::boolean : entry.in;
    is_one_type = type_of(chain, entry.reads[i]) == wanted && is_one_type;
  }
  return is_one_type;
}

void check_slot(const Chain& chain, const ChainOp& entry) {
  if (entry.slot < 0) throw nb::value_error("an operation has no scratch slot");
  for (const ChainOp& each : chain.ops)
    if (each.slot == entry.slot && each.out != entry.out)
      throw nb::value_error("a slot for values of several types");
}

// The chain of these operations on inputs of these dtypes, or nothing where one has no kernel here.
std::optional<PythonChain> make_chain(const std::vector<Row>& rows,
                                      const std::vector<int>& dtypes) {
  Chain chain;
  if (dtypes.size() > kMaxInputs) return std::nullopt;
  for (int number : dtypes) {
    const std::optional<Scalar> type = scalar_of(number);
    if (!type) return std::nullopt;
    chain.inputs.push_back(*type);
  }
  for (const auto& [name, reads, number, slot] : rows) {
    const std::optional<ElementwiseOp> op = op_of(name);
    const std::optional<Scalar> out = scalar_of(number);
    if (!op || !out || reads.empty() || reads.size() > kMaxReads) return std::nullopt;
    ChainOp entry{*op, {}, *out, static_cast<int>(reads.size()), {0, 0, 0}, slot};
    std::copy(reads.begin(), reads.end(), entry.reads);
    entry.in = type_of(chain, reads.back());
    check_slot(chain, entry);
    if (!fits(chain, entry)) return std::nullopt;
    if (!tensor_kernels().ops.find(entry.op, entry.in, entry.out)) return std::nullopt;
    chain.ops.push_back(entry);
  }
  return PythonChain(std::move(chain));
}

}  // namespace

std::optional<BoundChain> bound_to(const Chain& chain, int axes, const npy_intp* shape,
                                   PyArrayObject* const* inputs) {
  std::vector<std::vector<std::ptrdiff_t>> strides(chain.inputs.size());
  for (std::size_t i = 0; i < strides.size(); ++i) {
    if (PyArray_NDIM(inputs[i]) > axes) return std::nullopt;
    for (int axis = 0; axis < axes; ++axis) {
      const std::optional<std::ptrdiff_t> stride = stride_along(inputs[i], axes, shape, axis);
      if (!stride) return std::nullopt;
      strides[i].push_back(*stride);
    }
  }
  return BoundChain(chain, tensor_kernels().ops, {shape, shape + axes}, std::move(strides));
}

const Chain& chain_of(nb::handle chain) { return nb::cast<const PythonChain&>(chain).chain(); }

void bind_chain(nb::module_& m) {
  nb::class_<PythonChain>(m, "Chain")
      .def("run", &PythonChain::run, nb::arg("out"), nb::arg("inputs"));
  m.def("chain", make_chain, nb::arg("ops"), nb::arg("dtypes"));
}

}  // namespace allreduce
