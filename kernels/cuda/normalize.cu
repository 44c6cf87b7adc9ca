// Normalisation to mean 0 and variance 1 of groups of elements; a block of threads per group.
//
// Arrays have three axes (outer, length, inner); a group lies along the middle one. Groups beyond
// the grid follow in strides of it. Bytes moved per element: forward 2 x its size, gradient 4 x,
// with groups that the caches hold.
#include "common.cuh"

template <typename T>
struct Moments {
  T mean, deviation;
};
template <typename T>
__device__ inline Moments<T> moments_of(const T* x, long long length, long long step, T epsilon,
                                        T* part) {
  T sum = 0;
  for (long long j = threadIdx.x; j < length; j += blockDim.x) sum += x[j * step];
  const T mean = block_sum(sum, part) / length;
  T squares = 0;
  for (long long j = threadIdx.x; j < length; j += blockDim.x) {
    const T centred = x[j * step] - mean;
    squares += centred * centred;
  }
  return {mean, sqrt(block_sum(squares, part) / length + epsilon)};
}
template <typename T>
__device__ inline void normalize(T* __restrict__ out, const T* __restrict__ x, long long outer,
                                 long long length, long long inner, T epsilon) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < outer * inner; i += gridDim.x) {
    const long long first = i / inner * length * inner + i % inner;
    const Moments<T> m = moments_of(x + first, length, inner, epsilon, part);
    for (long long j = threadIdx.x; j < length; j += blockDim.x)
      out[first + j * inner] = (x[first + j * inner] - m.mean) / m.deviation;
  }
}
// y is the normalized x: (dy - mean(dy) - y mean(dy y)) / deviation(x).
template <typename T>
__device__ inline void normalize_gradient(T* __restrict__ out, const T* __restrict__ dy,
                                          const T* __restrict__ x, const T* __restrict__ y,
                                          long long outer, long long length, long long inner,
                                          T epsilon) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < outer * inner; i += gridDim.x) {
    const long long first = i / inner * length * inner + i % inner;
    const Moments<T> m = moments_of(x + first, length, inner, epsilon, part);
    T sum = 0, along = 0;
    for (long long j = threadIdx.x; j < length; j += blockDim.x) {
      const long long at = first + j * inner;
      sum += dy[at];
      along += dy[at] * y[at];
    }
    const T mean = block_sum(sum, part) / length;
    const T slope = block_sum(along, part) / length;
    for (long long j = threadIdx.x; j < length; j += blockDim.x) {
      const long long at = first + j * inner;
      out[at] = (dy[at] - mean - y[at] * slope) / m.deviation;
    }
  }
}

#define NORMALIZE(suffix, T)                                                                 \
  KERNEL(256)                                                                                \
  normalize_##suffix(T* out, const T* x, long long outer, long long length, long long inner, \
                     double epsilon) {                                                       \
    normalize(out, x, outer, length, inner, (T)epsilon);                                     \
  }                                                                                          \
  KERNEL(256)                                                                                \
  normalize_gradient_##suffix(T* out, const T* dy, const T* x, const T* y, long long outer,  \
                              long long length, long long inner, double epsilon) {           \
    normalize_gradient(out, dy, x, y, outer, length, inner, (T)epsilon);                     \
  }
NORMALIZE(f32, float)
NORMALIZE(f64, double)
