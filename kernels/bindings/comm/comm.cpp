// The shared transport for Python: groups, and the facts that errors need.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <system_error>

#include "bindings/bindings.h"
#include "core/gil.h"
#include "shm/memory/remote.h"
#include "shm/progress/engine.h"

namespace nb = nanobind;

namespace allreduce {

nb::tuple describe(const Call& call) {
  return nb::make_tuple(static_cast<int>(call.collective), static_cast<int>(call.op),
                        static_cast<int>(call.type), static_cast<int>(call.path), call.root,
                        call.count);
}

namespace {

// The last call that a member has posted, as (sequence number, call), or None.
nb::object last_call(const Group& group, int member) {
  std::uint64_t latest = 0;
  for (std::uint64_t i = 0; i < kSlots; ++i)
    latest = std::max(latest, group.control().slot(member, i).flag.load());
  if (latest == 0) return nb::none();
  const Slot& slot = group.control().slot(member, latest - 1);
  return nb::make_tuple(latest - 1, describe(Call::unpack(slot.signature)));
}

// The call that a member has posted under a number, or None if it has not or its slot was reused.
nb::object posted_call(const Group& group, int member, std::uint64_t seq) {
  const Slot& slot = group.control().slot(member, seq);
  if (slot.flag.load() != seq + 1) return nb::none();
  return describe(Call::unpack(slot.signature));
}

// A member's note on a call, or None.
nb::object note(const Group& group, int member, std::uint64_t seq) {
  const Remark* found = group.control().note(member, seq).read(seq);
  if (found == nullptr) return nb::none();
  const std::string_view text = found->get();
  return nb::bytes(text.data(), text.size());
}

// Whether a member has done its share of call `seq`, which it has posted: where members wait for
// each other's copies, it may not have completed it for all that.
bool did_its_share(const Group& group, int member, std::uint64_t seq) {
  const MemberState& state = group.control().state(member);
  if (state.done.value.load() > seq) return true;
  const Path path = Call::unpack(group.control().slot(member, seq).signature).path;
  return (path == Path::direct || path == Path::cross_process) && state.finished.value.load() > seq;
}

// The members that have not posted call `seq`; if all have, the members whose share is not done.
std::vector<int> missing(const Group& group, std::uint64_t seq) {
  std::vector<int> absent, unfinished;
  for (int member = 0; member < group.members(); ++member) {
    // The slot may hold an older call, or a later one once this call is complete everywhere.
    if (group.control().slot(member, seq).flag.load() < seq + 1)
      absent.push_back(member);
    else if (!did_its_share(group, member, seq))
      unfinished.push_back(member);
  }
  return absent.empty() ? unfinished : absent;
}

// The message that led to the blame, as both sides described it.
nb::tuple mismatch(const Group& group, int observer) {
  const auto tuple = [](const MessageRecord& record) {
    const std::string_view remark = record.remark.get();
    return nb::make_tuple(static_cast<int>(record.collective), static_cast<int>(record.type),
                          record.peer, record.count, record.tag,
                          nb::bytes(remark.data(), remark.size()));
  };
  const MemberState& state = group.control().state(observer);
  return nb::make_tuple(tuple(state.mismatch[0]), tuple(state.mismatch[1]));
}

nb::object culprit(const Group& group) {
  const Culprit culprit = group.culprit();
  if (culprit.fault == Fault::none) return nb::none();
  const MemberState& state = group.control().state(culprit.observer);
  return nb::make_tuple(name_of(culprit.fault), culprit.member, culprit.observer, culprit.seq,
                        text_of({state.reason, strnlen(state.reason, sizeof(state.reason))}));
}

// For each collective its number, its largest contribution that travels with the post, and its
// bands: limit, and the direct, cross-process and staged way. Of a way: bytes of a step or chunk,
// whether these are stored past the caches, from where on copies to the output are, and whether
// places of the rings change hands.
using WayWords = std::tuple<std::uint64_t, bool, std::uint64_t, bool>;
using BandWords = std::tuple<std::uint64_t, WayWords, WayWords, WayWords>;
using RuleWords = std::tuple<int, std::uint64_t, std::vector<BandWords>>;

Way way_of(const WayWords& words) {
  const auto [chunk, streaming, past, pairwise] = words;
  return {chunk, streaming, past, pairwise};
}

void make_choices(Choices* made, int members, const std::vector<RuleWords>& words) {
  Choices choices;
  for (const auto& [collective, eager, bands] : words) {
    Rules rules{eager, {}};
    for (const auto& [limit, direct, cross_process, staged] : bands)
      rules.bands.push_back({limit, way_of(direct), way_of(cross_process), way_of(staged)});
    const std::string wrong =
        choices.set(static_cast<Collective>(collective & 15), std::move(rules), members);
    if (!wrong.empty()) throw nb::value_error(wrong.c_str());
  }
  new (made) Choices(std::move(choices));
}

// Bytes of a symmetric region, as an array that keeps the region mapped.
nb::object bytes_of(const std::shared_ptr<SymmetricRegion>& region, std::byte* data,
                    std::size_t bytes) {
  auto* owned = new std::shared_ptr<SymmetricRegion>(region);
  const nb::capsule owner(
      owned, [](void* p) noexcept { delete static_cast<std::shared_ptr<SymmetricRegion>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {bytes}, owner));
}

// This member's part of a symmetric region.
nb::object claim(Group& group, std::uint32_t id, int member) {
  const auto region = group.claim_region(id);
  if (!region) throw nb::value_error("no such region");
  return bytes_of(region, region->part(member), region->part_bytes);
}

// Another member's part of a symmetric region, at the same offset.
nb::object part_of(Group& group, int member, std::uintptr_t address, std::size_t bytes, int other) {
  if (other < 0 || other >= group.members()) throw nb::value_error("there is no such member");
  const auto* data = reinterpret_cast<const std::byte*>(address);
  const auto region = group.find_region(member, data, bytes);
  if (!region) throw nb::value_error("the bytes are in no symmetric memory");
  return bytes_of(region, region->part(other) + (data - region->part(member)), bytes);
}

void bind_group(nb::module_& m) {
  nb::class_<Group>(m, "Group")
      .def(nb::new_([](int fd, int members, int cores, const Choices& choices) {
             return std::make_shared<Group>(fd, members, cores, choices);
           }),
           nb::arg("fd"), nb::arg("members"), nb::arg("cores"), nb::arg("choices"))
      .def_static("control_bytes", &Control::bytes, nb::arg("members"))
      .def("add_peer", &Group::add_peer, nb::arg("fd"), nb::arg("pid"), nb::arg("members"))
      .def("drop_peers", &Group::drop_peers)
      .def_prop_ro("inherited", &Group::inherited)
      .def("map_region", &Group::map_region, nb::arg("id"), nb::arg("fd"), nb::arg("part_bytes"),
           nb::arg("users"), nb::call_guard<GilRelease>())
      .def(
          "is_symmetric",
          [](Group& group, int member, std::uintptr_t address, std::size_t bytes) {
            const auto* data = reinterpret_cast<const std::byte*>(address);
            return group.find_region(member, data, bytes) != nullptr;
          },
          nb::arg("member"), nb::arg("address"), nb::arg("bytes"))
      .def("release_region", &Group::release_region, nb::arg("id"))
      .def("part_of", &part_of, nb::arg("member"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("other"))
      .def("claim", &claim, nb::arg("id"), nb::arg("member"))
      .def("culprit", &culprit)
      .def("missing", &missing, nb::arg("seq"))
      .def("mismatch", &mismatch, nb::arg("observer"))
      .def(
          "set_message",
          [](Group& group, int member, std::uint32_t word) {
            group.control().state(member).message.store(word, std::memory_order_relaxed);
          },
          nb::arg("member"), nb::arg("word"))
      .def(
          "message",
          [](const Group& group, int member) {
            return group.control().state(member).message.load(std::memory_order_relaxed);
          },
          nb::arg("member"))
      .def("posted_call", &posted_call, nb::arg("member"), nb::arg("seq"))
      .def("last_call", &last_call, nb::arg("member"))
      .def("note", &note, nb::arg("member"), nb::arg("seq"));
}

}  // namespace

void bind_comm(nb::module_& m) {
  nb::class_<Choices>(m, "Choices")
      .def("__init__", &make_choices, nb::arg("members"), nb::arg("rules"));
  bind_group(m);
  m.attr("LAYOUT") = layout_number();
  bind_updates(m);
  bind_member(m);
  bind_plan(m);
  bind_fast_method(m);
  m.attr("MESSAGE") = kMessage;
  m.attr("MAX_MEMBERS") = kMaxMembers;
  m.def(
      "progress", [] { return Engine::instance().drive_all() != Others::idle; },
      nb::call_guard<GilRelease>());
  m.def(
      "read_process",
      [](int pid, std::uint64_t address, std::size_t bytes) {
        std::string found(bytes, '\0');
        const int error = read_process(pid, found.data(), address, bytes);
        if (error != 0) throw std::system_error(error, std::generic_category(), "read_process");
        return nb::bytes(found.data(), found.size());
      },
      nb::arg("pid"), nb::arg("address"), nb::arg("bytes"));
}

}  // namespace allreduce
