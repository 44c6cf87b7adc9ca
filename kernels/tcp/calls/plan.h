// The bytes that a call moves between members, as data: a member's stages.
//
// Every collective is a set of flows: a flow begins at one member (or at several, which are reduced
// where they meet), goes from member to member in chunks, and at each stage may be reduced with the
// member's own contribution, stored, and sent on. Algorithms: chains and rings as in Patarasuk and
// Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009);
// the direct exchange is the reduce-scatter and all-gather of fully connected members.
#pragma once

#include <cstdint>
#include <vector>

#include "tcp/io/protocol.h"

namespace allreduce::tcp {

inline constexpr std::int64_t kNowhere = -1;

// Where a stage sends its chunks: the peer, and the stage there.
struct Link {
  int peer;
  std::uint32_t stage;
  bool windowed;  // the peer stages them, and says how many it will take
};

struct Stage {
  std::uint32_t id = 0;
  std::vector<int> from = {};  // in rising order; empty where a flow begins
  std::vector<Link> to = {};
  std::uint64_t elements = 0;
  std::int64_t in = kNowhere;   // where the own contribution lies, in elements of the input
  std::int64_t out = kNowhere;  // where the result is stored, in elements of the output
  bool reduce = false;          // received data is reduced with the own contribution
  bool last = false;            // and is the final value then: a mean divides here
  bool windowed = false;        // received data is staged until it is passed on
};

struct Plan {
  std::vector<Stage> stages;
  std::uint64_t chunk = 1;   // elements
  std::uint64_t window = 1;  // staged chunks that a source may have on their way
  bool windowed() const;
};

// Pure: differs between members only by their number.
Plan make_plan(const Request& request, int me, int members);

}  // namespace allreduce::tcp
