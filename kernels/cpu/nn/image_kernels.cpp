// Compiled once per instruction set, with KERNEL_LEVEL naming the namespace: no template of the
// standard library may be used here, or the linker could keep the AVX-512 copy for everyone.
#include "cpu/nn/image_kernels.h"

#include "cpu/nn/convolution.h"
#include "cpu/nn/pooling.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

template <class T>
constexpr ImageFunctions<T> image_functions{
    Layout<T>::workspace_size, conv2d<T>, conv2d_kernel<T>, max_pool2d<T>, max_pool2d_gradient<T>,
};

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL

namespace allreduce {

template <>
constinit const ImageKernels LevelTable<ImageKernels, Level::KERNEL_LEVEL>::table{
    KERNEL_LEVEL::image_functions<float>, KERNEL_LEVEL::image_functions<double>};

}  // namespace allreduce
