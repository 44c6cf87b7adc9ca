#include "bindings/comm/fast_call.h"

#include <nanobind/stl/shared_ptr.h>

#include "bindings/comm/array_calls.h"
#include "core/segments.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

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
    constexpr std::string_view kReason = "a collective was left in the middle";
    if (work_ && !settled(*work_)) member_.abort(kReason.data(), kReason.size());
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  Member& member_;
  const std::shared_ptr<Work>& work_;
};

}  // namespace

bool FastArguments::read(const FastNames& names, PyObject* const* values, Py_ssize_t count,
                         PyObject* keywords) {
  if (count > 1) return false;
  if (count == 1) x = values[0];
  const Py_ssize_t given = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  named = given != 0;
  for (Py_ssize_t i = 0; i < given; ++i) {
    const PyObject* name = PyTuple_GET_ITEM(keywords, i);
    PyObject* value = values[count + i];
    if (name == names.out)
      out = value == Py_None ? nullptr : value;
    else if (name == names.op)
      op = value;
    else if (name == names.root)
      root = value;
    else
      return false;
  }
  return x == nullptr || PyArray_CheckExact(x);
}

nb::object fast_call(const FastKinds& kinds, const FastNames& names, Member& member,
                     nb::handle dispatch, const FastArguments& given) {
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
    dispatch.attr(names.interrupt)(error.type());
    throw;
  }
  if (work->state.load(std::memory_order_acquire) != State::done)
    dispatch.attr(names.finish)(work, given.x == nullptr ? nb::none() : nb::borrow(given.x));
  return out;
}

}  // namespace allreduce
