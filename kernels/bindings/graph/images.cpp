// Python's view of the kernels of images. Arrays are C-contiguous and of one dtype, float32 or
// float64, and channels-last; the first is written to. Sizes that do not fit are refused.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <array>
#include <memory>
#include <new>

#include "bindings/bindings.h"
#include "bindings/graph/tensor.h"
#include "core/gil.h"
#include "cpu/nn/image_kernels.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
// Heights and widths: size, strides, dilation, and padding before and after.
using Numbers = std::array<std::size_t, 10>;

constexpr std::size_t kAlignment = 64;

// The least length of a padded image's side for that number of windows.
std::size_t reach(std::size_t count, std::size_t stride, std::size_t size, std::size_t gap) {
  return (count - 1) * stride + (size - 1) * gap + 1;
}

template <class T>
Images images_of(const Array<T>& array) {
  return {array.shape(0), {array.shape(1), array.shape(2)}, array.shape(3)};
}

Windows windows_of(const Numbers& numbers, const Images& x, const Images& out) {
  Windows windows{
      {numbers[0], numbers[1]},
      {numbers[2], numbers[3]},
      {numbers[4], numbers[5]},
      {numbers[6], numbers[7]},
      {x.size.height + numbers[6] + numbers[8], x.size.width + numbers[7] + numbers[9]}};
  require(x.count == out.count && windows.size.height && windows.size.width && out.size.height &&
          out.size.width);
  require(reach(out.size.height, windows.strides.height, windows.size.height,
                windows.dilation.height) <= windows.padded.height);
  require(reach(out.size.width, windows.strides.width, windows.size.width,
                windows.dilation.width) <= windows.padded.width);
  return windows;
}

struct Free {
  void operator()(void* workspace) const {
    ::operator delete(workspace, std::align_val_t{kAlignment});
  }
};

template <class T>
std::unique_ptr<T, Free> make_workspace(const Images& x, const Images& out,
                                        const Windows& windows) {
  const std::size_t bytes = image_kernels().of<T>().workspace_size(x, out, windows) * sizeof(T);
  return std::unique_ptr<T, Free>(
      static_cast<T*>(::operator new(bytes, std::align_val_t{kAlignment})));
}

template <class T>
void require_kernel(const Array<T>& kernel, const Windows& windows, const Images& x,
                    const Images& out) {
  require(kernel.shape(0) == windows.size.height && kernel.shape(1) == windows.size.width &&
          kernel.shape(2) == x.channels && kernel.shape(3) == out.channels);
}

template <class T>
void bind_convolutions(nb::module_& m) {
  m.def(
      "conv2d",
      [](Array<T> out, Array<const T> x, Array<const T> kernel, Numbers numbers) {
        const Images from = images_of(x), to = images_of(out);
        const Windows windows = windows_of(numbers, from, to);
        require_kernel(kernel, windows, from, to);
        const GilRelease released;
        const auto workspace = make_workspace<T>(from, to, windows);
        image_kernels().of<T>().conv2d(out.data(), x.data(), kernel.data(), from, to, windows,
                                       workspace.get());
      },
      "out"_array, "x"_array, "kernel"_array, nb::arg("windows"));
  m.def(
      "conv2d_kernel",
      [](Array<T> out, Array<const T> x, Array<const T> dy, Numbers numbers) {
        const Images from = images_of(x), to = images_of(dy);
        const Windows windows = windows_of(numbers, from, to);
        require_kernel(out, windows, from, to);
        const GilRelease released;
        const auto workspace = make_workspace<T>(from, to, windows);
        image_kernels().of<T>().conv2d_kernel(out.data(), x.data(), dy.data(), from, to, windows,
                                              workspace.get());
      },
      "out"_array, "x"_array, "dy"_array, nb::arg("windows"));
}

template <class T>
void bind_pooling(nb::module_& m) {
  m.def(
      "max_pool2d",
      [](Array<T> out, Array<const T> x, Numbers numbers) {
        const Images from = images_of(x), to = images_of(out);
        const Windows windows = windows_of(numbers, from, to);
        require(from.channels == to.channels);
        const GilRelease released;
        image_kernels().of<T>().max_pool2d(out.data(), x.data(), from, to, windows);
      },
      "out"_array, "x"_array, nb::arg("windows"));
  m.def(
      "max_pool2d_gradient",
      [](Array<T> out, Array<const T> dy, Array<const T> x, Array<const T> y, Numbers numbers) {
        const Images from = images_of(x), to = images_of(y);
        const Windows windows = windows_of(numbers, from, to);
        require(from.channels == to.channels && out.size() == x.size() && dy.size() == y.size());
        const GilRelease released;
        image_kernels().of<T>().max_pool2d_gradient(out.data(), dy.data(), x.data(), y.data(), from,
                                                    to, windows);
      },
      "out"_array, "dy"_array, "x"_array, "y"_array, nb::arg("windows"));
}

}  // namespace

void bind_images(nb::module_& m) {
  bind_convolutions<float>(m);
  bind_convolutions<double>(m);
  bind_pooling<float>(m);
  bind_pooling<double>(m);
}

}  // namespace allreduce
