#include "region.h"

#include <sys/mman.h>

#include <cerrno>

namespace allreduce {

Region::Region(int fd, std::size_t bytes) : size_(bytes) {
  const int flags = MAP_SHARED | MAP_POPULATE | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (mapped == MAP_FAILED)
    error_ = errno;
  else
    data_ = static_cast<std::byte*>(mapped);
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace allreduce
