// What a host build of a kernel tells the stand-in driver; `host_cuda.h` makes one per kernel.
#pragma once

#include <cstddef>
#include <cstdint>

struct HostKernel {
  // Runs the kernel; returns what is wrong with it, or nullptr.
  const char* (*launch)(const unsigned* grid, const unsigned* block, std::size_t shared,
                        std::uint64_t seed, void** arguments);
  int count;                 // of parameters
  const std::size_t* sizes;  // bytes of each
};
