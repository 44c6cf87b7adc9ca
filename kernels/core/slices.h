// The members' slices of an array that all of them reduce.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduce {

inline constexpr std::size_t kLine = 64;  // bytes that caches move

// The elements [low, high) of one member.
struct Slice {
  std::uint64_t low, high;
};

// Cut at whole cache lines, so that no two members write to one of an array that begins with one.
inline Slice slice_of(std::uint64_t count, std::size_t element, int members, int member) {
  const std::uint64_t line = kLine / element;
  const auto n = static_cast<std::uint64_t>(members);
  const auto cut = [&](std::uint64_t m) {  // count * m / n, which might not fit
    return m == n ? count : (count / n * m + count % n * m / n) / line * line;
  };
  return {cut(static_cast<std::uint64_t>(member)), cut(static_cast<std::uint64_t>(member) + 1)};
}

}  // namespace allreduce
