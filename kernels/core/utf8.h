// Truncate UTF-8 at a character's boundary.
#pragma once

#include <cstddef>
#include <string_view>

namespace allreduce {

// Bytes of the longest beginning of a text that has at most `limit` and ends with a whole
// character.
inline std::size_t fitting(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text.size();
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  while (limit > 0 && continues(limit)) --limit;
  return limit;
}

}  // namespace allreduce
