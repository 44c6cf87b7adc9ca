// Convolution without columns: each small block of results stays in registers while the windows'
// pixels, which lie in runs, are multiplied with the kernel's rows (Georganas et al., "Anatomy of
// high-performance deep learning convolutions on SIMD architectures", 2018, section II). For files
// that are compiled once per KERNEL_LEVEL.
#pragma once

#include "cpu/nn/image_kernels.h"
#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// Results of a block: rows of two vectors each, which fill the registers together with two vectors
// of operands.
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
template <class T>
constexpr std::size_t kColumns = 2 * kWidth / sizeof(T);
// Pixels of whose gradients a copy stays in a level-1 cache, with the images' own pixels.
constexpr std::size_t kBand = 64;

// Parameters that are equal for all images of a call.
template <class T>
struct Layout {
  Layout(const Images& x, const Images& out, const Windows& windows, T* workspace)
      : windows(windows), x(x), out(out) {
    // Taps side by side are one run, unless there is dilation between them.
    const bool joined = windows.dilation.width == 1;
    length = (joined ? windows.size.width : 1) * x.channels;
    runs = windows.size.height * (joined ? 1 : windows.size.width);
    along = windows.strides.width * x.channels;
    row = windows.padded.width * x.channels;
    panels = (out.channels + kColumns<T> - 1) / kColumns<T>;
    packed = workspace;
    band = packed + panels * runs * length * kColumns<T>;
    image = band + bands() * kColumns<T>;
  }

  static std::size_t workspace_size(const Images& x, const Images& out, const Windows& windows) {
    const Layout none(x, out, windows, nullptr);
    const std::size_t weights = none.panels * none.runs * none.length + none.bands();
    return weights * kColumns<T> + none.row * windows.padded.height;
  }

  // How many rows of windows make a band, and the pixels of the longest one.
  std::size_t band_rows() const { return (kBand + out.size.width - 1) / out.size.width; }
  std::size_t bands() const { return band_rows() * out.size.width; }

  // The offset of a run's pixels from those of its window.
  std::size_t run(std::size_t number) const {
    if (runs == windows.size.height) return number * windows.dilation.height * row;
    const std::size_t i = number / windows.size.width, j = number % windows.size.width;
    return i * windows.dilation.height * row + j * windows.dilation.width * x.channels;
  }
  // Where a window begins.
  const T* window(const T* from, std::size_t i, std::size_t j) const {
    return from + i * windows.strides.height * row + j * along;
  }

  bool is_padded() const {
    return windows.padded.height != x.size.height || windows.padded.width != x.size.width;
  }
  // Puts an image into its padding, which `clear_padding` has cleared; without any it stays.
  const T* padded(const T* from) const {
    if (!is_padded()) return from;
    const std::size_t bytes = x.size.width * x.channels * sizeof(T);
    T* to = image + windows.before.height * row + windows.before.width * x.channels;
    for (std::size_t i = 0; i < x.size.height; ++i)
      __builtin_memcpy(to + i * row, from + i * x.size.width * x.channels, bytes);
    return image;
  }
  void clear_padding() const {
    if (!is_padded()) return;
    for (std::size_t i = 0; i < windows.padded.height * row; ++i) image[i] = T(0);
  }

  const Windows& windows;
  const Images &x, &out;
  std::size_t length, runs, along, row, panels;
  T *packed, *band, *image;
};

// Copies `rows` rows of `columns` columns into panels of kColumns, the last of them filled up.
template <class T>
void pack(T* to, const T* from, std::size_t rows, std::size_t columns) {
  for (std::size_t first = 0; first < columns; first += kColumns<T>)
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < kColumns<T>; ++j, ++to)
        *to = first + j < columns ? from[i * columns + first + j] : T(0);
}

// Loops over a block's rows are unrolled, or it would be laid in memory before them and behind.
template <class T, int M>
using Block = Vector<T>[M][2];

// Adds the products of one column and one row of two vectors.
template <class T, int M, class Column>
[[gnu::always_inline]] inline void add_outer(Block<T, M>& sums, Column column, const T* row) {
  const auto left = load<Vector<T>>(row), right = load<Vector<T>>(row + kColumns<T> / 2);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const T each = column(m);
    sums[m][0] += each * left;
    sums[m][1] += each * right;
  }
}

// Stores as much of a block's row as there is.
template <class T>
[[gnu::noinline]] void store_part(T* to, Vector<T> left, Vector<T> right, std::size_t columns) {
  T held[kColumns<T>];
  store(held, left);
  store(held + kColumns<T> / 2, right);
  for (std::size_t j = 0; j < columns; ++j) to[j] = held[j];
}

template <class T>
inline void store_row(T* to, Vector<T> left, Vector<T> right, std::size_t columns) {
  if (columns < kColumns<T>) return store_part<T>(to, left, right, columns);
  store(to, left);
  store(to + kColumns<T> / 2, right);
}

// Computes M pixels of one panel, from windows that begin at `from`.
template <class T, int M>
void pixels(T* out, const T* const* from, const T* weights, const Layout<T>& layout,
            std::size_t columns) {
  Block<T, M> sums{};
  for (std::size_t r = 0; r < layout.runs; ++r) {
    const T* at[M];
    const std::size_t begin = layout.run(r);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) at[m] = from[m] + begin;
    for (std::size_t k = 0; k < layout.length; ++k, weights += kColumns<T>)
      add_outer<T, M>(sums, [&](int m) { return at[m][k]; }, weights);
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    store_row<T>(out + m * layout.out.channels, sums[m][0], sums[m][1], columns);
}

template <class T, int M = kRows>
void some_pixels(int count, T* out, const T* const* from, const T* weights, const Layout<T>& layout,
                 std::size_t columns) {
  if constexpr (M > 1)
    if (count < M) return some_pixels<T, M - 1>(count, out, from, weights, layout, columns);
  pixels<T, M>(out, from, weights, layout, columns);
}

template <class T>
void conv2d(T* out, const T* x, const T* kernel, const Images& x_shape, const Images& out_shape,
            const Windows& windows, T* workspace) {
  const Layout<T> layout(x_shape, out_shape, windows, workspace);
  const std::size_t filters = out_shape.channels, depth = layout.runs * layout.length;
  const std::size_t count = out_shape.size.height * out_shape.size.width;
  pack(layout.packed, kernel, depth, filters);
  layout.clear_padding();
  for (std::size_t n = 0; n < x_shape.count; ++n, out += count * filters) {
    const T* image =
        layout.padded(x + n * x_shape.size.height * x_shape.size.width * x_shape.channels);
    for (std::size_t panel = 0; panel < layout.panels; ++panel) {
      const std::size_t first = panel * kColumns<T>;
      const T* weights = layout.packed + first * depth;
      for (std::size_t p = 0, i = 0, j = 0; p < count;) {
        const T* from[kRows] = {};
        const std::size_t start = p;
        for (; p < count && p - start < kRows; ++p) {
          from[p - start] = layout.window(image, i, j);
          if (++j == out_shape.size.width) j = 0, ++i;
        }
        some_pixels<T>(static_cast<int>(p - start), out + start * filters + first, from, weights,
                       layout, filters - first);
      }
    }
  }
}

// Adds a band of windows to M rows of one panel of the kernel's gradient: products of the images'
// pixels from `from` on and the band's gradients. Each band has its own sum: a single sum over all
// pixels of a batch loses digits (64 images of 128 x 128: a relative error of 2e-4).
template <class T, int M>
void taps(T* sums_at, const T* from, const Layout<T>& layout, std::size_t rows) {
  Block<T, M> sums{};
  const T* gradients = layout.band;
  for (std::size_t i = 0; i < rows; ++i) {
    const T* at = layout.window(from, i, 0);
    for (std::size_t j = 0; j < layout.out.size.width; ++j, gradients += kColumns<T>) {
      add_outer<T, M>(sums, [at](int m) { return at[m]; }, gradients);
      at += layout.along;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m, sums_at += kColumns<T>) {
    T* const right = sums_at + kColumns<T> / 2;
    store(sums_at, sums[m][0] + load<Vector<T>>(sums_at));
    store(right, sums[m][1] + load<Vector<T>>(right));
  }
}

template <class T, int M = kRows>
void some_taps(std::size_t count, T* sums, const T* from, const Layout<T>& layout,
               std::size_t rows) {
  if constexpr (M > 1)
    if (count < M) return some_taps<T, M - 1>(count, sums, from, layout, rows);
  taps<T, M>(sums, from, layout, rows);
}

template <class T>
void conv2d_kernel(T* out, const T* x, const T* dy, const Images& x_shape, const Images& dy_shape,
                   const Windows& windows, T* workspace) {
  const Layout<T> layout(x_shape, dy_shape, windows, workspace);
  const std::size_t filters = dy_shape.channels, depth = layout.runs * layout.length;
  const std::size_t width = dy_shape.size.width, rows = layout.band_rows();
  for (std::size_t i = 0; i < layout.panels * depth * kColumns<T>; ++i) layout.packed[i] = T(0);
  layout.clear_padding();
  for (std::size_t n = 0; n < x_shape.count; ++n) {
    const T* image =
        layout.padded(x + n * x_shape.size.height * x_shape.size.width * x_shape.channels);
    for (std::size_t top = 0; top < dy_shape.size.height;
         top += rows, dy += rows * width * filters) {
      const std::size_t left = dy_shape.size.height - top, here = left < rows ? left : rows;
      const T* from = layout.window(image, top, 0);
      T* sums = layout.packed;
      for (std::size_t first = 0; first < filters; first += kColumns<T>) {
        const std::size_t columns = filters - first < kColumns<T> ? filters - first : kColumns<T>;
        for (std::size_t p = 0; p < here * width; ++p)
          for (std::size_t j = 0; j < kColumns<T>; ++j)
            layout.band[p * kColumns<T> + j] = j < columns ? dy[p * filters + first + j] : T(0);
        for (std::size_t r = 0; r < layout.runs; ++r)
          for (std::size_t k = 0; k < layout.length; k += kRows) {
            const std::size_t taken = layout.length - k < kRows ? layout.length - k : kRows;
            some_taps<T>(taken, sums, from + layout.run(r) + k, layout, here);
            sums += taken * kColumns<T>;
          }
      }
      if (here < rows) dy -= (rows - here) * width * filters;
    }
  }
  for (std::size_t k = 0; k < depth; ++k)
    for (std::size_t j = 0; j < filters; ++j)
      out[k * filters + j] =
          layout.packed[(j / kColumns<T> * depth + k) * kColumns<T> + j % kColumns<T>];
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
