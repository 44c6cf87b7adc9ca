#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

// Time for mpirun to forward the line below: an abort drops pending output.
constexpr useconds_t kForwarding = 100'000;

struct Exit {
  pid_t pid;  // a forked child inherits the handler, and must leave MPI alone
  int (*finalize)();
  int (*finalized)(int*);
  int launcher;  // descriptor of the line to hydra; -1 if there is none
  std::string rank;
};

void say(int descriptor, const std::string& line) {
  [[maybe_unused]] const ssize_t written = write(descriptor, line.data(), line.size());
}

// MPI_Finalize waits for the other ranks, which may wait for this one: a process that has failed
// ends without it. Only the exit handlers of libc learn the exit code.
void at_exit(int code, void* argument) {
  const auto* self = static_cast<const Exit*>(argument);
  int over = 0;
  if (getpid() != self->pid || self->finalized(&over) != 0 || over) return;
  if (code == 0) {
    self->finalize();
    return;
  }
  const std::string number = std::to_string(code & 0xFF);
  say(STDERR_FILENO, "[allreduce] rank " + self->rank + " (process " + std::to_string(self->pid) +
                         ") ends with exit code " + number + ", and all with it\n");
  usleep(kForwarding);
  // Without this, hydra would end the ranks of this host only.
  if (self->launcher >= 0) say(self->launcher, "cmd=abort exitcode=" + number + "\n");
}

}  // namespace

void bind_exit(nb::module_& m) {
  m.def(
      "finalize_mpi_at_exit",
      [](std::uintptr_t finalize, std::uintptr_t finalized, int launcher, const std::string& rank) {
        on_exit(at_exit, new Exit{getpid(), reinterpret_cast<int (*)()>(finalize),
                                  reinterpret_cast<int (*)(int*)>(finalized), launcher, rank});
      },
      nb::arg("finalize"), nb::arg("finalized"), nb::arg("launcher"), nb::arg("rank"));
}

}  // namespace allreduce
