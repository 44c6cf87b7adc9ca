// The shared transport for Python: members, and calls on anything with the buffer protocol.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bind_comm.h"
#include "buffer_view.h"
#include "engine.h"
#include "segments.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

bool interrupted() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}
const std::function<bool()> kInterrupted = interrupted;

Outcome wait(Member& member, Work& work, double seconds) {
  Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome = Engine::instance().wait(member, work, seconds, kInterrupted);
  }
  if (outcome == Outcome::interrupted) throw nb::python_error();
  return outcome;
}

// A call's kind as one integer, made once per operator by Python: collective, operator, root.
Call decode(std::uint32_t kind) {
  Call call;
  call.collective = static_cast<Collective>(kind & 15);
  call.op = static_cast<Op>(kind >> 4 & 15);
  call.root = static_cast<int>(kind >> 8);
  return call;
}

// Where shares of these lengths begin, and last where they end.
std::vector<std::uint64_t> offsets_of(const std::optional<std::vector<std::uint64_t>>& counts) {
  std::vector<std::uint64_t> offsets;
  if (!counts) return offsets;
  offsets.push_back(0);
  for (std::uint64_t count : *counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

// Elements of the call, which the arrays must fit.
std::uint64_t count_of(const Call& call, const Details& details, const View& in, const View& out,
                       std::uint64_t members) {
  switch (call.collective) {
    case Collective::all_to_all:
      return details.offsets.empty() ? in.count() / members : 0;
    case Collective::reduce_scatter:
    case Collective::scatter:
      return details.offsets.empty() ? out.count() : details.offsets.back();
    case Collective::all_gather:
    case Collective::gather:
      return details.offsets.empty() ? in.count() : details.offsets.back();
    default:
      return in.held() ? in.count() : out.count();
  }
}

// A hash of what must be the same on all members besides the signature.
std::uint64_t detail_hash(const Call& call, const Details& details, const View& array) {
  const bool whole = call.collective == Collective::all_reduce ||
                     call.collective == Collective::reduce ||
                     call.collective == Collective::broadcast;
  std::uint64_t hash = array.shape_hash(whole ? 0 : 1);
  if (call.collective != Collective::all_to_all)
    for (std::uint64_t offset : details.offsets) hash = (hash ^ offset) * 0x100000001b3;
  return hash + (call.collective == Collective::all_to_all && !details.offsets.empty() ? 1 : 0);
}

// Whether both arrays are there where the call needs them, and as long as it needs them.
bool arrays_fit(const Work& work, const View& in, const View& out, int members, int me) {
  const Collective collective = work.call.collective;
  const bool root = me == work.call.root;
  const bool to_root = collective == Collective::reduce || collective == Collective::gather;
  if (in.held() ? in.count() != input_elements(work, members, me)
                : root || collective != Collective::scatter)
    return false;
  if (!out.held()) return to_root && !root;
  return out.count() == output_elements(work, members, me);
}

bool lacks_kernel(const Call& call) {
  const auto op = static_cast<int>(call.op), type = static_cast<int>(call.type);
  return reduces(call.collective) && kernels().reduce[op][type] == nullptr;
}

// Starts a call. A member without peers copies at once, and lets other threads run meanwhile.
std::shared_ptr<Work> begin(Member& member, const Call& call, const View& in, std::byte* out,
                            Details details) {
  std::optional<nb::gil_scoped_release> release;
  if (member.group().members() == 1 && in.bytes() > kSmall) release.emplace();
  return member.start(call, in.data(), out, std::move(details));
}

std::shared_ptr<Work> start(Member& member, std::uint32_t kind, nb::handle in, nb::handle out,
                            const std::optional<std::vector<std::uint64_t>>& counts,
                            const std::optional<std::vector<std::uint64_t>>& receives,
                            nb::bytes note, std::uint64_t digest) {
  Call call = decode(kind);
  std::string told(note.c_str(), note.size());
  if (call.collective == Collective::barrier)
    return member.start(call, nullptr, nullptr, {digest, {}, {}, std::move(told)});
  const View source(in.ptr(), false), target(out.ptr(), true);
  const View& either = source.held() ? source : target;
  call.type = either.type();
  if (call.type == Type::none || (target.held() && target.type() != call.type))
    throw nb::type_error("arrays must be C-contiguous, of one supported type, the output writable");
  const int members = member.group().members();
  Work shape;
  shape.details = {0, offsets_of(counts), offsets_of(receives)};
  call.count = count_of(call, shape.details, source, target, static_cast<std::uint64_t>(members));
  shape.call = call;
  if (!arrays_fit(shape, source, target, members, member.index()) || call.count >> kCountBits != 0)
    throw nb::value_error("the arrays' sizes do not fit the collective");
  if (lacks_kernel(call)) throw nb::type_error("no kernel for this operator and type");
  shape.details.hash = detail_hash(call, shape.details, either) ^ digest;
  shape.details.note = std::move(told);
  return begin(member, call, source, target.data(), std::move(shape.details));
}

bool gets_nothing(const Call& call, const Member& member) {
  return call.collective == Collective::reduce && member.index() != call.root;
}

// Whether arrays of these shapes need nothing but their bytes moved: no copy, no error.
bool plain(const Call& call, const View& in, const View& out, const Member& member) {
  const auto members = static_cast<std::uint64_t>(member.group().members());
  if (in.type() == Type::none) return false;
  if (gets_nothing(call, member)) return true;
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

// Looks up a call's kind by its operator, and adds its root; false if one of them is something
// else.
bool quick_kind(nb::dict kinds, nb::handle op, nb::handle root, int members, Call& call) {
  PyObject* kind = PyDict_GetItemWithError(kinds.ptr(), op.ptr());
  PyErr_Clear();  // of an operator that cannot be a key
  if (kind == nullptr || !PyLong_CheckExact(root.ptr())) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(root.ptr(), &overflow);
  if (overflow != 0 || number < 0 || number >= members) return false;
  call = decode(static_cast<std::uint32_t>(PyLong_AsUnsignedLong(kind)));
  call.root = static_cast<int>(number);
  return true;
}

// The quick way for a synchronous call of plain arrays: true when it is done, the work and its
// input if it is not done yet or failed, and None if the call needs the careful way.
nb::object quick(Member& member, nb::dict kinds, nb::handle op, nb::handle root, nb::handle in,
                 nb::handle out, double seconds) {
  const int members = member.group().members();
  Call call;
  if (!quick_kind(kinds, op, root, members, call)) return nb::none();
  std::shared_ptr<Work> work;
  if (call.collective == Collective::barrier) {
    work = member.start(call, nullptr, nullptr);
  } else {
    const View source(in.ptr(), false), target(out.ptr(), true);
    if (!plain(call, source, target, member)) return nb::none();
    call.type = source.type();
    if (lacks_kernel(call)) return nb::none();
    call.count = count_of(call, {}, source, target, static_cast<std::uint64_t>(members));
    if (call.count >> kCountBits != 0) return nb::none();
    work = begin(member, call, source, gets_nothing(call, member) ? nullptr : target.data(),
                 {detail_hash(call, {}, source), {}, {}});
  }
  if (wait(member, *work, seconds) == Outcome::done) return nb::bool_(true);
  return nb::make_tuple(work, in);
}

// A send if it has an input, a recv if it has an output.
std::shared_ptr<Work> start_message(Member& member, nb::handle in, nb::handle out, int peer,
                                    std::int64_t tag, nb::bytes note) {
  const View source(in.ptr(), false), target(out.ptr(), true);
  const View& array = source.held() ? source : target;
  Call call;
  call.collective = source.held() ? Collective::send : Collective::recv;
  call.type = array.type();
  call.root = peer;
  call.count = array.count();
  if (call.type == Type::none || source.held() == target.held())
    throw nb::type_error("a message is one C-contiguous array of a supported type");
  if (peer >= member.group().members() || peer < (source.held() ? 0 : kAny))
    throw nb::value_error("the communicator has no such member");
  return member.start_message(call, tag, source.data(), target.data(),
                              std::string(note.c_str(), note.size()));
}

}  // namespace

void bind_member(nb::module_& m) {
  nb::class_<Work>(m, "Work")
      .def_prop_ro("seq", [](const Work& work) { return work.seq; })
      .def_prop_ro("done", [](const Work& work) { return work.state.load() == State::done; })
      .def_prop_ro("failed", [](const Work& work) { return work.state.load() == State::failed; })
      .def_prop_ro("call", [](const Work& work) { return describe(work.call); })
      .def_prop_ro("way",  // path, bytes of a step, whether these, and from where on outputs, are
                           // stored past the caches
                   [](const Work& work) {
                     return nb::make_tuple(static_cast<int>(work.call.path), work.way.chunk,
                                           work.way.streaming, work.way.past);
                   })
      .def_prop_ro("moved",
                   [](const Work& work) { return nb::make_tuple(work.read, work.written); })
      .def_prop_ro("peer", [](const Work& work) { return work.call.root; })
      .def_prop_ro("tag", [](const Work& work) { return work.tag; });
  nb::class_<Member>(m, "Member")
      .def(nb::init<std::shared_ptr<Group>, int>(), nb::arg("group"), nb::arg("index"))
      .def("start", &start, nb::arg("kind"), nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("counts") = nb::none(), nb::arg("receives") = nb::none(),
           nb::arg("note") = nb::bytes("", 0), nb::arg("digest") = 0)
      .def(
          "start_allocate",
          [](Member& member, std::uint64_t pages) {
            return member.start({.collective = Collective::allocate, .count = pages}, nullptr,
                                nullptr);
          },
          nb::arg("pages"))
      .def("start_message", &start_message, nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("peer"), nb::arg("tag"), nb::arg("note"))
      .def("give_up_message", &Member::give_up_message, nb::arg("work"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("quick", &quick, nb::arg("kinds"), nb::arg("op").none(), nb::arg("root").none(),
           nb::arg("x").none(), nb::arg("out").none(), nb::arg("seconds"))
      .def(
          "wait",
          [](Member& member, Work& work, double seconds) {
            return wait(member, work, seconds) == Outcome::done;
          },
          nb::arg("work"), nb::arg("seconds"))
      .def(
          "note",
          [](Member& member, std::uint64_t seq, nb::bytes text) {
            member.note(seq, {text.c_str(), text.size()});
          },
          nb::arg("seq"), nb::arg("text"))
      .def("leave", &Member::leave, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "abort",
          [](Member& member, const std::string& reason) {
            member.abort(reason.data(), reason.size());
          },
          nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace allreduce
