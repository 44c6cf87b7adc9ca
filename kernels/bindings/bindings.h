// What the files of the bindings share: a function for each family, and small conversions.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace allreduce {

struct Call;
struct CallSpec;

// Group, Member and Work of the shared transport.
void bind_comm(nanobind::module_& m);
void bind_member(nanobind::module_& m);
// Plans of calls, and which elements members exchange in them.
void bind_plan(nanobind::module_& m);
// The updates that optimizers pass to calls.
void bind_updates(nanobind::module_& m);
// Methods of communicators that are native for plain arrays.
void bind_fast_method(nanobind::module_& m);
// TcpMember and TcpWork of the tcp transport, and plans of its calls.
void bind_tcp(nanobind::module_& m);
// The graph's kernels, chains of element-wise operations, and replays.
void bind_tensor(nanobind::module_& m);
void bind_images(nanobind::module_& m);
// The rows of tables on parameter servers.
void bind_tables(nanobind::module_& m);
void bind_chain(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
// The sockets between the tasks of a cluster.
void bind_server(nanobind::module_& m);
// What to do for MPI when a process exits.
void bind_exit(nanobind::module_& m);

// A call as native_words() in comm/calls/call.py has it.
CallSpec spec_of(const nanobind::tuple& words);
// A call as a tuple, in the order of its signature.
nanobind::tuple describe(const Call& call);

// UTF-8 that may have been truncated: invalid bytes become U+FFFD.
inline nanobind::object text_of(std::string_view text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

}  // namespace allreduce
