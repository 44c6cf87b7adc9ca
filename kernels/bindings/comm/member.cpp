// The shared transport for Python: members, and calls on NumPy arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/comm/array_calls.h"
#include "core/gil.h"
#include "core/segments.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

// Whether both arrays are there where the call needs them, and as long as it needs them.
bool arrays_fit(const CallSpec& spec, const View& in, const View& out, int members, int me) {
  const Collective collective = spec.call.collective;
  const bool root = me == spec.call.root;
  const bool to_root = collective == Collective::reduce || collective == Collective::gather;
  if (in.held() ? in.count() != input_elements(spec, members, me)
                : root || collective != Collective::scatter)
    return false;
  if (!out.held()) return to_root && !root;
  return out.count() == output_elements(spec, members, me);
}

std::shared_ptr<Work> start(Member& member, std::uint32_t kind, nb::handle in, nb::handle out,
                            const std::optional<std::vector<std::uint64_t>>& counts,
                            const std::optional<std::vector<std::uint64_t>>& receives,
                            nb::bytes note, std::uint64_t digest) {
  Call call = decode(kind);
  std::string text(note.c_str(), note.size());
  if (call.collective == Collective::barrier)
    return member.start(call, nullptr, nullptr, {digest, {}, {}, std::move(text)});
  const View source(in.ptr(), false), target(out.ptr(), true);
  const View& either = source.held() ? source : target;
  call.type = either.type();
  if (call.type == Type::none || (target.held() && target.type() != call.type))
    throw nb::type_error("arrays must be C-contiguous, of one supported type, the output writable");
  const int members = member.group().members();
  CallSpec shape;
  shape.details = {0, offsets_of(counts), offsets_of(receives)};
  call.count = count_of(call, shape.details, source, target, static_cast<std::uint64_t>(members));
  shape.call = call;
  if (!arrays_fit(shape, source, target, members, member.index()) || call.count >> kCountBits != 0)
    throw nb::value_error("the arrays' sizes do not fit the collective");
  if (lacks_kernel(call)) throw nb::type_error("no kernel for this operator and type");
  shape.details.hash = detail_hash(call, shape.details, either) ^ digest;
  shape.details.note = std::move(text);
  return begin(member, call, source, target.data(), std::move(shape.details));
}

// An all_reduce that updates values with the sums: in symmetric memory, as long as the update's.
std::shared_ptr<Work> start_update(Member& member, nb::handle gradients, nb::handle values,
                                   const Update& update, nb::bytes note, std::uint64_t digest) {
  const View source(gradients.ptr(), false), target(values.ptr(), true);
  Group& group = member.group();
  const auto fits = [&](const View& view) {
    return view.held() && view.type() == update.type() && view.count() == update.count() &&
           group.find_region(member.index(), view.data(), view.bytes()) != nullptr;
  };
  if (group.members() == 1 || update.count() == 0 || update.count() >> kCountBits != 0 ||
      !fits(source) || !fits(target))
    throw nb::value_error("an update needs others, and arrays of its size in symmetric memory");
  const Call call{Collective::all_reduce, Op::sum, update.type(), Path::direct, 0, update.count()};
  Details details;
  details.hash = detail_hash(call, details, source) ^ digest;
  details.note.assign(note.c_str(), note.size());
  return member.start(call, source.data(), target.data(), std::move(details), &update);
}

// A send if it has an input, a recv if it has an output.
std::shared_ptr<Work> start_message(Member& member, nb::handle in, nb::handle out, int peer,
                                    std::int64_t tag, nb::bytes note) {
  const bool sends = out.is_none();
  const View array(sends ? in.ptr() : out.ptr(), !sends);
  if (!array.held() || sends == in.is_none())
    throw nb::type_error("a message is one C-contiguous array of a supported type");
  if (peer >= member.group().members() || peer < (sends ? 0 : kAny))
    throw nb::value_error("the communicator has no such member");
  const Call call{.collective = sends ? Collective::send : Collective::recv,
                  .type = array.type(),
                  .root = peer,
                  .count = array.count()};
  return member.start_message(call, tag, sends ? array.data() : nullptr,
                              sends ? nullptr : array.data(),
                              std::string(note.c_str(), note.size()));
}

}  // namespace

void bind_member(nb::module_& m) {
  nb::class_<Work>(m, "Work")
      .def_prop_ro("seq", [](const Work& work) { return work.seq; })
      .def_prop_ro("done", [](const Work& work) { return work.state.load() == State::done; })
      .def_prop_ro("failed", [](const Work& work) { return work.state.load() == State::failed; })
      .def_prop_ro("unmet",  // a recv without a message
                   [](const Work& work) {
                     return work.call.collective == Collective::recv && !work.met.load();
                   })
      .def_prop_ro("call", [](const Work& work) { return describe(work.call); })
      .def_prop_ro("way",  // path, bytes of a step, whether these, and from where on outputs, are
                           // stored past the caches
                   [](const Work& work) {
                     return nb::make_tuple(static_cast<int>(work.call.path), work.way.chunk,
                                           work.way.streaming, work.way.past);
                   })
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
      .def("start_update", &start_update, nb::arg("gradients"), nb::arg("values"),
           nb::arg("update"), nb::arg("note"), nb::arg("digest"))
      .def("start_message", &start_message, nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("peer"), nb::arg("tag"), nb::arg("note"))
      .def("give_up", &Member::give_up, nb::arg("work"), nb::arg("blamed"), nb::arg("reason"),
           nb::call_guard<GilRelease>())
      .def_rw("fast_seconds", &Member::fast_seconds)
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
      .def("last", &Member::last)
      .def("exposed", &Member::exposed, nb::call_guard<GilRelease>())
      .def("isolate", &Member::isolate, nb::call_guard<GilRelease>())
      .def("leave", &Member::leave, nb::call_guard<GilRelease>())
      .def("abort", &Member::abort, nb::arg("reason"), nb::call_guard<GilRelease>());
}

}  // namespace allreduce
