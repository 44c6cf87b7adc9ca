// Whether a signal's handler has raised, for native loops that run without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <atomic>

namespace allreduce {

// Python's identifier of the thread that runs the handlers of signals; no other does.
inline std::atomic<unsigned long> main_thread{0};

inline void find_main_thread() {
  const nanobind::object found = nanobind::module_::import_("threading").attr("main_thread")();
  main_thread.store(nanobind::cast<unsigned long>(found.attr("ident")));
  // In a child it is the one that forked.
  pthread_atfork(nullptr, nullptr, [] { main_thread.store(PyThread_get_thread_ident()); });
}

// Runs the handlers of signals that have come; true if one has raised. Takes the GIL in the main
// thread only: an extension may hold it for long, and others' calls need this thread meanwhile.
inline bool interrupted() {
  if (PyThread_get_thread_ident() != main_thread.load(std::memory_order_relaxed)) return false;
  const nanobind::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace allreduce
