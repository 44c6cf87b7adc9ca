// The graph's kernels as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "core/gil.h"
#include "cpu/nn/tensor_kernels.h"

namespace allreduce {

// NumPy's own threshold is 500 elements; below it, asking for the lock again costs more than it
// frees.
constexpr std::size_t kWorthUnlocking = 2048;

// Runs `work` without the interpreter's lock where there is enough of it.
template <class Work>
auto unlocked(std::size_t elements, Work work) {
  std::optional<GilRelease> released;
  if (elements >= kWorthUnlocking) released.emplace();
  return work();
}

inline void require(bool holds) {
  if (!holds) throw nanobind::value_error("arrays whose sizes do not fit each other");
}

// The name of an argument that is an array as it is: none is converted.
inline auto operator""_array(const char* name, std::size_t) {
  return nanobind::arg(name).noconvert();
}

}  // namespace allreduce
