// How up to three inputs that broadcast to a contiguous output are read.
#pragma once

constexpr int kAxes = 6, kInputs = 3;

// In elements; 0 steps repeat. `rank` is 0 where all inputs are contiguous in the output's shape.
struct Strided {
  int rank;
  long long size[kAxes];
  long long stride[kInputs][kAxes];
};

struct Offsets {
  long long at[kInputs];
};

// Gives where element `index` of the output finds its inputs.
__device__ inline Offsets offsets_of(const Strided& s, long long index) {
  Offsets found = {{index, index, index}};
  if (s.rank == 0) return found;
  found = {{0, 0, 0}};
#pragma unroll
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    if (axis >= s.rank) continue;
    const long long rest = index / s.size[axis], here = index - rest * s.size[axis];
#pragma unroll
    for (int input = 0; input < kInputs; ++input) found.at[input] += here * s.stride[input][axis];
    index = rest;
  }
  return found;
}
