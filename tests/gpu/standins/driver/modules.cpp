// Modules: host builds of kernels, loaded from memory as cubins are; launches run them on streams.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../host/host_kernel.h"
#include "driver.h"

using namespace standin;

namespace {

struct Module {
  void* handle;
  std::mutex running;  // a host build runs one kernel at a time: its shared memory is one
};

struct Function {
  Module* module;
  std::string name;
  const HostKernel* kernel;
  std::size_t max_shared = 48 << 10;
  std::set<Context*> launched;
};

std::map<std::pair<Module*, std::string>, Function*>& functions() {
  static auto& made = *new std::map<std::pair<Module*, std::string>, Function*>;
  return made;
}

CUresult load(const void* image, Module** out) {
  Elf64_Ehdr head;
  memcpy(&head, image, sizeof head);
  if (memcmp(head.e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  if (head.e_machine != EM_X86_64 && head.e_machine != EM_AARCH64)
    return complain(CUDA_ERROR_NO_BINARY_FOR_GPU,
                    "a module for GPUs; this driver runs host builds");
  const std::size_t bytes = head.e_shoff + std::size_t{head.e_shnum} * head.e_shentsize;
  // It stays open: by the name of a descriptor that is reused, dlopen would find an earlier module.
  const int file = memfd_create("kernels", MFD_CLOEXEC);
  if (file < 0 || write(file, image, bytes) != static_cast<ssize_t>(bytes))
    return CUDA_ERROR_OUT_OF_MEMORY;
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return complain(CUDA_ERROR_INVALID_IMAGE, "%s", dlerror());
  *out = new Module{handle, {}};
  return CUDA_SUCCESS;
}

Function* find_function(Module* module, const char* name) {
  Function*& found = functions()[{module, name}];
  if (found) return found;
  auto* kernel = dlsym(module->handle, (std::string("host_kernel_") + name).c_str());
  if (!kernel) return nullptr;
  return found = new Function{module, name, static_cast<const HostKernel*>(kernel), 48 << 10, {}};
}

struct Launch {
  Function* function;
  Context* context;
  unsigned grid[3], block[3], shared;
  std::uint64_t seed;
  std::vector<std::vector<std::uint64_t>> arguments;  // copies, 8-byte aligned
};

// Replaces device addresses by the stand-in's own; parameters hold them at multiples of 8 bytes.
CUresult translate_arguments(Launch& launch, std::vector<const Allocation*>& used) {
  Lock lock(driver().mutex);
  for (std::size_t i = 0; i < launch.arguments.size(); ++i) {
    for (std::size_t at = 0; at + 8 <= launch.function->kernel->sizes[i]; at += 8) {
      std::uint64_t& word = launch.arguments[i][at / 8];
      if (!is_device_address(word)) continue;
      const Allocation* found = find_allocation(word);
      std::byte* host;
      const CUresult wrong = translate(launch.context, word, 0, &host);
      if (wrong != CUDA_SUCCESS)
        return complain(wrong, "in parameter %zu of kernel %s", i, launch.function->name.c_str());
      used.push_back(found);
      word = reinterpret_cast<std::uint64_t>(host);
    }
  }
  return CUDA_SUCCESS;
}

CUresult run(Launch& launch) {
  std::vector<const Allocation*> used;
  if (CUresult wrong = translate_arguments(launch, used); wrong != CUDA_SUCCESS) return wrong;
  std::vector<void*> pointers;
  for (auto& argument : launch.arguments) pointers.push_back(argument.data());
  std::lock_guard one(launch.function->module->running);
  const char* name = launch.function->name.c_str();
  const char* wrong = launch.function->kernel->launch(launch.grid, launch.block, launch.shared,
                                                      launch.seed, pointers.data());
  if (wrong) return complain(CUDA_ERROR_LAUNCH_FAILED, "kernel %s: %s", name, wrong);
  Lock lock(driver().mutex);
  for (const Allocation* allocation : used)
    if (allocation->is_live && !are_edges_intact(*allocation))
      return complain(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel %s wrote outside of allocation #%lu",
                      name, allocation->number);
  return CUDA_SUCCESS;
}

CUresult check_shape(const Function* function, const unsigned* grid, const unsigned* block,
                     unsigned shared) {
  const std::uint64_t threads = std::uint64_t{block[0]} * block[1] * block[2];
  const bool fits = grid[0] && grid[1] && grid[2] && grid[0] <= 0x7fffffff && grid[1] <= 65535 &&
                    grid[2] <= 65535 && threads && threads <= 1024 && block[2] <= 64 &&
                    shared <= function->max_shared;
  return fits ? CUDA_SUCCESS
              : complain(CUDA_ERROR_INVALID_VALUE,
                         "kernel %s cannot run with grid (%u, %u, %u), block (%u, %u, %u) and %u "
                         "bytes of shared memory",
                         function->name.c_str(), grid[0], grid[1], grid[2], block[0], block[1],
                         block[2], shared);
}

CUresult launch(CUfunction handle, const unsigned* grid, const unsigned* block, unsigned shared,
                CUstream stream_handle, void** parameters, void** extra) {
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  auto* function = reinterpret_cast<Function*>(handle);
  Lock lock(driver().mutex);
  Context* context = current.back();
  Stream* stream = find_stream(stream_handle, context);
  if (!stream || stream->context != context) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult wrong = check_shape(function, grid, block, shared); wrong != CUDA_SUCCESS)
    return wrong;
  if (function->launched.insert(context).second) await_device(lock, context);
  auto made = std::make_shared<Launch>();
  *made = {function, context, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared,
           0,        {}};
  made->seed = driver().seed ? stream->random() : 0;
  for (int i = 0; i < function->kernel->count; ++i) {
    const std::size_t bytes = function->kernel->sizes[i];
    made->arguments.emplace_back((bytes + 7) / 8);
    memcpy(made->arguments.back().data(), parameters[i], bytes);
  }
  enqueue(lock, stream, [made] { return run(*made); });
  return CUDA_SUCCESS;
}

CUresult function_attribute(int* value, CUfunction_attribute which, const Function* function) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = 80;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = static_cast<int>(function->max_shared);
      return CUDA_SUCCESS;
    default:
      *value = 0;
      return CUDA_SUCCESS;
  }
}

CUresult set_function_attribute(CUfunction_attribute which, int value, Function* function) {
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_SUPPORTED;
  if (value < 0 || value > 163 << 10) return CUDA_ERROR_INVALID_VALUE;
  function->max_shared = static_cast<std::size_t>(value);
  return CUDA_SUCCESS;
}

CUresult load_now(const void* image, Module** out) {
  Lock lock(driver().mutex);
  if (!current.empty() && current.back()) await_device(lock, current.back());
  return load(image, out);
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  ENTER;
  return load_now(image, reinterpret_cast<Module**>(module));
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  ENTER;
  return load_now(image, reinterpret_cast<Module**>(module));
}

CUresult cuModuleUnload(CUmodule) {
  ENTER;
  Lock lock(driver().mutex);
  await_device(lock, current.back());  // the host build stays: its kernels may be known by name
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER;
  Lock lock(driver().mutex);
  Function* found = find_function(reinterpret_cast<Module*>(module), name);
  *function = reinterpret_cast<CUfunction>(found);
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncLoad(CUfunction function) {
  ENTER;
  Lock lock(driver().mutex);
  if (reinterpret_cast<Function*>(function)->launched.insert(current.back()).second)
    await_device(lock, current.back());
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  ENTER_PLAIN;
  return load_now(image, reinterpret_cast<Module**>(library));
}

CUresult cuLibraryUnload(CUlibrary) {
  ENTER_PLAIN;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  Function* found = find_function(reinterpret_cast<Module*>(library), name);
  *kernel = reinterpret_cast<CUkernel>(found);
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
  ENTER;
  *module = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  ENTER;
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
  ENTER_PLAIN;
  *library = reinterpret_cast<CUlibrary>(reinterpret_cast<Function*>(kernel)->module);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, std::size_t index, std::size_t* offset,
                              std::size_t* size) {
  ENTER_PLAIN;
  const HostKernel* known = reinterpret_cast<Function*>(kernel)->kernel;
  if (index >= static_cast<std::size_t>(known->count)) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  for (std::size_t i = 0; i <= index; ++i) {
    *size = known->sizes[i];
    const std::size_t alignment = *size % 8 ? *size % 4 ? *size : 4 : 8;
    *offset = (*offset + alignment - 1) / alignment * alignment + (i < index ? *size : 0);
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, std::size_t index, std::size_t* offset,
                            std::size_t* size) {
  return cuKernelGetParamInfo(reinterpret_cast<CUkernel>(function), index, offset, size);
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  ENTER_PLAIN;
  return function_attribute(value, which, reinterpret_cast<Function*>(function));
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute which, CUkernel kernel, CUdevice) {
  ENTER_PLAIN;
  return function_attribute(value, which, reinterpret_cast<Function*>(kernel));
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  ENTER_PLAIN;
  return set_function_attribute(which, value, reinterpret_cast<Function*>(function));
}

CUresult cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice) {
  ENTER_PLAIN;
  return set_function_attribute(which, value, reinterpret_cast<Function*>(kernel));
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream,
                        void** parameters, void** extra) {
  ENTER;
  const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  return launch(function, grid, block, shared, stream, parameters, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  ENTER;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE ||
        config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      return CUDA_ERROR_NOT_SUPPORTED;
  const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  return launch(function, grid, block, config->sharedMemBytes, config->hStream, parameters, extra);
}

}  // extern "C"
