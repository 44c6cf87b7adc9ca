// Errors' names, the look-up of calls by name, and what the other stand-ins call.
#include <dlfcn.h>

#include <chrono>

#include "../standin.h"
#include "driver.h"

using namespace standin;

extern "C" {

CUresult cuGetErrorName(CUresult error, const char** out) {
#define NAME(code) \
  case code:       \
    *out = #code;  \
    return CUDA_SUCCESS
  switch (error) {
    NAME(CUDA_SUCCESS);
    NAME(CUDA_ERROR_INVALID_VALUE);
    NAME(CUDA_ERROR_OUT_OF_MEMORY);
    NAME(CUDA_ERROR_NOT_INITIALIZED);
    NAME(CUDA_ERROR_NO_DEVICE);
    NAME(CUDA_ERROR_INVALID_DEVICE);
    NAME(CUDA_ERROR_INVALID_IMAGE);
    NAME(CUDA_ERROR_INVALID_CONTEXT);
    NAME(CUDA_ERROR_NO_BINARY_FOR_GPU);
    NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    NAME(CUDA_ERROR_INVALID_HANDLE);
    NAME(CUDA_ERROR_NOT_FOUND);
    NAME(CUDA_ERROR_NOT_READY);
    NAME(CUDA_ERROR_ILLEGAL_ADDRESS);
    NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    NAME(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    NAME(CUDA_ERROR_LAUNCH_FAILED);
    NAME(CUDA_ERROR_NOT_SUPPORTED);
    default:
      *out = "CUDA_ERROR_UNKNOWN";
      return CUDA_SUCCESS;
  }
#undef NAME
}

CUresult cuGetErrorString(CUresult error, const char** out) {
  switch (error) {
    case CUDA_SUCCESS:
      *out = "no error";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *out = "out of memory";
      break;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *out = "an illegal memory access was encountered";
      break;
    case CUDA_ERROR_LAUNCH_FAILED:
      *out = "unspecified launch failure";
      break;
    default:
      return cuGetErrorName(error, out);
  }
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
  *out = nullptr;
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&cuInit), &here);
  static void* self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  for (const char* version : {"_v2", ""})
    if (!*out) *out = dlsym(self, (std::string(name) + version).c_str());
  if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress(const char* name, void** out, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

int standin_current_device() {
  return current.empty() || !current.back() ? -1 : current.back()->device;
}

void standin_enter(int device) {
  Lock lock(driver().mutex);
  current = {driver().contexts[static_cast<std::size_t>(device)].get()};
}

int standin_physical_device(int device) {
  return driver().visible[static_cast<std::size_t>(device)];
}

int standin_stream_device(void* handle) {
  if (entry(__func__, true) != CUDA_SUCCESS) return -1;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(static_cast<CUstream>(handle), current.back());
  return stream ? stream->context->device : -1;
}

int standin_enqueue(void* handle, int (*work)(void*), void* data) {
  if (CUresult wrong = entry(__func__, true); wrong != CUDA_SUCCESS) return wrong;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(static_cast<CUstream>(handle), current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(lock, stream, [=] { return static_cast<CUresult>(work(data)); });
  return CUDA_SUCCESS;
}

int standin_translate(int device, const void* address, size_t bytes, void** out) {
  Lock lock(driver().mutex);
  Context* context = driver().contexts[static_cast<std::size_t>(device)].get();
  std::byte* host = nullptr;
  const CUresult wrong = translate(context, reinterpret_cast<std::uint64_t>(address), bytes, &host);
  *out = host;
  return wrong;
}

void standin_await_device(int device) {
  Lock lock(driver().mutex);
  await_device(lock, driver().contexts[static_cast<std::size_t>(device)].get());
}

int standin_hold_device(int device, const char* holder, int (*is_given_up)(void*), void* data) {
  Lock lock(driver().mutex);
  Context* context = driver().contexts[static_cast<std::size_t>(device)].get();
  while (context->holders && context->holder != holder) {
    if (is_given_up(data)) return 0;
    driver().changed.wait_for(lock, std::chrono::milliseconds(2));
  }
  context->holder = holder;
  ++context->holders;
  return 1;
}

void standin_release_device(int device) {
  Lock lock(driver().mutex);
  --driver().contexts[static_cast<std::size_t>(device)]->holders;
  driver().changed.notify_all();
}

}  // extern "C"
