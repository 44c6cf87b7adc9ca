// Truncate UTF-8 at a character's boundary.
#pragma once

#include <cstddef>
#include <string_view>

namespace allreduce {

// Bytes of the longest beginning of a text that has at most `room` and ends with a whole character.
inline std::size_t fitting(std::string_view text, std::size_t room) {
  if (text.size() <= room) return text.size();
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  while (room > 0 && continues(room)) --room;
  return room;
}

}  // namespace allreduce
