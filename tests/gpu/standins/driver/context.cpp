// Set-up, devices and contexts.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace standin {

thread_local std::vector<Context*> current;

Driver& driver() {
  static auto& made = *new Driver;
  return made;
}

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? strtol(value, nullptr, 10) : otherwise;
}

CUresult entry(const char* call, bool needs_context) {
  static const bool is_logged = setting("STANDIN_LOG", 0);
  if (is_logged) fprintf(stderr, "stand-in driver: %s\n", call);
  Driver& all = driver();
  if (all.is_forked || !all.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (!needs_context) return CUDA_SUCCESS;
  if (current.empty() || !current.back()) return CUDA_ERROR_INVALID_CONTEXT;
  Lock lock(all.mutex);
  return current.back()->error;
}

namespace {

std::string uuid_text(int physical) {
  char text[64];
  snprintf(text, sizeof text, "GPU-5ca1ab1e-0000-4000-8000-%012x", physical + 1);
  return text;
}

void set_uuid(int physical, CUuuid* out) {
  static const unsigned char start[8] = {0x5c, 0xa1, 0xab, 0x1e, 0, 0, 0x40, 0};
  memset(out->bytes, 0, 16);
  memcpy(out->bytes, start, 8);
  out->bytes[8] = static_cast<char>(0x80);
  out->bytes[15] = static_cast<char>(physical + 1);
}

// CUDA_VISIBLE_DEVICES: numbers or UUIDs; the first that names no device ends the list.
std::vector<int> visible_devices() {
  const int count = static_cast<int>(setting("STANDIN_DEVICES", 2));
  std::vector<int> found;
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < count; ++i) found.push_back(i);
    return found;
  }
  std::string rest = text;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string name = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    int physical = -1;
    for (int i = 0; i < count; ++i)
      if (name == std::to_string(i) || (name.size() > 4 && uuid_text(i).starts_with(name)))
        physical = i;
    if (physical < 0) break;
    for (int earlier : found)
      if (earlier == physical) return {};
    found.push_back(physical);
  }
  return found;
}

bool is_device(CUdevice device) {
  return device >= 0 && device < static_cast<int>(driver().visible.size());
}

int attribute(CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return 163 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 4;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 8;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuInit(unsigned) {
  Driver& all = driver();
  if (all.is_forked) return CUDA_ERROR_NOT_INITIALIZED;
  Lock lock(all.mutex);
  if (!all.is_initialized) {
    all.visible = visible_devices();
    all.memory = static_cast<std::size_t>(setting("STANDIN_MEMORY", 4L << 30));
    all.seed = static_cast<std::uint64_t>(setting("STANDIN_SEED", 0));
    all.max_delay = static_cast<int>(setting("STANDIN_DELAY", 300));
    for (std::size_t i = 0; i < all.visible.size(); ++i) {
      all.contexts.push_back(std::make_unique<Context>());
      all.contexts.back()->device = static_cast<int>(i);
    }
    if (!all.visible.empty()) {
      pthread_atfork(nullptr, nullptr, [] { driver().is_forked = true; });
      install_fault_handler();
      all.is_initialized = true;
    }
  }
  return all.visible.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("STANDIN_DRIVER_VERSION", CUDA_VERSION));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  ENTER_PLAIN;
  *count = static_cast<int>(driver().visible.size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER_PLAIN;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, static_cast<std::size_t>(size), "%s",
           getenv("STANDIN_NAME") ? getenv("STANDIN_NAME") : "Simulated GPU");
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = driver().memory;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  set_uuid(driver().visible[static_cast<std::size_t>(device)], uuid);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

CUresult cuDeviceGetPCIBusId(char* name, int size, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, static_cast<std::size_t>(size), "0000:%02x:00.0",
           driver().visible[static_cast<std::size_t>(device)] + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  const int physical = driver().visible[static_cast<std::size_t>(device)];
  *value = which == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? physical + 1 : attribute(which);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER_PLAIN;
  if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && setting("STANDIN_PEERS", 1);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(driver().mutex);
  Context* context = driver().contexts[static_cast<std::size_t>(device)].get();
  ++context->references;
  *out = reinterpret_cast<CUcontext>(context);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(driver().mutex);
  Context* context = driver().contexts[static_cast<std::size_t>(device)].get();
  if (!context->references) return CUDA_ERROR_INVALID_CONTEXT;
  --context->references;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  ENTER_PLAIN;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(driver().mutex);
  *flags = 0;
  *is_active = driver().contexts[static_cast<std::size_t>(device)]->references > 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER_PLAIN;
  if (current.empty()) current.push_back(nullptr);
  current.back() = reinterpret_cast<Context*>(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  ENTER_PLAIN;
  *context = reinterpret_cast<CUcontext>(current.empty() ? nullptr : current.back());
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  ENTER_PLAIN;
  current.push_back(reinterpret_cast<Context*>(context));
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  ENTER_PLAIN;
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = reinterpret_cast<CUcontext>(current.back());
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  ENTER_PLAIN;
  if (current.empty() || !current.back()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current.back()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  ENTER;
  Lock lock(driver().mutex);
  await_device(lock, current.back());
  return current.back()->error;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER;
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  ENTER_PLAIN;
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  ENTER;
  int can = 0;
  Lock lock(driver().mutex);
  auto* other = reinterpret_cast<Context*>(peer);
  can = other != current.back() && setting("STANDIN_PEERS", 1);
  if (!can) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return current.back()->peers.insert(other->device).second
             ? CUDA_SUCCESS
             : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  ENTER;
  Lock lock(driver().mutex);
  return current.back()->peers.erase(reinterpret_cast<Context*>(peer)->device)
             ? CUDA_SUCCESS
             : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

}  // extern "C"
