// Kernels of images that lie channels-last: one table of functions per instruction set.
//
// Pooling gives the same bits at all levels. Convolutions do not: those with AVX2 fuse each product
// with its addition, as BLAS does, and round once where the others round twice.
#pragma once

#include <cstddef>

#include "cpu/simd/levels.h"

namespace allreduce {

struct Pair {
  std::size_t height, width;
};

// How windows lie on images; `before` is padding above and left of them, `padded` the size of an
// image with all of its padding.
struct Windows {
  Pair size, strides, dilation, before, padded;
};

struct Images {
  std::size_t count;
  Pair size;
  std::size_t channels;
};

template <class T>
struct ImageFunctions {
  // How many elements of workspace a convolution needs for its own use, aligned to 64 bytes.
  std::size_t (*workspace_size)(const Images& x, const Images& out, const Windows& windows);
  // `kernel` is (height, width, channels of x, channels of out).
  void (*conv2d)(T* out, const T* x, const T* kernel, const Images& x_shape,
                 const Images& out_shape, const Windows& windows, T* workspace);
  // The gradient of the kernel: `out` has its shape, `dy` that of the convolution's value.
  void (*conv2d_kernel)(T* out, const T* x, const T* dy, const Images& x_shape,
                        const Images& dy_shape, const Windows& windows, T* workspace);
  void (*max_pool2d)(T* out, const T* x, const Images& x_shape, const Images& out_shape,
                     const Windows& windows);
  // Gives each window's gradient to the first of its pixels that equals its value in `y`.
  void (*max_pool2d_gradient)(T* out, const T* dy, const T* x, const T* y, const Images& x_shape,
                              const Images& y_shape, const Windows& windows);
};

struct ImageKernels {
  ImageFunctions<float> float32;
  ImageFunctions<double> float64;

  template <class T>
  const ImageFunctions<T>& of() const {
    if constexpr (sizeof(T) == 4)
      return float32;
    else
      return float64;
  }
};

template <>
const ImageKernels LevelTable<ImageKernels, Level::baseline>::table;
template <>
const ImageKernels LevelTable<ImageKernels, Level::avx2>::table;
template <>
const ImageKernels LevelTable<ImageKernels, Level::avx512>::table;

inline const ImageKernels& image_kernels() { return *table_in_use<ImageKernels>(); }

}  // namespace allreduce
