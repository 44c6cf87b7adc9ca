// Reductions of one axis: x is [outer][length][inner], the output [outer][segments][inner].
//
// A segment is so many elements of the axis, or the rest; to reduce a long axis of few rows, it is
// cut into segments, and their results are reduced again. Every run gives the same bits: no
// atomics. With inner == 1, a block of 256 threads folds a segment (those beyond the grid in
// strides of it); else a thread folds a column of one, which is as coalesced.
// Bytes moved per element of x: its size, once.
#include "common.cuh"

struct Axis {
  long long outer, length, inner, segment;
};

template <typename T, typename Wide, typename Start, typename Fold, typename Finish>
__device__ inline void reduce(T* __restrict__ out, const T* __restrict__ x, const Axis& a,
                              Wide* part, Start start, Fold fold, Finish finish) {
  const long long segments = a.length ? (a.length + a.segment - 1) / a.segment : 1;
  if (a.inner == 1) {
    for (long long row = blockIdx.x; row < a.outer * segments; row += gridDim.x) {
      const long long first = row % segments * a.segment;
      const long long count = smaller(a.segment, a.length - first);
      const T* from = x + row / segments * a.length + first;
      Wide value = start(from);
      for (long long i = threadIdx.x; i < count; i += blockDim.x)
        value = fold(value, (Wide)widen(from[i]));
      value = block_fold(value, part, fold);
      if (threadIdx.x == 0) put(out + row, finish(value));
    }
    return;
  }
  for (long long i = first_index(); i < a.outer * segments * a.inner; i += stride_of_grid()) {
    const long long row = i / a.inner, first = row % segments * a.segment;
    const long long count = smaller(a.segment, a.length - first);
    const T* from = x + (row / segments * a.length + first) * a.inner + i % a.inner;
    Wide value = start(from);
    for (long long j = 0; j < count; ++j) value = fold(value, (Wide)widen(from[j * a.inner]));
    put(out + i, finish(value));
  }
}

#define REDUCE(suffix, T, Wide)                                                   \
  KERNEL(256) sum_to_##suffix(T* out, const T* x, Axis axis, Wide scale) {        \
    __shared__ Wide part[32];                                                     \
    reduce(                                                                       \
        out, x, axis, part, [](const T*) { return (Wide)0; },                     \
        [](Wide a, Wide b) { return a + b; }, [=](Wide a) { return a * scale; }); \
  }                                                                               \
  KERNEL(256) max_##suffix(T* out, const T* x, Axis axis) {                       \
    __shared__ Wide part[32];                                                     \
    reduce(                                                                       \
        out, x, axis, part, [](const T* from) { return (Wide)widen(*from); },     \
        [](Wide a, Wide b) { return larger(a, b); }, [](Wide a) { return a; });   \
  }                                                                               \
  KERNEL(256) min_##suffix(T* out, const T* x, Axis axis) {                       \
    __shared__ Wide part[32];                                                     \
    reduce(                                                                       \
        out, x, axis, part, [](const T* from) { return (Wide)widen(*from); },     \
        [](Wide a, Wide b) { return smaller(a, b); }, [](Wide a) { return a; });  \
  }
REDUCE(f32, float, float)
REDUCE(f64, double, double)
REDUCE(i32, int, int)
REDUCE(i64, long long, long long)
REDUCE(f16, __half, float)
REDUCE(bf16, __nv_bfloat16, float)

// The first of the best elements; NaN counts as the best, as in NumPy. A thread per output.
template <typename T, typename Better>
__device__ inline void find_best(long long* __restrict__ out, const T* __restrict__ x,
                                 long long outer, long long length, long long inner,
                                 Better is_better) {
  for (long long i = first_index(); i < outer * inner; i += stride_of_grid()) {
    const T* from = x + i / inner * length * inner + i % inner;
    long long best = 0;
    T value = from[0];
    for (long long j = 1; j < length && !is_nan(value); ++j) {
      const T next = from[j * inner];
      if (is_nan(next) || is_better(next, value)) {
        best = j;
        value = next;
      }
    }
    out[i] = best;
  }
}

#define FIND(suffix, T)                                                          \
  KERNEL(256)                                                                    \
  argmax_##suffix(long long* out, const T* x, long long outer, long long length, \
                  long long inner) {                                             \
    find_best(out, x, outer, length, inner, [](T a, T b) { return a > b; });     \
  }                                                                              \
  KERNEL(256)                                                                    \
  argmin_##suffix(long long* out, const T* x, long long outer, long long length, \
                  long long inner) {                                             \
    find_best(out, x, outer, length, inner, [](T a, T b) { return a < b; });     \
  }
FIND(f32, float)
FIND(f64, double)
FIND(i32, int)
FIND(i64, long long)

// Sums up to each element, from the first or from the last; a thread per row.
template <typename T>
__device__ inline void sum_up(T* __restrict__ out, const T* __restrict__ x, long long outer,
                              long long length, long long inner, int is_reversed) {
  for (long long i = first_index(); i < outer * inner; i += stride_of_grid()) {
    const long long first = i / inner * length * inner + i % inner;
    T sum = 0;
    for (long long j = 0; j < length; ++j) {
      const long long at = first + (is_reversed ? length - 1 - j : j) * inner;
      out[at] = sum += x[at];
    }
  }
}
#define SUM_UP(suffix, T)                                                                 \
  KERNEL(256)                                                                             \
  cumsum_##suffix(T* out, const T* x, long long outer, long long length, long long inner, \
                  int is_reversed) {                                                      \
    sum_up(out, x, outer, length, inner, is_reversed);                                    \
  }
SUM_UP(f32, float)
SUM_UP(f64, double)
SUM_UP(i32, int)
SUM_UP(i64, long long)

// Sums up to 8 arrays of one device, in their order, times a factor: the gradients of its logical
// GPUs. Bytes moved per element: (inputs + 1) x its size.
template <typename T>
struct Inputs {
  const T* at[8];
};
template <typename T>
__device__ inline void sum_of(T* out, const Inputs<T>& inputs, int count, double factor,
                              long long n) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    auto sum = widen(inputs.at[0][i]);
#pragma unroll
    for (int k = 1; k < 8; ++k)
      if (k < count) sum += widen(inputs.at[k][i]);
    put(out + i, sum * (decltype(sum))factor);
  }
}
#define SUM_OF(suffix, T)                                                                        \
  KERNEL(256) sum_of_##suffix(T* out, Inputs<T> inputs, int count, double factor, long long n) { \
    sum_of(out, inputs, count, factor, n);                                                       \
  }
SUM_OF(f32, float)
SUM_OF(f64, double)
SUM_OF(i32, int)
SUM_OF(i64, long long)
SUM_OF(f16, __half)
SUM_OF(bf16, __nv_bfloat16)
