// One copy out of another process's memory, where the kernel lets this process look into it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduce {

// Copies `bytes` from an address of the process; returns 0, or an errno value: ESRCH if the process
// is gone, EPERM if it may not be read, EFAULT if its memory there cannot be.
int read_process(int pid, void* to, std::uint64_t address, std::size_t bytes);
// Whether other processes can read an array of this process: not if its memory belongs to a device,
// or the kernel hides it from others. Looks at both ends.
bool readable(const void* array, std::size_t bytes);

}  // namespace allreduce
