// Chains of element-wise operations as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "bindings/numpy_api.h"
#include "cpu/elementwise/chain.h"

namespace allreduce {

// The type of a NumPy dtype's number, if chains have it.
std::optional<Scalar> scalar_of(int number);

// An aligned array in this machine's byte order, of a type, or null.
PyArrayObject* array_of(PyObject* object, Scalar type);

// A chain bound to the shape of its result, which need not be there, and the strides of its inputs;
// nothing where these do not fit.
std::optional<BoundChain> bound_to(const Chain& chain, int axes, const npy_intp* shape,
                                   PyArrayObject* const* inputs);

// The native form of a Python chain.
const Chain& chain_of(nanobind::handle chain);

}  // namespace allreduce
