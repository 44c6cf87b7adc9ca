// What a collective call is, for the engines of all transports: its signature, and what that does
// not hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// COLLECTIVES and PATHS in comm/calls/call.py stand in the same order.
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
// Whether it moves bytes as they are.
inline bool copies(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::broadcast ||
         collective == Collective::gather || collective == Collective::scatter ||
         collective == Collective::all_to_all;
}
inline bool is_message(Collective collective) {
  return collective == Collective::send || collective == Collective::recv;
}

// Shared memory: small: through the slots; direct: symmetric memory, in place; staged: through the
// chunk rings; pulled: out of each other's private memory; exchanged: through rings whose places
// change hands.
//
// tcp: small: contributions travel with the posts; direct: each goes to where it is reduced in one
// hop; chain: from member to member.
enum class Path : std::uint8_t { small, direct, staged, pulled, exchanged, chain };

// What a recv that takes every source, or tag, names.
inline constexpr int kAny = -1;

inline constexpr int kRootBits = 12;
inline constexpr int kCountBits = 36;
inline constexpr int kMaxMembers = 1 << kRootBits;

struct Call {
  Collective collective = Collective::barrier;
  Op op = Op::none;
  Type type = Type::none;
  Path path = Path::small;
  int root = 0;  // also the peer of send and recv, or kAny
  // Elements: of the array for all_reduce, reduce and broadcast; otherwise of one member's share,
  // or of all shares where they differ (nothing for all_to_all then).
  std::uint64_t count = 0;

  // The signature that stands beside the flag: the whole call, so that an error can show a peer's.
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

// What a call's signature does not hold. `offsets`: where each member's share begins in the joined
// or cut array, and last where it ends; empty if all shares are `count` long. all_to_all cuts the
// input at `offsets` and joins the output at `receives`.
struct Details {
  std::uint64_t hash = 0;  // what must agree beyond the signature
  std::vector<std::uint64_t> offsets, receives;
  std::string note = {};  // for the others' errors (Note); empty where none is known yet
};

// Of a started call.
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
