// A mapping of memory that processes share, or that only the threads of one process do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduce {

class Region {
 public:
  // Maps `bytes` of the file `fd` (or of zeroed memory of this process's own, if negative) with its
  // pages present. The file must have been allocated before, so that no later access can fail.
  // Throws std::system_error if the mapping is refused.
  Region(int fd, std::size_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Replaces the pages of [low, high) by private copies at the same addresses, with the same
  // contents: from then on no other process reads or writes them here. If it throws
  // std::system_error, pages that were not replaced are shared still. See region.cpp for its cost.
  void isolate(std::byte* low, std::byte* high) const;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Symmetric memory: one part of equal size per member, in one region.
struct SymmetricRegion {
  SymmetricRegion(std::uint32_t id, int fd, std::size_t part_bytes, int members)
      : id(id),
        part_bytes(part_bytes),
        mapping(fd, part_bytes * static_cast<std::size_t>(members)) {}

  std::byte* part(int member) const {
    return mapping.data() + part_bytes * static_cast<std::size_t>(member);
  }
  // Whether [pointer, pointer + bytes) lies in the member's part.
  bool holds(int member, const std::byte* pointer, std::size_t bytes) const {
    const std::byte* low = part(member);
    return pointer >= low && bytes <= part_bytes &&
           static_cast<std::size_t>(pointer - low) <= part_bytes - bytes;
  }

  const std::uint32_t id;
  const std::size_t part_bytes;
  const Region mapping;
};

}  // namespace allreduce
