#include "replay/blas.h"

#include <dlfcn.h>

#include <string>

namespace allreduce {
namespace {

Blas<float> single;
Blas<double> twofold;

// As the wheels of NumPy name them, and others.
void* find(void* module, const std::string& name) {
  for (const char* prefix : {"scipy_", ""})
    for (const char* suffix : {"64_", ""})
      if (void* found = dlsym(module, (prefix + name + suffix).c_str())) return found;
  return nullptr;
}

template <class T>
Blas<T> found_in(void* module, const std::string& type) {
  const auto gemm = find(module, "cblas_" + type + "gemm");
  const auto gemv = find(module, "cblas_" + type + "gemv");
  return {reinterpret_cast<typename Blas<T>::Gemm>(gemm),
          reinterpret_cast<typename Blas<T>::Gemv>(gemv)};
}

}  // namespace

void find_blas(const char* module) {
  void* const handle = dlopen(module, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return;
  single = found_in<float>(handle, "s");
  twofold = found_in<double>(handle, "d");
}

template <>
const Blas<float>& blas<float>() {
  return single;
}
template <>
const Blas<double>& blas<double>() {
  return twofold;
}

}  // namespace allreduce
