// Path and chunk size of each call: the rows of Python's comm/selection/table.py that apply to one
// communicator.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/progress/protocol.h"

namespace allreduce {

inline constexpr std::size_t kCollectives = 16;  // the signature has 4 bits
// A chunk fills 1, 2, 4, ... whole places of a ring, so that it is contiguous.
inline constexpr std::uint64_t kLeastStep = kPage;

// How to execute a call that does not travel with its post.
struct Way {
  std::uint64_t chunk = 0;          // most bytes moved by one step
  bool streaming = false;           // staged bytes are stored past the caches
  std::uint64_t past = UINT64_MAX;  // from this size, copies out of the rings stream, too
  bool pairwise = false;            // two members exchange chunks
};

// Calls above the eager limit whose largest input has at most `limit` bytes.
struct Band {
  std::uint64_t limit;
  Way direct;         // on symmetric memory; chunk 0: as on ordinary memory
  Way cross_process;  // from other members' private memory; chunk 0: staged
  Way staged;
};

// A collective's bands, in ascending order; the last has no limit.
struct Rules {
  std::uint64_t eager = 0;  // most bytes of an input that travels with the post
  std::vector<Band> bands;
};

class Choices {
 public:
  // Sets a collective's rules; returns the error in them, or "".
  std::string set(Collective collective, Rules rules, int members) {
    const std::uint64_t least = static_cast<std::uint64_t>(members) * kLine;
    if (rules.eager > kSmall) return "an eager contribution is longer than a slot's page";
    if (rules.bands.empty() || rules.bands.back().limit != UINT64_MAX)
      return "the last band has a limit";
    for (const Band& band : rules.bands) {
      const std::uint64_t chunk = band.staged.chunk;
      const bool power = chunk != 0 && (chunk & (chunk - 1)) == 0;
      if (!power || chunk < kPlace || chunk > kRing * kPlace)
        return "a staged chunk is no power of two that the ring holds";
      if (band.staged.pairwise && (members != 2 || chunk > kLap * kPlace))
        return "only two members exchange places, and a lap of them at most";
      if (chunk < least) return "a staged chunk has less than a cache line for each member";
      if (band.cross_process.chunk != 0 && !copies(collective))
        return "only copies can read other processes' memory";
      for (const Way& way : {band.direct, band.cross_process})
        if (way.chunk != 0 && way.chunk < kLeastStep) return "a step is too short";
    }
    rules_[static_cast<std::size_t>(collective)] = std::move(rules);
    return "";
  }

  // Most bytes of an input that travels with the post.
  std::uint64_t eager_bytes(Collective collective) const {
    return rules_[static_cast<std::size_t>(collective)].eager;
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
