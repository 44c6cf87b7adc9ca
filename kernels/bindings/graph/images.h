// The kernels of images, for the native module.
#pragma once

#include <nanobind/nanobind.h>

namespace allreduce {

void bind_images(nanobind::module_& m);

}  // namespace allreduce
