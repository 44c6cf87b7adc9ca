// A collective call, for the engines of all transports: its signature and further details.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// COLLECTIVES and PATHS in comm/calls/call.py have the same order.
enum class Collective : std::uint8_t {
  barrier,
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  allocate,
  reduce,
  gather,
  scatter,
  all_to_all,
  send,
  recv
};
// Whether it moves bytes without reducing them.
inline bool copies(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::broadcast ||
         collective == Collective::gather || collective == Collective::scatter ||
         collective == Collective::all_to_all;
}
inline bool is_message(Collective collective) {
  return collective == Collective::send || collective == Collective::recv;
}

// Shared memory: eager: the input travels with the post; direct: in place, in symmetric memory;
// staged: in chunks through rings; cross_process: read from each other's private memory; pairwise:
// two members exchange chunks through rings.
//
// tcp: eager: contributions travel with the posts; direct: each goes to its reducer in one hop;
// chain: from member to member.
enum class Path : std::uint8_t { eager, direct, staged, cross_process, pairwise, chain };

// The source or tag of a recv that accepts any.
inline constexpr int kAny = -1;

inline constexpr int kRootBits = 12;
inline constexpr int kCountBits = 36;
inline constexpr int kMaxMembers = 1 << kRootBits;

struct Call {
  Collective collective = Collective::barrier;
  Op op = Op::none;
  Type type = Type::none;
  Path path = Path::eager;
  int root = 0;  // also the peer of send and recv, or kAny
  // Elements: of the array for all_reduce, reduce and broadcast; otherwise of one member's share.
  // If shares differ: of all shares (0 for all_to_all).
  std::uint64_t count = 0;

  // The signature next to the slot's flag: the whole call, so that errors can show a peer's call.
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(op) << 4 |
           static_cast<std::uint64_t>(type) << 8 | static_cast<std::uint64_t>(path) << 12 |
           static_cast<std::uint64_t>(root) << 16 | count << (16 + kRootBits);
  }
  static Call unpack(std::uint64_t word) {
    return {static_cast<Collective>(word & 15),
            static_cast<Op>(word >> 4 & 15),
            static_cast<Type>(word >> 8 & 15),
            static_cast<Path>(word >> 12 & 15),
            static_cast<int>(word >> 16 & (kMaxMembers - 1)),
            word >> (16 + kRootBits)};
  }
};

// Parts of a call outside its signature. `offsets`: the start of each member's share in the joined
// or split array, and the end of the last; empty if all shares have `count` elements. all_to_all
// splits the input at `offsets` and joins the output at `receives`.
struct Details {
  std::uint64_t hash = 0;  // of everything else that must agree
  std::vector<std::uint64_t> offsets, receives;
  std::string note = {};  // shown in other members' errors (Note); empty if not known yet
};

// State of a started call.
enum class State : std::uint8_t { pending, done, failed };

struct CallSpec {
  Call call;
  Details details;
};

enum class Fault : std::uint8_t { none, mismatch, lost, left, aborted, timeout };

inline const char* name_of(Fault fault) {
  constexpr const char* kNames[] = {"none", "mismatch", "lost", "left", "aborted", "timeout"};
  return kNames[static_cast<int>(fault)];
}

}  // namespace allreduce
