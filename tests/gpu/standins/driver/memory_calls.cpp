// The driver's calls for memory: allocation, pools, pinned memory, copies, fills and attributes.
#include <cstdlib>
#include <cstring>

#include "driver.h"

using namespace standin;

namespace {

struct Pool {
  int device;
};

std::vector<std::unique_ptr<Pool>>& default_pools() {
  static auto& made = *new std::vector<std::unique_ptr<Pool>>;
  return made;
}

CUmemoryPool default_pool(int device) {
  auto& pools = default_pools();
  while (static_cast<int>(pools.size()) <= device)
    pools.push_back(std::make_unique<Pool>(static_cast<int>(pools.size())));
  return reinterpret_cast<CUmemoryPool>(pools[static_cast<std::size_t>(device)].get());
}

// The context of the device that owns an address; nullptr for host memory.
Context* owner_of(std::uint64_t address) {
  const Allocation* found = find_allocation(address);
  return found ? driver().contexts[static_cast<std::size_t>(found->device)].get() : nullptr;
}

CUresult resolve(std::uint64_t address, std::size_t bytes, std::byte** out) {
  if (!is_device_address(address)) {
    *out = reinterpret_cast<std::byte*>(address);
    return CUDA_SUCCESS;
  }
  Lock lock(driver().mutex);
  Context* owner = owner_of(address);
  if (!owner)
    return complain(CUDA_ERROR_ILLEGAL_ADDRESS, "a copy uses %#lx, which is no live allocation",
                    static_cast<unsigned long>(address));
  return translate(owner, address, bytes, out);
}

enum class Wait { kNever, kPageable, kAlways };

// Copies on a stream; pageable memory makes an asynchronous copy wait, as CUDA's may.
CUresult copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, CUstream handle, Wait wait) {
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  bool is_pageable = false;
  for (std::uint64_t side : {to, from}) {
    if (!is_device_address(side)) {
      is_pageable |= !is_pinned(reinterpret_cast<const void*>(side));
      continue;
    }
    const Allocation* found = find_allocation(side);
    if (!found || side + bytes > found->address + found->bytes)
      return complain(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes at %#lx leaves its allocation",
                      bytes, static_cast<unsigned long>(side));
  }
  if (!bytes) return CUDA_SUCCESS;
  const MarkPointer done = enqueue(lock, stream, [=]() -> CUresult {
    std::byte *target, *source;
    if (CUresult wrong = resolve(to, bytes, &target); wrong != CUDA_SUCCESS) return wrong;
    if (CUresult wrong = resolve(from, bytes, &source); wrong != CUDA_SUCCESS) return wrong;
    memmove(target, source, bytes);
    return CUDA_SUCCESS;
  });
  if (wait == Wait::kAlways || (wait == Wait::kPageable && is_pageable)) await(lock, done);
  return wait == Wait::kAlways ? stream->context->error : CUDA_SUCCESS;
}

std::uint64_t plain(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

CUresult host_side(const void* pointer) {
  return is_device_address(plain(pointer))
             ? complain(CUDA_ERROR_INVALID_VALUE, "a device address stands for host memory")
             : CUDA_SUCCESS;
}

// Each side of a copy between devices lies in its context; without peer access, which both have to
// enable, the copy goes through the host.
CUresult check_peers(std::uint64_t to, CUcontext target, std::uint64_t from, CUcontext source) {
  Lock lock(driver().mutex);
  auto* one = reinterpret_cast<Context*>(target);
  auto* other = reinterpret_cast<Context*>(source);
  if (owner_of(to) != one || owner_of(from) != other)
    return complain(CUDA_ERROR_INVALID_VALUE, "a copy between devices names the wrong context");
  if (setting("STANDIN_LOG", 0) && one != other &&
      !(one->peers.contains(other->device) && other->peers.contains(one->device)))
    complain(CUDA_SUCCESS, "a copy between devices goes through the host");
  return CUDA_SUCCESS;
}

template <class T>
CUresult fill(CUdeviceptr at, T value, std::size_t count, CUstream handle) {
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const Allocation* found = find_allocation(at);
  if (!found || at + count * sizeof(T) > found->address + found->bytes || at % sizeof(T))
    return complain(CUDA_ERROR_INVALID_VALUE, "a fill of %zu bytes at %#llx leaves its allocation",
                    count * sizeof(T), at);
  enqueue(lock, stream, [=]() -> CUresult {
    std::byte* target;
    if (CUresult wrong = resolve(at, count * sizeof(T), &target); wrong != CUDA_SUCCESS)
      return wrong;
    for (std::size_t i = 0; i < count; ++i) memcpy(target + i * sizeof(T), &value, sizeof(T));
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

// Waits until no device may use host memory that is about to go.
void await_all(Lock& lock) {
  for (auto& context : driver().contexts) await_device(lock, context.get());
}

CUresult pointer_attribute(void* out, CUpointer_attribute which, CUdeviceptr address) {
  const Allocation* found = find_allocation(address);
  const bool is_host = !found && is_pinned(reinterpret_cast<void*>(address));
  if (!found && !is_host) return CUDA_ERROR_INVALID_VALUE;
  auto set = [out](auto value) {
    memcpy(out, &value, sizeof value);
    return CUDA_SUCCESS;
  };
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return set(is_host ? nullptr : owner_of(address));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return set(static_cast<unsigned>(is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return set(address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return is_host ? set(address) : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return set(0u);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return set(0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return set(is_host ? 0 : found->device);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return set(is_host ? 0ull : static_cast<unsigned long long>(found->number));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return set(is_host ? address : found->address);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return set(is_host ? std::size_t{0} : found->bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return set(1);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

extern "C" {

CUresult cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  ENTER;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(driver().mutex);
  await_device(lock, current.back());
  return allocate(current.back(), bytes, address);
}

CUresult cuMemFree(CUdeviceptr address) {
  ENTER;
  if (!address) return CUDA_SUCCESS;
  Lock lock(driver().mutex);
  await_device(lock, current.back());
  return release(address);
}

CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream) {
  ENTER;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(driver().mutex);
  return allocate(current.back(), bytes, address);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(lock, stream, [address] {
    Lock inner(driver().mutex);
    return release(address);
  });
  return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, std::size_t bytes, CUmemoryPool pool,
                                 CUstream) {
  ENTER;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(driver().mutex);
  const auto device = static_cast<std::size_t>(reinterpret_cast<Pool*>(pool)->device);
  return allocate(driver().contexts[device].get(), bytes, address);
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  *pool = default_pool(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return cuDeviceGetDefaultMemPool(pool, device);
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
  ENTER_PLAIN;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  *pool = reinterpret_cast<CUmemoryPool>(new Pool{properties->location.id});
  return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  ENTER_PLAIN;
  delete reinterpret_cast<Pool*>(pool);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) {
  ENTER_PLAIN;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void* value) {
  ENTER_PLAIN;
  memset(value, 0, sizeof(int));
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, std::size_t) {
  ENTER_PLAIN;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool, std::size_t) {
  ENTER_PLAIN;
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  ENTER;
  Lock lock(driver().mutex);
  *total = driver().memory;
  *free = *total - current.back()->used;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  ENTER;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(driver().mutex);
  await_device(lock, current.back());
  void* made = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(made, 0xff, bytes);
  pinned()[plain(made)] = {bytes, true};
  *out = made;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

CUresult cuMemFreeHost(void* pointer) {
  ENTER;
  Lock lock(driver().mutex);
  await_all(lock);
  auto found = pinned().find(plain(pointer));
  if (found == pinned().end() || !found->second.is_owned)
    return complain(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost of memory that is not pinned");
  memset(pointer, 0xff, found->second.bytes);
  pinned().erase(found);
  free(pointer);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void* pointer, std::size_t bytes, unsigned) {
  ENTER;
  Lock lock(driver().mutex);
  if (is_pinned(pointer)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  pinned()[plain(pointer)] = {bytes, false};
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* pointer) {
  ENTER;
  Lock lock(driver().mutex);
  await_all(lock);
  return pinned().erase(plain(pointer)) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  ENTER;
  return copy(to, from, bytes, nullptr, Wait::kAlways);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  ENTER;
  return copy(to, from, bytes, stream, Wait::kPageable);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  ENTER;
  if (CUresult wrong = host_side(from); wrong != CUDA_SUCCESS) return wrong;
  return copy(to, plain(from), bytes, nullptr, Wait::kAlways);
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  ENTER;
  if (CUresult wrong = host_side(to); wrong != CUDA_SUCCESS) return wrong;
  return copy(plain(to), from, bytes, nullptr, Wait::kAlways);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  ENTER;
  return copy(to, from, bytes, nullptr, Wait::kNever);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  ENTER;
  if (CUresult wrong = host_side(from); wrong != CUDA_SUCCESS) return wrong;
  return copy(to, plain(from), bytes, stream, Wait::kPageable);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  ENTER;
  if (CUresult wrong = host_side(to); wrong != CUDA_SUCCESS) return wrong;
  return copy(plain(to), from, bytes, stream, Wait::kPageable);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  ENTER;
  return copy(to, from, bytes, stream, Wait::kNever);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext target, CUdeviceptr from, CUcontext source,
                           std::size_t bytes, CUstream stream) {
  ENTER;
  if (CUresult wrong = check_peers(to, target, from, source); wrong != CUDA_SUCCESS) return wrong;
  return copy(to, from, bytes, stream, Wait::kNever);
}

CUresult cuMemsetD8(CUdeviceptr at, unsigned char value, std::size_t count) {
  ENTER;
  return fill(at, value, count, nullptr);
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, std::size_t count, CUstream stream) {
  ENTER;
  return fill(at, value, count, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr at, unsigned short value, std::size_t count, CUstream s) {
  ENTER;
  return fill(at, value, count, s);
}

CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, std::size_t count, CUstream stream) {
  ENTER;
  return fill(at, value, count, stream);
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr address) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  return pointer_attribute(out, which, address);
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** out,
                                CUdeviceptr address) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  for (unsigned i = 0; i < count; ++i) {
    const CUresult wrong = pointer_attribute(out[i], which[i], address);
    if (wrong != CUDA_SUCCESS)
      memset(out[i], 0, sizeof(int));  // unknown pointers are no error here
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
