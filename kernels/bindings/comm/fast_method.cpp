// A method that is native from the caller's line on, for synchronous calls of plain NumPy arrays.
//
// It stands before a Python function, which gets whatever is not plain: other arrays, copies, wrong
// arguments. all_reduce of 8 bytes between 2 processes: 1.1 us, of which a Python method that
// called native code was 0.4.
#include "bindings/comm/array_calls.h"
#include "bindings/comm/fast_call.h"

// After Python.h.
#include <structmember.h>

namespace nb = nanobind;

namespace allreduce {
namespace {

struct FastMethod {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* careful;  // the Python function
  FastKinds kinds;
  PyObject* dict;  // its name, its text, ...
  PyObject* weak;  // references to it
};

const FastNames* names = nullptr;

PyObject* call(PyObject* self, PyObject* const* values, std::size_t flags, PyObject* named) {
  const auto& method = *reinterpret_cast<FastMethod*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  FastArguments given;
  if (count > 0 && given.read(*names, values + 1, count - 1, named)) {
    const nb::object dispatch = nb::steal(PyObject_GetAttr(values[0], names->dispatch));
    nb::object found;
    if (dispatch.is_valid()) found = nb::steal(PyObject_GetAttr(dispatch.ptr(), names->fast_path));
    PyErr_Clear();  // of something that is no communicator
    if (found.is_valid() && nb::isinstance<Member>(found)) {
      try {
        Member& member = *nb::inst_ptr<Member>(found);
        nb::object out = fast_call(method.kinds, *names, member, dispatch, given);
        if (out.is_valid()) return out.release().ptr();
      } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
      } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
      } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
      }
    }
  }
  if (method.careful == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this method has been collected as garbage");
    return nullptr;
  }
  return PyObject_Vectorcall(method.careful, values, flags, named);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *careful, *kinds, *usual;
  if (!PyArg_ParseTuple(args, "OO!O", &careful, &PyDict_Type, &kinds, &usual)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto& method = *reinterpret_cast<FastMethod*>(self);
  method.vectorcall = call;
  method.careful = Py_NewRef(careful);
  method.kinds = {Py_NewRef(kinds), Py_NewRef(usual)};
  return self;
}

int visit_all(PyObject* self, visitproc visit, void* arg) {
  auto& method = *reinterpret_cast<FastMethod*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(method.careful);
  Py_VISIT(method.kinds.by_operator);
  Py_VISIT(method.kinds.usual);
  Py_VISIT(method.dict);
  return 0;
}

int clear(PyObject* self) {
  auto& method = *reinterpret_cast<FastMethod*>(self);
  Py_CLEAR(method.careful);
  Py_CLEAR(method.kinds.by_operator);
  Py_CLEAR(method.kinds.usual);
  Py_CLEAR(method.dict);
  return 0;
}

void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  PyObject_ClearWeakRefs(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* bind(PyObject* self, PyObject* owner, PyObject*) {
  return owner == nullptr ? Py_NewRef(self) : PyMethod_New(self, owner);
}

// Pickled by name, as a function is.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastMethod, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(FastMethod, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(FastMethod, weak), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                       {Py_tp_traverse, reinterpret_cast<void*>(visit_all)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {Py_tp_getset, properties},
                       {0, nullptr}};
PyType_Spec spec = {"allreduce._native.FastMethod", sizeof(FastMethod), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                        Py_TPFLAGS_METHOD_DESCRIPTOR,
                    slots};

}  // namespace

void bind_fast_method(nb::module_& m) {
  names = new FastNames;  // for as long as the process lives
  m.attr("FastMethod") = nb::steal(PyType_FromSpec(&spec));
}

}  // namespace allreduce
