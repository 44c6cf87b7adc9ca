// A method that is native from the caller's line on, for synchronous calls of plain NumPy arrays.
//
// It stands before a Python function, which gets whatever is not plain: other arrays, copies, wrong
// arguments. all_reduce of 8 bytes between 2 processes: 1.1 us, of which a Python method that
// called native code was 0.4.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>

#include "bindings/comm/array_calls.h"
#include "core/segments.h"

// After Python.h.
#include <structmember.h>

namespace nb = nanobind;

namespace allreduce {
namespace {

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

const FastNames* names = nullptr;

struct FastArguments {
  // Reads the arguments after the communicator; false if the fast path does not support them.
  bool read(PyObject* const* values, Py_ssize_t count, PyObject* keywords) {
    if (count > 1) return false;
    if (count == 1) x = values[0];
    const Py_ssize_t given = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    named = given != 0;
    for (Py_ssize_t i = 0; i < given; ++i) {
      const PyObject* name = PyTuple_GET_ITEM(keywords, i);
      PyObject* value = values[count + i];
      if (name == names->out)
        out = value == Py_None ? nullptr : value;
      else if (name == names->op)
        op = value;
      else if (name == names->root)
        root = value;
      else
        return false;
    }
    return x == nullptr || PyArray_CheckExact(x);
  }

  PyObject *x = nullptr, *op = nullptr, *out = nullptr, *root = nullptr;
  bool named = false;  // whether there are keywords
};

// Polls a small call's peers before releasing the GIL, which costs 0.1 us.
constexpr int kHeldLooks = 16;

// Finds the call's kind by its operator, and its root; false if one of them is something else.
bool look_up(const FastKinds& kinds, const FastArguments& given, int members, Call& call) {
  PyObject* op = given.op == nullptr ? kinds.usual : given.op;
  if (given.op != nullptr && (kinds.usual == Py_None || !PyUnicode_CheckExact(op))) return false;
  PyObject* kind = PyDict_GetItemWithError(kinds.by_operator, op);
  if (kind == nullptr) return false;
  call = decode(static_cast<std::uint32_t>(PyLong_AsUnsignedLong(kind)));
  if (given.root == nullptr) return true;
  const bool rooted =
      call.collective == Collective::reduce || call.collective == Collective::broadcast;
  if (!rooted || !PyLong_CheckExact(given.root)) return false;
  int overflow = 0;
  const long root = PyLong_AsLongAndOverflow(given.root, &overflow);
  if (overflow != 0 || root < 0 || root >= members) return false;
  call.root = static_cast<int>(root);
  return true;
}

bool gets_nothing(const Call& call, const Member& member) {
  return call.collective == Collective::barrier ||
         (call.collective == Collective::reduce && member.index() != call.root);
}

// Makes the array that a result goes to; null if the shape does not divide, or memory is short.
nb::object new_output(const Call& call, PyArrayObject* x, int members) {
  npy_intp shape[NPY_MAXDIMS];
  const int axes = PyArray_NDIM(x);
  std::copy_n(PyArray_DIMS(x), axes, shape);
  if (call.collective == Collective::all_gather) {
    if (axes == 0 || __builtin_mul_overflow(shape[0], members, &shape[0])) return {};
  } else if (call.collective == Collective::reduce_scatter) {
    if (axes == 0 || shape[0] % members != 0) return {};
    shape[0] /= members;
  }
  PyArray_Descr* type = PyArray_DESCR(x);
  Py_INCREF(type);
  PyObject* made =
      PyArray_NewFromDescr(&PyArray_Type, type, axes, shape, nullptr, nullptr, 0, nullptr);
  PyErr_Clear();  // the slow path reports the shortage
  return nb::steal(made);
}

// Whether arrays of these shapes need nothing but their bytes moved: no copy, no error.
bool plain(const Call& call, const View& in, const View& out, std::uint64_t members) {
  if (out.type() != in.type()) return false;
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
      return in.same_shape(out) && (in.data() == out.data() || !in.overlaps(out));
    case Collective::all_to_all:
      return in.same_rows(out) && in.rows() == out.rows() && in.rows() % members == 0 &&
             !in.overlaps(out);
    case Collective::all_gather:
      return in.same_rows(out) && in.rows() * members == out.rows() && !in.overlaps(out);
    case Collective::reduce_scatter:
      return in.same_rows(out) && in.rows() == out.rows() * members && !in.overlaps(out);
    default:
      return false;
  }
}

// Starts a call whose arrays are plain, and says where its result will be; null if they are not.
std::shared_ptr<Work> start(Member& member, Call call, const FastArguments& given,
                            nb::object& out) {
  const int members = member.group().members();
  if (call.collective == Collective::barrier)
    return given.x == nullptr && !given.named ? member.start(call, nullptr, nullptr) : nullptr;
  if (given.x == nullptr) return nullptr;
  const View in(given.x, false);
  if (in.type() == Type::none) return nullptr;
  const bool nothing = gets_nothing(call, member);
  if (!nothing) {
    if (given.out == nullptr)
      out = new_output(call, reinterpret_cast<PyArrayObject*>(given.x), members);
    else
      out = PyArray_CheckExact(given.out) ? nb::borrow(given.out) : nb::object();
    if (!out.is_valid()) return nullptr;
  }
  const View target(nothing ? Py_None : out.ptr(), true);
  const auto size = static_cast<std::uint64_t>(members);
  if (!nothing && !plain(call, in, target, size)) return nullptr;
  call.type = in.type();
  if (lacks_kernel(call)) return nullptr;
  call.count = count_of(call, {}, in, target, size);
  if (call.count >> kCountBits != 0) return nullptr;
  return begin(member, call, in, target.data(), {detail_hash(call, {}, in), {}, {}});
}

bool settled(const Work& work) {
  return work.state.load(std::memory_order_acquire) != State::pending;
}

// Looks a few times, with the GIL, whether a small call can be completed.
void look(Member& member, const Work& work) {
  if (work.call.path != Path::eager || member.group().oversubscribed()) return;
  for (int i = 0; i < kHeldLooks && !settled(work); ++i) {
    if (member.advance() == Progress::moved) return;  // another call's, which may be large
    relax();
  }
}

// Ends the communicator if a call raises before it is settled: its arrays may be freed, and no step
// touches them after that.
class Guard {
 public:
  Guard(Member& member, const std::shared_ptr<Work>& work) : member_(member), work_(work) {}
  ~Guard() {
    if (work_ && !settled(*work_)) member_.abort("a collective was left in the middle");
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  Member& member_;
  const std::shared_ptr<Work>& work_;
};

// Carries a call out, and returns its result; null, without an exception, if it needs the careful
// way.
nb::object fast_call(const FastKinds& kinds, Member& member, nb::handle dispatch,
                     const FastArguments& given) {
  Call call;
  if (!look_up(kinds, given, member.group().members(), call)) return {};
  nb::object out = nb::none();
  std::shared_ptr<Work> work;
  const Guard guard(member, work);
  try {
    work = start(member, call, given, out);
    if (!work) return {};
    look(member, *work);
    if (!settled(*work)) wait(member, *work, member.fast_seconds);
  } catch (nb::python_error& error) {  // a signal's handler raised in the middle
    dispatch.attr(names->interrupt)(error.type());
    throw;
  }
  if (work->state.load(std::memory_order_acquire) != State::done)
    dispatch.attr(names->finish)(work, given.x == nullptr ? nb::none() : nb::borrow(given.x));
  return out;
}

struct FastMethod {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* careful;  // the Python function
  FastKinds kinds;
  PyObject* dict;  // its name, its text, ...
  PyObject* weak;  // references to it
};

PyObject* call(PyObject* self, PyObject* const* values, std::size_t flags, PyObject* named) {
  const auto& method = *reinterpret_cast<FastMethod*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  FastArguments given;
  if (count > 0 && given.read(values + 1, count - 1, named)) {
    const nb::object dispatch = nb::steal(PyObject_GetAttr(values[0], names->dispatch));
    nb::object found;
    if (dispatch.is_valid()) found = nb::steal(PyObject_GetAttr(dispatch.ptr(), names->fast_path));
    PyErr_Clear();  // of something that is no communicator
    if (found.is_valid() && nb::isinstance<Member>(found)) {
      try {
        Member& member = *nb::inst_ptr<Member>(found);
        nb::object out = fast_call(method.kinds, member, dispatch, given);
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
