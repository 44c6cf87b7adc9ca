// Softmax and cross-entropies of rows of logits; a block of 128 threads per row.
//
// Rows beyond the grid follow in strides of it. Bytes moved per element of the logits, with rows
// that the caches hold: softmax and gradients 2 x its size, losses its size.
#include "common.cuh"

// Of one row: the largest logit, and the sum of exp(logit - largest).
template <typename T>
struct Total {
  T shift, sum;
};
template <typename T>
__device__ inline Total<T> total_of(const T* row, long long columns, T* part) {
  T shift = row[0];
  for (long long j = threadIdx.x; j < columns; j += blockDim.x) shift = larger(shift, row[j]);
  shift = block_fold(shift, part, [](T a, T b) { return larger(a, b); });
  T sum = 0;
  for (long long j = threadIdx.x; j < columns; j += blockDim.x) sum += exp(row[j] - shift);
  return {shift, block_sum(sum, part)};
}

template <typename T>
__device__ inline void softmax(T* out, const T* x, long long rows, long long columns,
                               bool is_logarithm) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const T* row = x + i * columns;
    T* to = out + i * columns;
    const Total<T> total = total_of(row, columns, part);
    const T logarithm = log(total.sum);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
      to[j] =
          is_logarithm ? row[j] - total.shift - logarithm : exp(row[j] - total.shift) / total.sum;
  }
}

// A label outside of the classes sets *bad to its row + 1 (the largest such), and gives NaN.
template <typename L>
__device__ inline bool has_label(L label, long long row, long long columns, int* bad) {
  const bool is_known = label >= 0 && (long long)label < columns;
  if (!is_known && threadIdx.x == 0) atomicMax(bad, (int)(row + 1));
  return is_known;
}
template <typename T, typename L>
__device__ inline void sparse_loss(T* __restrict__ out, const L* __restrict__ labels,
                                   const T* __restrict__ logits, long long rows, long long columns,
                                   int* bad) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const T* row = logits + i * columns;
    const L label = labels[i];
    const bool is_known = has_label(label, i, columns, bad);
    const Total<T> total = total_of(row, columns, part);
    // The subtractions apart: log(sum) is small, shift and the label's logit may be large.
    if (threadIdx.x == 0)
      out[i] =
          is_known ? log(total.sum) + (total.shift - row[label]) : (T)__int_as_float(0x7fffffff);
  }
}
template <typename T, typename L>
__device__ inline void sparse_gradient(T* __restrict__ out, const T* __restrict__ dy,
                                       const L* __restrict__ labels, const T* __restrict__ logits,
                                       long long rows, long long columns, int* bad) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const T* row = logits + i * columns;
    T* to = out + i * columns;
    const L label = labels[i];
    const bool is_known = has_label(label, i, columns, bad);
    const Total<T> total = total_of(row, columns, part);
    const T slope = is_known ? dy[i] : (T)__int_as_float(0x7fffffff);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
      to[j] = (exp(row[j] - total.shift) / total.sum - (T)(j == (long long)label)) * slope;
  }
}

template <typename T>
__device__ inline void loss(T* __restrict__ out, const T* __restrict__ targets,
                            const T* __restrict__ logits, long long rows, long long columns) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const T *row = logits + i * columns, *target = targets + i * columns;
    const Total<T> total = total_of(row, columns, part);
    const T logarithm = log(total.sum);
    T sum = 0;
    // A class of no weight may have a logit of minus infinity.
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
      sum += target[j] == 0 ? (T)0 : target[j] * (logarithm + (total.shift - row[j]));
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) out[i] = sum;
  }
}
template <typename T>
__device__ inline void loss_gradient(T* __restrict__ out, const T* __restrict__ dy,
                                     const T* __restrict__ targets, const T* __restrict__ logits,
                                     long long rows, long long columns) {
  __shared__ T part[32];
  for (long long i = blockIdx.x; i < rows; i += gridDim.x) {
    const T *row = logits + i * columns, *target = targets + i * columns;
    T* to = out + i * columns;
    const Total<T> total = total_of(row, columns, part);
    T weight = 0;
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) weight += target[j];
    const T share = block_sum(weight, part) / total.sum, slope = dy[i];
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
      to[j] = (exp(row[j] - total.shift) * share - target[j]) * slope;
  }
}

#define SPARSE(suffix, T, label, L)                                                      \
  KERNEL(128, 2)                                                                         \
  sparse_cross_entropy_##suffix##_##label(T* out, const L* labels, const T* logits,      \
                                          long long rows, long long columns, int* bad) { \
    sparse_loss(out, labels, logits, rows, columns, bad);                                \
  }                                                                                      \
  KERNEL(128, 2)                                                                         \
  sparse_cross_entropy_gradient_##suffix##_##label(T* out, const T* dy, const L* labels, \
                                                   const T* logits, long long rows,      \
                                                   long long columns, int* bad) {        \
    sparse_gradient(out, dy, labels, logits, rows, columns, bad);                        \
  }
#define ROWS(suffix, T)                                                                        \
  KERNEL(128, 2) softmax_##suffix(T* out, const T* x, long long rows, long long columns) {     \
    softmax(out, x, rows, columns, false);                                                     \
  }                                                                                            \
  KERNEL(128, 2) log_softmax_##suffix(T* out, const T* x, long long rows, long long columns) { \
    softmax(out, x, rows, columns, true);                                                      \
  }                                                                                            \
  KERNEL(128, 2)                                                                               \
  cross_entropy_##suffix(T* out, const T* targets, const T* logits, long long rows,            \
                         long long columns) {                                                  \
    loss(out, targets, logits, rows, columns);                                                 \
  }                                                                                            \
  KERNEL(128, 2)                                                                               \
  cross_entropy_gradient_##suffix(T* out, const T* dy, const T* targets, const T* logits,      \
                                  long long rows, long long columns) {                         \
    loss_gradient(out, dy, targets, logits, rows, columns);                                    \
  }                                                                                            \
  SPARSE(suffix, T, i32, int)                                                                  \
  SPARSE(suffix, T, i64, long long)                                                            \
  SPARSE(suffix, T, u8, unsigned char)
ROWS(f32, float)
ROWS(f64, double)
