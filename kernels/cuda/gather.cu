// Elements by their indices, and sums back to where they came from; parts of rows.
//
// Arrays have three axes (before, along, after), indices count along the middle one. An index that
// is out of range sets *bad to its place + 1 (the largest such); what it asks for has all bits set,
// which is a NaN. Sums add in the order of the indices: every run gives the same bits.
//
// Bytes moved per element: take and rows 2 x its size, and an index per row; scatter_add its size
// of the gradient and twice of the sum; the others their input and output once.
#include "common.cuh"

// Counts negative ones from the end where they wrap; returns -1 if it is out of range.
template <typename I>
__device__ inline long long place_of(I index, long long size, int wraps) {
  const long long at = index;
  if (at >= size || at < (wraps ? -size : 0)) return -1;
  return at < 0 ? at + size : at;
}
__device__ inline void report(int* bad, long long place) {
  atomicMax(bad, place < 0x7ffffffe ? (int)(place + 1) : 0x7fffffff);
}

template <typename T, typename I>
__device__ inline void take(T* __restrict__ out, const T* __restrict__ x,
                            const I* __restrict__ indices, long long before, long long count,
                            long long size, long long after, int wraps, int* bad) {
  for (long long i = first_index(); i < before * count * after; i += stride_of_grid()) {
    const long long row = i / after, k = row % count, at = place_of(indices[k], size, wraps);
    if (at < 0) report(bad, k);
    out[i] = at < 0 ? (T)-1 : x[(row / count * size + at) * after + i % after];
  }
}
template <typename T, typename I>
__device__ inline void take_along(T* __restrict__ out, const T* __restrict__ x,
                                  const I* __restrict__ indices, long long before, long long count,
                                  long long size, long long after, int* bad) {
  for (long long i = first_index(); i < before * count * after; i += stride_of_grid()) {
    const long long at = place_of(indices[i], size, 1);
    if (at < 0) report(bad, i);
    out[i] = at < 0 ? (T)-1 : x[(i / after / count * size + at) * after + i % after];
  }
}

#define TAKE(bytes, T, index, I)                                                                  \
  KERNEL(256, 2)                                                                                  \
  take_##bytes##_##index(T* out, const T* x, const I* indices, long long before, long long count, \
                         long long size, long long after, int wraps, int* bad) {                  \
    take(out, x, indices, before, count, size, after, wraps, bad);                                \
  }                                                                                               \
  KERNEL(256, 2)                                                                                  \
  take_along_axis_##bytes##_##index(T* out, const T* x, const I* indices, long long before,       \
                                    long long count, long long size, long long after, int* bad) { \
    take_along(out, x, indices, before, count, size, after, bad);                                 \
  }
#define TAKE_BY(index, I)           \
  TAKE(1, unsigned char, index, I)  \
  TAKE(2, unsigned short, index, I) \
  TAKE(4, unsigned, index, I)       \
  TAKE(8, unsigned long long, index, I)
TAKE_BY(i32, int)
TAKE_BY(i64, long long)

// Links the places of equal indices in their order: next[k] is the next one, or -1; is_first[k]
// tells whether there is none before. Compares each with each, which caches serve.
template <typename I>
__device__ inline void link(int* __restrict__ next, int* __restrict__ is_first,
                            const I* __restrict__ indices, long long count, long long size,
                            int* bad) {
  for (long long k = first_index(); k < count; k += stride_of_grid()) {
    const long long own = place_of(indices[k], size, 1);
    if (own < 0) report(bad, k);
    long long later = k + 1, earlier = k - 1;
    while (later < count && place_of(indices[later], size, 1) != own) ++later;
    while (earlier >= 0 && place_of(indices[earlier], size, 1) != own) --earlier;
    next[k] = later < count ? (int)later : -1;
    is_first[k] = own >= 0 && earlier < 0;
  }
}
// `out` is zeros; each of its rows that an index names is written once.
template <typename T, typename I>
__device__ inline void scatter_add(T* __restrict__ out, const T* __restrict__ dy,
                                   const I* __restrict__ indices, const int* __restrict__ next,
                                   const int* __restrict__ is_first, long long before,
                                   long long count, long long size, long long after) {
  for (long long i = first_index(); i < before * count * after; i += stride_of_grid()) {
    const long long row = i / after, k = row % count, block = row / count, column = i % after;
    if (!is_first[k]) continue;
    T sum = 0;
    for (long long from = k; from >= 0; from = next[from])
      sum += dy[(block * count + from) * after + column];
    out[(block * size + place_of(indices[k], size, 1)) * after + column] = sum;
  }
}
// As above, of indices that are others in each row: a thread adds up one row.
template <typename T, typename I>
__device__ inline void add_along(T* __restrict__ out, const T* __restrict__ dy,
                                 const I* __restrict__ indices, long long before, long long count,
                                 long long size, long long after, int* bad) {
  for (long long i = first_index(); i < before * after; i += stride_of_grid()) {
    const long long block = i / after, column = i % after;
    for (long long k = 0; k < count; ++k) {
      const long long from = (block * count + k) * after + column;
      const long long at = place_of(indices[from], size, 1);
      if (at < 0)
        report(bad, from);
      else
        out[(block * size + at) * after + column] += dy[from];
    }
  }
}
template <typename T, typename I>
__device__ inline void one_hot(T* __restrict__ out, const I* __restrict__ labels, long long rows,
                               long long depth, int* bad) {
  for (long long i = first_index(); i < rows * depth; i += stride_of_grid()) {
    const long long at = place_of(labels[i / depth], depth, 0);
    if (at < 0) report(bad, i / depth);
    out[i] = (T)(at == i % depth);
  }
}

#define SCATTER(suffix, T, index, I)                                                              \
  KERNEL(256, 2)                                                                                  \
  scatter_add_##suffix##_##index(T* out, const T* dy, const I* indices, const int* next,          \
                                 const int* is_first, long long before, long long count,          \
                                 long long size, long long after) {                               \
    scatter_add(out, dy, indices, next, is_first, before, count, size, after);                    \
  }                                                                                               \
  KERNEL(256, 2)                                                                                  \
  add_along_axis_##suffix##_##index(T* out, const T* dy, const I* indices, long long before,      \
                                    long long count, long long size, long long after, int* bad) { \
    add_along(out, dy, indices, before, count, size, after, bad);                                 \
  }
#define ONE_HOT(suffix, T, index, I)                                                               \
  KERNEL(256, 2)                                                                                   \
  one_hot_##suffix##_##index(T* out, const I* labels, long long rows, long long depth, int* bad) { \
    one_hot(out, labels, rows, depth, bad);                                                        \
  }
#define BY_INDEX(index, I)                                                                  \
  KERNEL(256, 2)                                                                            \
  link_##index(int* next, int* is_first, const I* indices, long long count, long long size, \
               int* bad) {                                                                  \
    link(next, is_first, indices, count, size, bad);                                        \
  }                                                                                         \
  SCATTER(f32, float, index, I)                                                             \
  SCATTER(f64, double, index, I)                                                            \
  ONE_HOT(f32, float, index, I)                                                             \
  ONE_HOT(f64, double, index, I)                                                            \
  ONE_HOT(i32, int, index, I)                                                               \
  ONE_HOT(i64, long long, index, I)
BY_INDEX(i32, int)
BY_INDEX(i64, long long)

// Tells whether a comes before b in descending order; NaN is the largest, as in NumPy.
template <typename T>
__device__ inline bool is_larger(T a, T b) {
  return is_nan(a) ? !is_nan(b) : a > b;
}
// Finds the k largest of each row, equal ones in their order; a thread per row.
template <typename T>
__device__ inline void top_k(long long* __restrict__ out, const T* __restrict__ x, long long rows,
                             long long columns, long long count) {
  for (long long i = first_index(); i < rows; i += stride_of_grid()) {
    const T* row = x + i * columns;
    long long last = -1;
    for (long long k = 0; k < count; ++k) {
      long long best = -1;
      for (long long j = 0; j < columns; ++j) {
        const bool is_left =
            last < 0 || is_larger(row[last], row[j]) || (!is_larger(row[j], row[last]) && j > last);
        if (is_left && (best < 0 || is_larger(row[j], row[best]))) best = j;
      }
      out[i * count + k] = last = best;
    }
  }
}
// Sorts numbers that are not NaN; counts those that come before each.
template <typename T>
__device__ inline void order(long long* __restrict__ out, const T* __restrict__ x, long long n) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    long long rank = 0;
    for (long long j = 0; j < n; ++j) rank += x[j] < x[i] || (x[j] == x[i] && j < i);
    out[rank] = i;
  }
}
#define SORT(suffix, T)                                                                 \
  KERNEL(256, 2)                                                                        \
  top_k_indices_##suffix(long long* out, const T* x, long long rows, long long columns, \
                         long long count) {                                             \
    top_k(out, x, rows, columns, count);                                                \
  }                                                                                     \
  KERNEL(256, 2) order_##suffix(long long* out, const T* x, long long n) { order(out, x, n); }
SORT(f32, float)
SORT(f64, double)
SORT(i32, int)
SORT(i64, long long)

// A replica's own rows of all replicas', and back with zeros around; `unit` elements belong to each
// of the rows that *start counts.
template <typename T>
__device__ inline void own_rows(T* __restrict__ out, const T* __restrict__ x,
                                const long long* __restrict__ start, long long unit, long long n) {
  const long long first = *start * unit;
  for (long long i = first_index(); i < n; i += stride_of_grid()) out[i] = x[first + i];
}
template <typename T>
__device__ inline void among_rows(T* __restrict__ out, const T* __restrict__ x,
                                  const long long* __restrict__ start, long long unit,
                                  long long own, long long n) {
  const long long first = *start * unit;
  for (long long i = first_index(); i < n; i += stride_of_grid())
    out[i] = i >= first && i < first + own ? x[i - first] : (T)0;
}
#define ROWS(bytes, T)                                                                          \
  KERNEL(256, 2)                                                                                \
  own_rows_##bytes(T* out, const T* x, const long long* start, long long unit, long long n) {   \
    own_rows(out, x, start, unit, n);                                                           \
  }                                                                                             \
  KERNEL(256, 2)                                                                                \
  among_rows_##bytes(T* out, const T* x, const long long* start, long long unit, long long own, \
                     long long n) {                                                             \
    among_rows(out, x, start, unit, own, n);                                                    \
  }
ROWS(1, unsigned char)
ROWS(2, unsigned short)
ROWS(4, unsigned)
ROWS(8, unsigned long long)
