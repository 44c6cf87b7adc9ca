// Memory for chunks that are staged: blocks, which are kept for further chunks.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

namespace allreduce::tcp {

// Staged bytes of one chunk; goes back to where it came from with its last owner.
using Block = std::shared_ptr<std::byte[]>;

class Staging : public std::enable_shared_from_this<Staging> {
 public:
  Block take(std::size_t bytes);
  // Of all blocks, whether they are in use or kept.
  std::size_t bytes() const { return bytes_; }

 private:
  using Memory = std::unique_ptr<std::byte[]>;
  struct Shelf {  // blocks of one size
    std::size_t made = 0;
    std::vector<Memory> kept;  // with room for all that are made
  };
  void make(Shelf& shelf, std::size_t bytes);
  void give_back(Memory memory, std::size_t bytes) noexcept;

  std::map<std::size_t, Shelf> shelves_;
  std::size_t bytes_ = 0;
};

}  // namespace allreduce::tcp
