// Device memory: addresses that nobody may touch, over a second mapping that
// the stand-ins use.
//
// A host that dereferences a device address faults, and the handler names the
// allocation. Memory is filled with 0xff (NaN) when it is allocated and when it
// is freed, and its addresses are reused late, so that stale pointers are
// found. 256 bytes on each side of an allocation are checked.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace standin {
namespace {

constexpr std::size_t kPage = 4096, kEdge = 512, kChecked = 256;
constexpr std::size_t kQuarantine = 64;  // freed allocations that are kept before their reuse
constexpr int kPoison = 0xff, kCanary = 0xa5;

std::uint64_t region = 0, next_address = 0, numbers = 0;
std::map<CUdeviceptr, Allocation>& all() {
  static auto& made = *new std::map<CUdeviceptr, Allocation>;
  return made;
}
std::deque<CUdeviceptr>& freed() {
  static auto& made = *new std::deque<CUdeviceptr>;
  return made;
}

// Memory of host builds under a sanitizer comes from its malloc, which
// surrounds it by itself.
bool is_sanitized() {
  static const bool found = getenv("STANDIN_SANITIZE") != nullptr;
  return found;
}

// ThreadSanitizer leaves a program a few terabytes, in pieces whose sizes differ between runs.
std::size_t region_bytes() { return std::size_t{1} << (is_sanitized() ? 37 : 40); }

// Makes the second mapping of an allocation: `bytes` between two edges.
std::byte* make_memory(std::size_t bytes, std::size_t pages) {
  if (is_sanitized()) {
    void* made = nullptr;
    return posix_memalign(&made, kEdge, bytes) ? nullptr : static_cast<std::byte*>(made);
  }
  void* made = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(made);
  memset(start, kCanary, kEdge);
  memset(start + kEdge + bytes, kCanary, kChecked);
  return start + kEdge;
}

void unmake_memory(const Allocation& one) {
  if (is_sanitized())
    free(one.host);
  else
    munmap(one.host - kEdge, one.pages);
}

std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void reserve_region() {
  void* at =
      mmap(nullptr, region_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    perror("stand-in driver: reserving addresses");
    abort();
  }
  region = next_address = reinterpret_cast<std::uint64_t>(at);
}

// Takes the addresses of an old freed allocation of this size, or fresh ones.
CUdeviceptr take_address(std::size_t pages) {
  auto& queue = freed();
  for (std::size_t i = 0; i + kQuarantine < queue.size(); ++i) {
    auto found = all().find(queue[i]);
    if (found->second.pages != pages) continue;
    const CUdeviceptr address = queue[i];
    unmake_memory(found->second);
    all().erase(found);
    queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
    return address;
  }
  const CUdeviceptr address = next_address;
  next_address += pages + kPage;
  return address;
}

struct sigaction previous_action;

void report_fault(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uint64_t>(info->si_addr);
  if (is_device_address(address)) {
    char text[300];
    const Allocation* owner = find_allocation(address, true);
    if (owner)
      snprintf(text, sizeof text,
               "stand-in driver: the host touched device memory: %#lx is byte "
               "%llu of the %zu bytes "
               "of %sallocation #%lu on device %d\n",
               address, address - owner->address, owner->bytes, owner->is_live ? "" : "freed ",
               owner->number, owner->device);
    else
      snprintf(text, sizeof text,
               "stand-in driver: the host touched the device address %#lx, "
               "which no allocation owns\n",
               address);
    [[maybe_unused]] auto written = write(2, text, strlen(text));
  }
  sigaction(number, &previous_action,
            nullptr);  // the access runs again, and ends as it did before
  (void)context;
}

}  // namespace

CUresult complain(CUresult code, const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  char text[1000];
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  fprintf(stderr, "stand-in driver: %s\n", text);
  return code;
}

bool is_device_address(std::uint64_t address) {
  return region && address >= region && address < region + region_bytes();
}

const Allocation* find_allocation(std::uint64_t address, bool with_freed) {
  auto after = all().upper_bound(address);
  if (after == all().begin()) return nullptr;
  const Allocation& found = std::prev(after)->second;
  if (address > found.address + found.bytes || (!found.is_live && !with_freed)) return nullptr;
  return &found;
}

CUresult allocate(Context* context, std::size_t bytes, CUdeviceptr* address) {
  if (!region) reserve_region();
  if (context->used + bytes > driver().memory) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::size_t pages = rounded(bytes + 2 * kEdge);
  std::byte* host = make_memory(bytes, pages);
  if (!host) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(host, kPoison, bytes);
  *address = take_address(pages);
  all()[*address] = {*address, bytes, pages, host, context->device, ++numbers, true};
  context->used += bytes;
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
  auto found = all().find(address);
  if (found == all().end() || !found->second.is_live)
    return complain(CUDA_ERROR_INVALID_VALUE, "freeing %#llx, which is no live allocation",
                    address);
  Allocation& one = found->second;
  if (!are_edges_intact(one))
    complain(CUDA_SUCCESS, "something wrote outside of allocation #%lu (%zu bytes)", one.number,
             one.bytes);
  memset(one.host, kPoison, one.bytes);
  one.is_live = false;
  driver().contexts[static_cast<std::size_t>(one.device)]->used -= one.bytes;
  freed().push_back(address);
  return CUDA_SUCCESS;
}

bool are_edges_intact(const Allocation& one) {
  if (is_sanitized()) return true;
  static const std::string canary(kChecked, static_cast<char>(kCanary));
  return !memcmp(one.host - kChecked, canary.data(), kChecked) &&
         !memcmp(one.host + one.bytes, canary.data(), kChecked);
}

CUresult translate(Context* context, std::uint64_t address, std::size_t bytes, std::byte** out) {
  const Allocation* found = find_allocation(address);
  const int device = context->device;
  if (!found) {
    const Allocation* gone = find_allocation(address, true);
    return gone ? complain(CUDA_ERROR_ILLEGAL_ADDRESS,
                           "device %d uses %#lx of freed allocation #%lu", device, address,
                           gone->number)
                : complain(CUDA_ERROR_ILLEGAL_ADDRESS,
                           "device %d uses %#lx, which is no allocation", device, address);
  }
  if (found->device != device && !context->peers.contains(found->device))
    return complain(CUDA_ERROR_ILLEGAL_ADDRESS,
                    "device %d uses allocation #%lu of device %d without peer access", device,
                    found->number, found->device);
  if (address + bytes > found->address + found->bytes)
    return complain(CUDA_ERROR_ILLEGAL_ADDRESS, "%zu bytes at byte %llu of allocation #%lu of %zu",
                    bytes, static_cast<unsigned long long>(address - found->address), found->number,
                    found->bytes);
  *out = found->host + (address - found->address);
  return CUDA_SUCCESS;
}

std::map<std::uintptr_t, Pinned>& pinned() {
  static auto& made = *new std::map<std::uintptr_t, Pinned>;
  return made;
}

bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto after = pinned().upper_bound(address);
  if (after == pinned().begin()) return false;
  --after;
  return address < after->first + after->second.bytes;
}

void install_fault_handler() {
  struct sigaction action{};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace standin
