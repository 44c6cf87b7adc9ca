// Threads that may outlive the interpreter, and ask for its lock.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace allreduce {

// Calls a function that asks for the interpreter's lock. When the process ends, Python ends daemon
// threads where they ask for it, by unwinding their stack. Destructors must not be unwound, and
// those of Python's objects need the lock: the process would abort. So such a thread waits here
// until the process has ended.
template <class Call>
auto block_unwinding(Call call) {
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Releases the interpreter's lock for a scope.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    block_unwinding([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

}  // namespace allreduce
