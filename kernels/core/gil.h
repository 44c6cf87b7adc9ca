// Work without the interpreter's lock, in threads that may outlive the interpreter.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace allreduce {

// Releases the interpreter's lock for a scope. When the process ends meanwhile, Python ends daemon
// threads where they ask for the lock, by unwinding their stack. A destructor must not be unwound:
// the process would abort. So such a thread waits here until the process has ended.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace allreduce
