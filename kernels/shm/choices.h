// Which way calls go, and in what chunks: the rows of Python's comm/selection/table.py that hold
// for one communicator, as its members look them up.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/protocol.h"

namespace allreduce {

inline constexpr std::size_t kCollectives = 16;  // that the signature has bits for
// Chunks fill whole places, one, two, four, ... of them, so that each lies in one piece.
inline constexpr std::uint64_t kLeastStep = kPage;

// How a call that does not travel with the post is carried out.
struct Way {
  std::uint64_t chunk = 0;          // bytes that one step moves at most
  bool streaming = false;           // staged bytes are stored past the caches
  std::uint64_t past = UINT64_MAX;  // bytes from which on a part that is copied out is so, too
  bool exchanged = false;           // between two members: places of the rings change hands
};

// Calls whose largest input has up to `limit` bytes and does not travel with the post.
struct Band {
  std::uint64_t limit;
  Way direct;  // on symmetric memory; without a chunk it goes like any other
  Way pulled;  // out of the others' private memory; without a chunk it is staged
  Way staged;
};

// A collective's bands, in rising order; the last has no limit.
struct Rules {
  std::uint64_t small = 0;  // bytes of the largest input that travels with the post
  std::vector<Band> bands;
};

class Choices {
 public:
  // Says what is wrong with a collective's rules, or takes them and returns nothing.
  std::string set(Collective collective, Rules rules, int members) {
    const std::uint64_t least = static_cast<std::uint64_t>(members) * kLine;
    if (rules.small > kSmall) return "a small contribution is longer than a slot's page";
    if (rules.bands.empty() || rules.bands.back().limit != UINT64_MAX)
      return "the last band has a limit";
    for (const Band& band : rules.bands) {
      const std::uint64_t chunk = band.staged.chunk;
      const bool power = chunk != 0 && (chunk & (chunk - 1)) == 0;
      if (!power || chunk < kPlace || chunk > kRing * kPlace)
        return "a staged chunk is no power of two that the ring holds";
      if (band.staged.exchanged && (members != 2 || chunk > kLap * kPlace))
        return "only two members exchange places, and a lap of them at most";
      if (chunk < least) return "a staged chunk has less than a cache line for each member";
      if (band.pulled.chunk != 0 && !copies(collective)) return "only copies can be pulled";
      for (const Way& way : {band.direct, band.pulled})
        if (way.chunk != 0 && way.chunk < kLeastStep) return "a step is too short";
    }
    rules_[static_cast<std::size_t>(collective)] = std::move(rules);
    return "";
  }

  // Bytes of the largest input that travels with the post.
  std::uint64_t small(Collective collective) const {
    return rules_[static_cast<std::size_t>(collective)].small;
  }

  const Band& band(Collective collective, std::uint64_t bytes) const {
    const auto& bands = rules_[static_cast<std::size_t>(collective)].bands;
    return *std::find_if(bands.begin(), bands.end(),
                         [bytes](const Band& band) { return bytes <= band.limit; });
  }

 private:
  std::array<Rules, kCollectives> rules_;
};

}  // namespace allreduce
