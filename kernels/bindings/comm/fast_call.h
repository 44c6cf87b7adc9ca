// A synchronous call of plain NumPy arrays, from its arguments as Python passes them.
#pragma once

#include <nanobind/nanobind.h>

#include "shm/progress/member.h"

namespace allreduce {

// The fixed properties of a method.
struct FastKinds {
  PyObject* by_operator;  // a dict (None where there is no operator): what `decode` takes
  PyObject* usual;        // the operator without one
};

// A communicator's attributes and a call's keywords: interned, so that they are compared by
// address; a name that is not goes the careful way.
struct FastNames {
  PyObject* dispatch = PyUnicode_InternFromString("_dispatch");
  PyObject* fast_path = PyUnicode_InternFromString("fast_path");  // of the dispatcher, as all below
  PyObject* finish = PyUnicode_InternFromString("finish_fast");
  PyObject* interrupt = PyUnicode_InternFromString("interrupt_fast");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* out = PyUnicode_InternFromString("out");
  PyObject* root = PyUnicode_InternFromString("root");
};

struct FastArguments {
  // Reads the arguments after the communicator; false if the fast path does not support them.
  bool read(const FastNames& names, PyObject* const* values, Py_ssize_t count, PyObject* keywords);

  PyObject *x = nullptr, *op = nullptr, *out = nullptr, *root = nullptr;
  bool named = false;  // whether there are keywords
};

// Carries a call out, and returns its result; null, without an exception, if it needs the careful
// way.
nanobind::object fast_call(const FastKinds& kinds, const FastNames& names, Member& member,
                           nanobind::handle dispatch, const FastArguments& given);

}  // namespace allreduce
