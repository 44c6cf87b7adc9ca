// Windows on images (batch, height, width, channels): columns for convolutions, and pooling.
//
// A convolution is a product of its windows' pixels with the kernel (Chellapilla, Puri and Simard,
// "High performance convolutional neural networks for document processing", 2006). Gradients of
// images are gathered by pixel, in the order of the windows' taps: every run gives the same bits.
//
// Bytes moved per element: unfold 2 x its size of each column's, fold the columns' and the images'
// sizes, pooling the images' and the windows' sizes, with windows that the caches hold.
#include "common.cuh"

struct Windows {
  long long images, height, width, channels, rows, columns;  // rows and columns of windows
  int size[2], stride[2], dilation[2], before[2];
};

// The pixel of a tap of a window along one axis: where it is in the image; it may be outside.
__device__ inline long long pixel_of(const Windows& s, int axis, long long window, int tap) {
  return window * s.stride[axis] + (long long)tap * s.dilation[axis] - s.before[axis];
}
// The window whose tap is on a pixel, along one axis, or -1.
__device__ inline long long window_on(const Windows& s, int axis, long long pixel, int tap) {
  const long long from = pixel + s.before[axis] - (long long)tap * s.dilation[axis];
  if (from < 0 || from % s.stride[axis]) return -1;
  const long long window = from / s.stride[axis];
  return window < (axis ? s.columns : s.rows) ? window : -1;
}
__device__ inline bool is_inside(const Windows& s, long long y, long long x) {
  return y >= 0 && y < s.height && x >= 0 && x < s.width;
}
__device__ inline long long pixel_at(const Windows& s, long long image, long long y, long long x,
                                     long long channel) {
  return ((image * s.height + y) * s.width + x) * s.channels + channel;
}
__device__ inline long long window_at(const Windows& s, long long image, long long row,
                                      long long column, long long channel) {
  return ((image * s.rows + row) * s.columns + column) * s.channels + channel;
}

// Where an element is: its channel, column, row and image.
struct Place {
  long long image, y, x, channel;
};
__device__ inline Place place_of(long long i, long long height, long long width,
                                 long long channels) {
  Place p;
  p.channel = i % channels;
  i /= channels;
  p.x = i % width;
  i /= width;
  p.y = i % height;
  p.image = i / height;
  return p;
}
__device__ inline long long pixels(const Windows& s) {
  return s.images * s.height * s.width * s.channels;
}
__device__ inline long long windows(const Windows& s) {
  return s.images * s.rows * s.columns * s.channels;
}

// Columns are (window, group, tap, channel of the group).
template <typename T>
__device__ inline void unfold(T* __restrict__ out, const T* __restrict__ x, int groups,
                              const Windows& s) {
  const long long taps = (long long)s.size[0] * s.size[1], each = s.channels / groups;
  const long long n = windows(s) * taps;
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const Place p = place_of(i / (taps * s.channels), s.rows, s.columns, 1);
    const long long inner = i % (taps * s.channels);
    const long long group = inner / (taps * each);
    const int tap = (int)(inner / each % taps);
    const long long row = pixel_of(s, 0, p.y, tap / s.size[1]);
    const long long column = pixel_of(s, 1, p.x, tap % s.size[1]);
    const long long channel = group * each + inner % each;
    out[i] = is_inside(s, row, column) ? x[pixel_at(s, p.image, row, column, channel)] : (T)0;
  }
}
template <typename T>
__device__ inline void fold(T* __restrict__ out, const T* __restrict__ columns, int groups,
                            const Windows& s) {
  const long long taps = (long long)s.size[0] * s.size[1], each = s.channels / groups;
  for (long long i = first_index(); i < pixels(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.height, s.width, s.channels);
    const long long group = p.channel / each;
    T sum = 0;
    for (int tap = 0; tap < taps; ++tap) {
      const long long row = window_on(s, 0, p.y, tap / s.size[1]);
      const long long column = window_on(s, 1, p.x, tap % s.size[1]);
      if (row < 0 || column < 0) continue;
      const long long window = (p.image * s.rows + row) * s.columns + column;
      sum += columns[((window * groups + group) * taps + tap) * each + p.channel % each];
    }
    out[i] = sum;
  }
}
#define UNFOLD(bytes, T)                                                     \
  KERNEL(256, 2) unfold_##bytes(T* out, const T* x, int groups, Windows s) { \
    unfold(out, x, groups, s);                                               \
  }
UNFOLD(2, unsigned short)
UNFOLD(4, unsigned)
UNFOLD(8, unsigned long long)

// The first tap of a window whose pixel has its largest value, or -1; padding is never the largest.
template <typename T>
__device__ inline int largest_tap(const Windows& s, const T* x, long long image, long long row,
                                  long long column, long long channel, T value) {
  for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap) {
    const long long y = pixel_of(s, 0, row, tap / s.size[1]);
    const long long z = pixel_of(s, 1, column, tap % s.size[1]);
    if (is_inside(s, y, z) && x[pixel_at(s, image, y, z, channel)] == value) return tap;
  }
  return -1;
}
template <typename T>
__device__ inline void max_pool(T* __restrict__ out, const T* __restrict__ x, const Windows& s) {
  for (long long i = first_index(); i < windows(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.rows, s.columns, s.channels);
    bool is_empty = true;
    T value = 0;
    for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap) {
      const long long row = pixel_of(s, 0, p.y, tap / s.size[1]);
      const long long column = pixel_of(s, 1, p.x, tap % s.size[1]);
      if (!is_inside(s, row, column)) continue;
      const T here = x[pixel_at(s, p.image, row, column, p.channel)];
      value = is_empty ? here : larger(value, here);
      is_empty = false;
    }
    out[i] = value;
  }
}
template <typename T>
__device__ inline void max_pool_gradient(T* __restrict__ out, const T* __restrict__ dy,
                                         const T* __restrict__ x, const T* __restrict__ y,
                                         const Windows& s) {
  for (long long i = first_index(); i < pixels(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.height, s.width, s.channels);
    T sum = 0;
    for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap) {
      const long long row = window_on(s, 0, p.y, tap / s.size[1]);
      const long long column = window_on(s, 1, p.x, tap % s.size[1]);
      if (row < 0 || column < 0) continue;
      const long long at = window_at(s, p.image, row, column, p.channel);
      if (x[i] == y[at] && largest_tap(s, x, p.image, row, column, p.channel, y[at]) == tap)
        sum += dy[at];
    }
    out[i] = sum;
  }
}
// The elements of `u` where the windows' largest pixels are.
template <typename T>
__device__ inline void max_pool_chosen(T* __restrict__ out, const T* __restrict__ u,
                                       const T* __restrict__ x, const T* __restrict__ y,
                                       const Windows& s) {
  for (long long i = first_index(); i < windows(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.rows, s.columns, s.channels);
    const int tap = largest_tap(s, x, p.image, p.y, p.x, p.channel, y[i]);
    const long long row = pixel_of(s, 0, p.y, tap / s.size[1]);
    const long long column = pixel_of(s, 1, p.x, tap % s.size[1]);
    out[i] = tap < 0 ? (T)0 : u[pixel_at(s, p.image, row, column, p.channel)];
  }
}
// How many pixels of the image lie in a window.
__device__ inline int pixels_in(const Windows& s, long long row, long long column) {
  int count = 0;
  for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap)
    count +=
        is_inside(s, pixel_of(s, 0, row, tap / s.size[1]), pixel_of(s, 1, column, tap % s.size[1]));
  return count;
}
template <typename T>
__device__ inline void average_pool(T* __restrict__ out, const T* __restrict__ x,
                                    const Windows& s) {
  for (long long i = first_index(); i < windows(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.rows, s.columns, s.channels);
    T sum = 0;
    for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap) {
      const long long row = pixel_of(s, 0, p.y, tap / s.size[1]);
      const long long column = pixel_of(s, 1, p.x, tap % s.size[1]);
      if (is_inside(s, row, column)) sum += x[pixel_at(s, p.image, row, column, p.channel)];
    }
    out[i] = sum / pixels_in(s, p.y, p.x);
  }
}
template <typename T>
__device__ inline void average_pool_gradient(T* __restrict__ out, const T* __restrict__ dy,
                                             const Windows& s) {
  for (long long i = first_index(); i < pixels(s); i += stride_of_grid()) {
    const Place p = place_of(i, s.height, s.width, s.channels);
    T sum = 0;
    for (int tap = 0; tap < s.size[0] * s.size[1]; ++tap) {
      const long long row = window_on(s, 0, p.y, tap / s.size[1]);
      const long long column = window_on(s, 1, p.x, tap % s.size[1]);
      if (row < 0 || column < 0) continue;
      sum += dy[window_at(s, p.image, row, column, p.channel)] / pixels_in(s, row, column);
    }
    out[i] = sum;
  }
}

#define POOL(suffix, T)                                                                      \
  KERNEL(256, 2) fold_##suffix(T* out, const T* columns, int groups, Windows s) {            \
    fold(out, columns, groups, s);                                                           \
  }                                                                                          \
  KERNEL(256, 2) max_pool2d_##suffix(T* out, const T* x, Windows s) { max_pool(out, x, s); } \
  KERNEL(256, 2)                                                                             \
  max_pool2d_gradient_##suffix(T* out, const T* dy, const T* x, const T* y, Windows s) {     \
    max_pool_gradient(out, dy, x, y, s);                                                     \
  }                                                                                          \
  KERNEL(256, 2)                                                                             \
  max_pool2d_chosen_##suffix(T* out, const T* u, const T* x, const T* y, Windows s) {        \
    max_pool_chosen(out, u, x, y, s);                                                        \
  }                                                                                          \
  KERNEL(256, 2) average_pool2d_##suffix(T* out, const T* x, Windows s) {                    \
    average_pool(out, x, s);                                                                 \
  }                                                                                          \
  KERNEL(256, 2) average_pool2d_gradient_##suffix(T* out, const T* dy, Windows s) {          \
    average_pool_gradient(out, dy, s);                                                       \
  }
POOL(f32, float)
POOL(f64, double)
