// Lets CUDA C++ kernels run on the host, for tests of their numbers; `host_cuda.cpp` is the engine.
//
// Included before a .cu file, which is otherwise compiled as it is. Kernels keep to a subset: free
// functions, `extern "C" __global__`, SHARED_DYNAMIC, full-warp masks, no PTX, no device globals.
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#include "host_kernel.h"

#define __host__
#define __global__ __attribute__((noinline))
#define __device__ static
#define __forceinline__ inline
#define __constant__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("cuda_shared")))
#define SHARED_DYNAMIC(T, name) T* name = reinterpret_cast<T*>(host_cuda::dynamic)
#define HIDDEN __attribute__((visibility("hidden")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint3 {
  unsigned x, y, z;
};
extern HIDDEN uint3 threadIdx, blockIdx;
extern HIDDEN dim3 blockDim, gridDim;
constexpr int warpSize = 32;

template <class T>
struct alignas(2 * sizeof(T)) vector2 {
  T x, y;
};
template <class T>
struct alignas(4 * sizeof(T)) vector4 {
  T x, y, z, w;
};
using float2 = vector2<float>;
using float4 = vector4<float>;
using int2 = vector2<int>;
using int4 = vector4<int>;
using uint2 = vector2<unsigned>;
using uint4 = vector4<unsigned>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct alignas(2) __half {
  _Float16 value;
};
inline float __half2float(__half h) { return static_cast<float>(h.value); }
inline __half __float2half_rn(float f) { return {static_cast<_Float16>(f)}; }
struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 b) {
  const std::uint32_t bits = std::uint32_t{b.bits} << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  std::uint32_t u;
  memcpy(&u, &f, 4);
  return {static_cast<std::uint16_t>(f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float __int_as_float(int i) {
  float f;
  memcpy(&f, &i, 4);
  return f;
}
inline int __float_as_int(float f) {
  int i;
  memcpy(&i, &f, 4);
  return i;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

namespace host_cuda {
using Where = std::source_location;
extern HIDDEN char* dynamic;  // dynamic shared memory of the block
HIDDEN void meet_block(Where where);
HIDDEN std::uint64_t exchange(unsigned mask, std::uint64_t value, int from, Where where);
HIDDEN int lane();
HIDDEN const char* launch(void (*body)(void*), void* arguments, const unsigned* grid,
                          const unsigned* block, std::size_t shared, std::uint64_t seed);

template <class T>
T shuffle(unsigned mask, T value, int from, Where where) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, from, where);
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <auto kernel>
struct Runner;
template <class... A, void (*kernel)(A...)>
struct Runner<kernel> {
  static constexpr std::size_t sizes[] = {sizeof(A)..., 0};
  template <std::size_t... I>
  static void call(void** given, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(given[I])...);
  }
  static void body(void* given) {
    call(static_cast<void**>(given), std::index_sequence_for<A...>{});
  }
  static const char* launch(const unsigned* grid, const unsigned* block, std::size_t shared,
                            std::uint64_t seed, void** arguments) {
    return host_cuda::launch(body, arguments, grid, block, shared, seed);
  }
  static constexpr HostKernel described{launch, sizeof...(A), sizes};
};
}  // namespace host_cuda

// One per kernel, at the end of a host build.
#define HOST_KERNEL(name) \
  extern "C" const HostKernel host_kernel_##name = host_cuda::Runner<&name>::described

inline void __syncthreads(host_cuda::Where where = host_cuda::Where::current()) {
  host_cuda::meet_block(where);
}
inline void __syncwarp(unsigned mask = ~0u, host_cuda::Where where = host_cuda::Where::current()) {
  host_cuda::exchange(mask, 0, 0, where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int = 32,
                         host_cuda::Where where = host_cuda::Where::current()) {
  return host_cuda::shuffle(mask, value, host_cuda::lane() ^ other, where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int by, int = 32,
                          host_cuda::Where where = host_cuda::Where::current()) {
  const int lane = host_cuda::lane();
  return host_cuda::shuffle(mask, value, lane + by < 32 ? lane + by : lane, where);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int = 32,
                     host_cuda::Where where = host_cuda::Where::current()) {
  return host_cuda::shuffle(mask, value, from, where);
}

namespace host_cuda {
// One fiber runs at a time; the accesses are atomic for ThreadSanitizer alone.
template <class T, class Next>
T exchange_atomically(T* at, Next next) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  Bits bits = __atomic_load_n(reinterpret_cast<Bits*>(at), __ATOMIC_RELAXED);
  T before;
  memcpy(&before, &bits, sizeof bits);
  const T after = next(before);
  memcpy(&bits, &after, sizeof bits);
  __atomic_store_n(reinterpret_cast<Bits*>(at), bits, __ATOMIC_RELAXED);
  return before;
}
}  // namespace host_cuda
template <class T>
inline T atomicAdd(T* at, std::type_identity_t<T> value) {
  return host_cuda::exchange_atomically(at, [value](T old) { return T(old + value); });
}
template <class T>
inline T atomicMax(T* at, std::type_identity_t<T> value) {
  return host_cuda::exchange_atomically(at, [value](T old) { return old < value ? value : old; });
}
