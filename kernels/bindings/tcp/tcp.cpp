// The tcp transport for Python: members with their connected sockets, calls on memory that Python
// keeps alive until they are settled, and plans of calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "core/gil.h"
#include "core/segments.h"
#include "tcp/io/engine.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

using tcp::Engine;
using tcp::Member;
using tcp::Request;
using tcp::Work;

constexpr auto kSignals = std::chrono::milliseconds(50);
constexpr double kLongestWait = 1e9;         // seconds that a wait may last: 30 years
constexpr std::uint64_t kLeastElement = 16;  // bytes: a chunk holds one of any type

// The member whose objects live on the engine's thread.
struct Handle {
  explicit Handle(std::shared_ptr<Member> given) : member(std::move(given)) {}
  ~Handle() {
    if (member->inherited()) return;
    try {
      // Already closed, unless Python dropped it: its contents must be destroyed on that thread.
      Engine::instance().post(member, [last = member.get()] {
        last->leave(tcp::Clock::now(), std::make_shared<Work>(Request{}));
      });
    } catch (const std::bad_alloc&) {
      // Then the engine has it until the process ends: no harm is done where memory is short.
    }
  }

  const std::shared_ptr<Member> member;
};

// Runs a function on the engine's thread and returns its result.
template <class Function>
auto ask(const Handle& handle, const Function& function) {
  decltype(function(*handle.member)) result{};
  if (handle.member->inherited()) return result;
  const GilRelease release;
  Engine::instance().run([&] { result = function(*handle.member); });
  return result;
}

// A function for Python that asks a member's method.
template <class Result, class... Arguments>
auto asking(Result (Member::*method)(Arguments...) const) {
  return [method](const Handle& handle, Arguments... arguments) {
    return ask(handle, [&](const Member& member) { return (member.*method)(arguments...); });
  };
}

// A call as words() in comm/transports/tcp/calls.py has it.
Request request_of(const nb::tuple& words) {
  Request request;
  static_cast<CallSpec&>(request) = spec_of(nb::cast<nb::tuple>(words[0]));
  request.call.path = static_cast<Path>(nb::cast<int>(words[1]));
  request.tag = nb::cast<std::int64_t>(words[2]);
  request.chunk = nb::cast<std::uint64_t>(words[3]);
  return request;
}

// The sockets are closed if this fails.
std::shared_ptr<Handle> make_member(int index, const std::vector<std::vector<int>>& fds) {
  auto member = std::make_shared<Member>(index, fds);
  {
    const GilRelease release;
    Engine::instance().run([&] { member->attach(); });
  }
  return std::make_shared<Handle>(std::move(member));
}

std::shared_ptr<Work> start(const Handle& handle, const nb::tuple& words, nb::bytes signature,
                            std::uintptr_t in, std::uintptr_t out) {
  Request request = request_of(words);
  if (request.chunk < kLeastElement || request.chunk > tcp::kMaxChunk)
    throw nb::value_error("a chunk that no block holds");
  if (lacks_kernel(request.call)) throw nb::type_error("no kernel for this operator and type");
  request.signature.assign(signature.c_str(), signature.size());
  request.in = reinterpret_cast<const std::byte*>(in);
  request.out = reinterpret_cast<std::byte*>(out);
  auto work = std::make_shared<Work>(std::move(request));
  if (handle.member->inherited()) {
    work->settle(State::failed);
    return work;
  }
  const GilRelease release;
  handle.member->submit(work);
  return work;
}

tcp::Clock::time_point after(double seconds) {
  // Compared before it is converted: it may be any number, or none.
  const double sane = seconds < kLongestWait ? std::max(seconds, 0.0) : kLongestWait;
  return tcp::Clock::now() +
         std::chrono::duration_cast<tcp::Clock::duration>(std::chrono::duration<double>(sane));
}

// True when it is done; false when it has failed, or the time is over.
bool wait(Work& work, double seconds) {
  const auto end = after(seconds);
  for (;;) {
    {
      const GilRelease release;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - tcp::Clock::now());
      if (work.wait(std::min(left, kSignals))) break;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (tcp::Clock::now() >= end) break;
  }
  return work.state() == State::done;
}

nb::object culprit(const Handle& handle) {
  const auto found = ask(handle, [](Member& member) { return member.culprit(); });
  if (found.fault == Fault::none) return nb::none();
  return nb::make_tuple(name_of(found.fault), found.member, found.observer,
                        found.key & ~tcp::kMessage, text_of(found.reason));
}

nb::object bytes_of(const std::optional<std::string>& text) {
  if (!text) return nb::none();
  return nb::bytes(text->data(), text->size());
}

nb::object posted_call(const Handle& handle, int of, std::uint64_t key) {
  return bytes_of(ask(handle, [&](Member& member) { return member.posted(of, key); }));
}

nb::object last_call(const Handle& handle, int of) {
  const auto found = ask(handle, [&](Member& member) { return member.last_call(of); });
  if (!found) return nb::none();
  return nb::make_tuple(found->first, bytes_of(found->second));
}

// Runs a function on the engine's thread, and sends what it has for the other members.
template <class Function>
void tell(const Handle& handle, const Function& function) {
  ask(handle, [&](Member& member) {
    function(member);
    member.flush();
    return true;
  });
}

void tell_awaited(const Handle& handle, int awaited, std::uint64_t in) {
  tell(handle, [&](Member& member) { member.tell_waits(in, awaited); });
}

void tell_under_way(const Handle& handle) {
  tell(handle, [](Member& member) { member.tell_under_way(); });
}

void die(const Handle& handle, Fault fault, int member, std::uint64_t key,
         const std::string& reason) {
  tell(handle, [&](Member& one) {
    const auto own = one.posted(one.index(), key);
    one.die({fault, member, one.index(), key, "", own.value_or(""), reason});
  });
}

void blame_timeout(const Handle& handle, int member, std::uint64_t key, const std::string& reason) {
  die(handle, Fault::timeout, member, key, reason);
}

void abort_member(const Handle& handle, const std::string& reason) {
  die(handle, Fault::aborted, handle.member->index(), 0, reason);
}

std::shared_ptr<Work> leave(const Handle& handle, double seconds) {
  auto farewell = std::make_shared<Work>(Request{});
  const auto limit = after(seconds);
  ask(handle, [&](Member& member) {
    member.leave(limit, farewell);
    return true;
  });
  return farewell;
}

nb::bytes abort_frame(int member, const std::string& reason) {
  const std::string words = tcp::abort_frame(member, reason);
  return nb::bytes(words.data(), words.size());
}

// A member's plan: elements per chunk, staged chunks per source, and for each stage its sources,
// elements and destinations, and whether it reduces, stores and stages here.
nb::tuple plan_of(const nb::tuple& words, int index, int members) {
  const tcp::Plan made = tcp::make_plan(request_of(words), index, members);
  nb::list stages;
  for (const tcp::Stage& stage : made.stages) {
    std::vector<int> to;
    for (const tcp::Link& link : stage.to) to.push_back(link.peer);
    stages.append(nb::make_tuple(stage.from, stage.elements, to, stage.reduce,
                                 stage.out != tcp::kNowhere, stage.windowed));
  }
  return nb::make_tuple(made.chunk, made.window, stages);
}

// Elements that a member sends, gets from others and takes from its own input in a call whose
// contributions travel with the posts.
nb::tuple eager_plan(const nb::tuple& words, int me, int members) {
  const Request request = request_of(words);
  const bool gets = request.call.collective != Collective::reduce || me == request.call.root;
  std::uint64_t sent = 0, got = 0;
  for (int member = 0; member < members; ++member) {
    if (member == me) continue;
    sent += given_in_post(request, me, member).count;
    if (gets) got += taken(request, me, member).count;
  }
  return nb::make_tuple(sent, got, gets ? taken(request, me, me).count : 0);
}

void bind_tcp_member(nb::module_& m) {
  m.def("tcp_abort_frame", &abort_frame, nb::arg("member"), nb::arg("reason"));
  nb::class_<Handle>(m, "TcpMember")
      .def(nb::new_(&make_member), nb::arg("index"), nb::arg("sockets"))
      .def_prop_ro("inherited", [](const Handle& handle) { return handle.member->inherited(); })
      .def("close_inherited", [](const Handle& handle) { handle.member->close_inherited(); })
      .def("start", &start, nb::arg("words"), nb::arg("signature"), nb::arg("x"), nb::arg("out"))
      .def("culprit", &culprit)
      .def("missing", asking(&Member::missing), nb::arg("seq"))
      .def("absent", asking(&Member::absent), nb::arg("seq"))
      .def("tell_awaited", &tell_awaited, nb::arg("member"), nb::arg("call") = 0)
      .def("tell_under_way", &tell_under_way)
      .def("awaited_in_call", asking(&Member::awaited_in_call), nb::arg("by"), nb::arg("seq"))
      .def("awaited", asking(&Member::awaited), nb::arg("by"))
      .def("awaited_in", asking(&Member::awaited_in), nb::arg("by"))
      .def("payload_bytes", asking(&Member::payload_bytes))
      .def("staging_bytes", asking(&Member::staging_bytes))
      .def("posted_call", &posted_call, nb::arg("member"), nb::arg("seq"))
      .def("last_call", &last_call, nb::arg("member"))
      .def("blame_timeout", &blame_timeout, nb::arg("member"), nb::arg("key"), nb::arg("reason"))
      .def("abort", &abort_member, nb::arg("reason"))
      .def("leave", &leave, nb::arg("seconds"));
}

void bind_tcp_work(nb::module_& m) {
  nb::class_<Work>(m, "TcpWork")
      .def_prop_ro("key", [](const Work& work) { return work.key.load(); })
      .def_prop_ro("seq", [](const Work& work) { return work.key & ~tcp::kMessage; })
      .def_prop_ro("done", [](const Work& work) { return work.state() == State::done; })
      .def_prop_ro("failed", [](const Work& work) { return work.state() == State::failed; })
      .def_prop_ro("unmet",  // a recv without a message
                   [](const Work& work) {
                     return work.request.call.collective == Collective::recv && !work.met.load();
                   })
      .def_prop_ro("source", [](const Work& work) { return work.request.call.root; })
      .def_prop_ro("tag", [](const Work& work) { return work.request.tag; })
      .def_prop_ro("path",
                   [](const Work& work) { return static_cast<int>(work.request.call.path); })
      .def("wait", &wait, nb::arg("seconds"));
}

}  // namespace

void bind_tcp(nb::module_& m) {
  bind_tcp_work(m);
  bind_tcp_member(m);
  m.def("tcp_eager_plan", &eager_plan, nb::arg("words"), nb::arg("me"), nb::arg("members"));
  m.def("tcp_plan", &plan_of, nb::arg("words"), nb::arg("index"), nb::arg("members"));
  m.attr("TCP_FIRST_DATA") = tcp::kData;
}

}  // namespace allreduce
