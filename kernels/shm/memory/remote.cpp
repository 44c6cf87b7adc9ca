#include "shm/memory/remote.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace allreduce {

int read_process(int pid, void* to, std::uint64_t address, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  while (bytes != 0) {  // less than asked for is copied where the rest is out of reach
    const iovec here{target, bytes};
    const iovec there{reinterpret_cast<void*>(address), bytes};
    const ssize_t copied = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (copied < 0) return errno;
    if (copied == 0) return EFAULT;
    target += copied;
    address += static_cast<std::uint64_t>(copied);
    bytes -= static_cast<std::size_t>(copied);
  }
  return 0;
}

bool readable(const void* array, std::size_t bytes) {
  if (bytes == 0) return true;
  std::byte ends[2];
  auto* first = static_cast<std::byte*>(const_cast<void*>(array));
  const iovec here{ends, sizeof(ends)};
  const iovec there[] = {{first, 1}, {first + bytes - 1, 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == sizeof(ends);
}

}  // namespace allreduce
