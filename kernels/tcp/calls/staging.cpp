#include "tcp/calls/staging.h"

#include <utility>

#include "tcp/io/protocol.h"

namespace allreduce::tcp {

Block Staging::take(std::size_t bytes) {
  Shelf& shelf = shelves_[bytes];
  if (shelf.kept.empty()) make(shelf, bytes);
  Memory memory = std::move(shelf.kept.back());
  shelf.kept.pop_back();
  return {memory.release(), [self = shared_from_this(), bytes](std::byte* at) {
            self->give_back(Memory(at), bytes);
          }};
}

// Adds a block; those of other sizes go, where there would be too many.
void Staging::make(Shelf& shelf, std::size_t bytes) {
  for (auto& [size, other] : shelves_)
    while (bytes_ + bytes > kActive * kStaging && !other.kept.empty()) {
      other.kept.pop_back();
      --other.made;
      bytes_ -= size;
    }
  shelf.kept.reserve(shelf.made + 1);
  shelf.kept.emplace_back(new std::byte[bytes]);
  ++shelf.made;
  bytes_ += bytes;
}

void Staging::give_back(Memory memory, std::size_t bytes) noexcept {
  Shelf& shelf = shelves_.find(bytes)->second;
  if (bytes_ <= kActive * kStaging) return shelf.kept.push_back(std::move(memory));
  --shelf.made;
  bytes_ -= bytes;
}

}  // namespace allreduce::tcp
