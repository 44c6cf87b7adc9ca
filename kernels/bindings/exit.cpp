#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

using Clock = std::chrono::steady_clock;

// Time for mpirun to forward the line below: an abort drops pending output.
constexpr useconds_t kForwarding = 100'000;
constexpr useconds_t kLook = 50'000;  // between looks whether other ranks of this host still end

// A rank that has failed, and the abstract addresses that the others of its host bind while they
// are ending because of an error.
struct Failure {
  int sign = -1;  // the socket with this rank's own address
  std::vector<std::string> others;
  Clock::time_point until;
};

struct Exit {
  pid_t pid;  // a forked child inherits the handler, and must leave MPI alone
  int (*finalize)();
  int (*finalized)(int*);
  int launcher;  // descriptor of the line to hydra; -1 if there is none
  std::string rank;
  Failure failure;
};

Exit* registered = nullptr;  // of this process, once it has initialised MPI

bool is_bound(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::copy_n(name.data(), length, address.sun_path + 1);
  const int visitor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (visitor < 0) return false;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  const bool found = connect(visitor, reinterpret_cast<const sockaddr*>(&address), size) == 0;
  close(visitor);
  return found;
}

// An abort would interrupt the other ranks' ends.
void await_others(const Failure& failure) {
  if (failure.sign >= 0) close(failure.sign);  // first: they wait for this one, too
  while (Clock::now() < failure.until &&
         std::any_of(failure.others.begin(), failure.others.end(), is_bound))
    usleep(kLook);
}

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
  await_others(self->failure);
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
        registered = new Exit{getpid(),
                              reinterpret_cast<int (*)()>(finalize),
                              reinterpret_cast<int (*)(int*)>(finalized),
                              launcher,
                              rank,
                              {}};
        on_exit(at_exit, registered);
      },
      nb::arg("finalize"), nb::arg("finalized"), nb::arg("launcher"), nb::arg("rank"));
  m.def(
      "abort_at_exit",
      [](int sign, const std::vector<std::string>& others, double seconds) {
        if (registered == nullptr || registered->pid != getpid()) return false;
        if (registered->launcher < 0) return false;  // others may take this end for a good one
        const auto left = std::chrono::duration<double>(seconds);
        registered->failure = {sign, others,
                               Clock::now() + std::chrono::duration_cast<Clock::duration>(left)};
        return true;
      },
      nb::arg("sign"), nb::arg("others"), nb::arg("seconds"));
}

}  // namespace allreduce
