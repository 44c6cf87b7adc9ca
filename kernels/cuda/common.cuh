// Shared by all kernels: dynamic shared memory, folds over blocks, half types.
//
// Kernels keep to a subset of CUDA C++, so that the same files run on the host in tests: free
// functions, KERNEL, SHARED_DYNAMIC, full-warp masks, no PTX, no device globals.
// NVRTC compiles each .cu file by itself, as C++17, and includes nothing of the standard library.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// A kernel that is launched with so many threads in a block, as modules.py and rows.py do; without
// their number the compiler leaves registers for 1024. A second number asks for so many blocks on a
// multiprocessor.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

#ifndef SHARED_DYNAMIC
#define SHARED_DYNAMIC(T, name) extern __shared__ T name[]
#endif

// The first element of this thread, and the distance to its next one.
__device__ inline long long first_index() {
  return blockIdx.x * (long long)blockDim.x + threadIdx.x;
}
__device__ inline long long stride_of_grid() { return (long long)gridDim.x * blockDim.x; }

template <typename T>
__device__ inline bool is_nan(T x) {
  return x != x;
}

// As NumPy's: NaN wins.
template <typename T>
__device__ inline T larger(T a, T b) {
  return is_nan(a) ? a : (a > b ? a : b);
}
template <typename T>
__device__ inline T smaller(T a, T b) {
  return is_nan(a) ? a : (a < b ? a : b);
}

// Folds one value of each thread of a block of whole warps; all threads get the result. The order
// is fixed, so that every run gives the same bits. `part` holds 32 values in shared memory.
template <typename T, typename Fold>
__device__ inline T block_fold(T x, T* part, Fold fold) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  for (int mask = 16; mask; mask >>= 1) x = fold(x, __shfl_xor_sync(0xffffffffu, x, mask));
  __syncthreads();  // an earlier fold may still be read
  if (lane == 0) part[warp] = x;
  __syncthreads();
  x = part[0];
  for (int i = 1; i < warps; ++i) x = fold(x, part[i]);
  return x;
}
template <typename T>
__device__ inline T block_sum(T x, T* part) {
  return block_fold(x, part, [](T a, T b) { return a + b; });
}

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline int widen(int x) { return x; }
__device__ inline long long widen(long long x) { return x; }
__device__ inline void put(float* at, float x) { *at = x; }
__device__ inline void put(double* at, double x) { *at = x; }
__device__ inline void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ inline void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }
__device__ inline void put(int* at, int x) { *at = x; }
__device__ inline void put(long long* at, long long x) { *at = x; }
