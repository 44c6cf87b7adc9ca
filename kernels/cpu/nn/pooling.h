// Pooling: a vector of channels at a time. For files that are compiled once per KERNEL_LEVEL.
#pragma once

#include "cpu/nn/image_kernels.h"
#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// The taps of a window that lie in the image, from `first` up to `end`.
struct Taps {
  std::size_t first, end;
};

// `start` is the window's place in the padded image, which begins `before` the image.
inline Taps taps_inside(std::size_t start, std::size_t before, std::size_t gap, std::size_t taps,
                        std::size_t size) {
  Taps found{0, taps};
  while (found.first < taps && start + found.first * gap < before) ++found.first;
  while (found.end > found.first && start + (found.end - 1) * gap >= before + size) --found.end;
  return found;
}

// Calls `work(window's number, pixel)` for each window, and `pixel(i, j)`'s offsets for its taps.
template <class Work>
inline void each_window(const Images& x, const Images& y, const Windows& windows, Work work) {
  // From tap to tap.
  const std::size_t right = windows.dilation.width * x.channels;
  const std::size_t down = windows.dilation.height * x.size.width * x.channels;
  for (std::size_t n = 0, number = 0; n < y.count; ++n)
    for (std::size_t i = 0; i < y.size.height; ++i) {
      const std::size_t top = i * windows.strides.height;
      const Taps rows = taps_inside(top, windows.before.height, windows.dilation.height,
                                    windows.size.height, x.size.height);
      for (std::size_t j = 0; j < y.size.width; ++j, ++number) {
        const std::size_t left = j * windows.strides.width;
        const Taps columns = taps_inside(left, windows.before.width, windows.dilation.width,
                                         windows.size.width, x.size.width);
        const std::size_t row = n * x.size.height + top + rows.first * windows.dilation.height;
        const std::size_t column = left + columns.first * windows.dilation.width;
        const std::size_t corner =
            ((row - windows.before.height) * x.size.width + column - windows.before.width) *
            x.channels;
        const auto each_tap = [&](auto visit) {
          std::size_t line = corner;
          for (std::size_t a = rows.first; a < rows.end; ++a, line += down)
            for (std::size_t b = columns.first, pixel = line; b < columns.end; ++b, pixel += right)
              visit(pixel);
        };
        work(number * y.channels, each_tap);
      }
    }
}

// Calls `work` with the places of channels: a vector of them at a time, then one by one.
template <class T, class Work>
inline void each_channel(std::size_t channels, Work work) {
  constexpr std::size_t lanes = kWidth / sizeof(T);
  std::size_t c = 0;
  for (; c + lanes <= channels; c += lanes) work(c, Vector<T>{});
  for (; c < channels; ++c) work(c, Vector<T, sizeof(T)>{});
}

template <class T>
void max_pool2d(T* out, const T* x, const Images& x_shape, const Images& out_shape,
                const Windows& windows) {
  each_window(x_shape, out_shape, windows, [&](std::size_t at, auto each_tap) {
    each_channel<T>(x_shape.channels, [&](std::size_t c, auto zero) {
      using V = decltype(zero);
      V most = zero - T(__builtin_inf());
      each_tap([&](std::size_t pixel) {
        const V here = load<V>(x + pixel + c);
        most = (most >= here) | (most != most) ? most : here;  // a NaN passes, as in np.maximum
      });
      store(out + at + c, most);
    });
  });
}

template <class T>
void max_pool2d_gradient(T* out, const T* dy, const T* x, const T* y, const Images& x_shape,
                         const Images& y_shape, const Windows& windows) {
  // If windows neither skip nor share pixels, each pixel is written once.
  const Pair size = windows.size, strides = windows.strides;
  const bool once = size.height == strides.height && size.width == strides.width &&
                    windows.dilation.height == 1 && windows.dilation.width == 1 &&
                    y_shape.size.height * size.height == x_shape.size.height &&
                    y_shape.size.width * size.width == x_shape.size.width &&
                    !windows.before.height && !windows.before.width;
  const std::size_t pixels = x_shape.count * x_shape.size.height * x_shape.size.width;
  if (!once)
    for (std::size_t i = 0; i < pixels * x_shape.channels; ++i) out[i] = T(0);
  each_window(x_shape, y_shape, windows, [&](std::size_t at, auto each_tap) {
    each_channel<T>(x_shape.channels, [&](std::size_t c, auto zero) {
      using V = decltype(zero);
      const V most = load<V>(y + at + c);
      V left = load<V>(dy + at + c);
      auto given = zero != zero;  // whose gradient has been given
      each_tap([&](std::size_t pixel) {
        const auto here = (load<V>(x + pixel + c) == most) & ~given;
        const V share = here ? left : zero;
        store(out + pixel + c, once ? share : load<V>(out + pixel + c) + share);
        given |= here;
      });
    });
  });
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
