// The protocol between members of a tcp communicator: frames of a fixed header and a payload.
//
// Each pair of members has one connection for control frames (posts, messages, credits, faults),
// which are small and copied, and one or more for data, which goes from and to the callers' arrays.
// A fault is therefore never stuck behind half a chunk of an array that must not be read any more.
// One more connection carries nothing: on it the kernels probe whether the peer's host can be
// reached.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/call.h"

namespace allreduce::tcp {

// The connections of a pair, by number; those for data follow the first of them.
inline constexpr int kControl = 0;
inline constexpr int kProbes = 1;
inline constexpr int kData = 2;

inline constexpr int kNobody = -1;
// Room for a contribution that travels with a post or a message.
inline constexpr std::size_t kEager = 4096;
inline constexpr std::size_t kMaxSignature = 60000;
// Limits of one transfer: the largest chunk, and the smallest staged chunk that is worth a system
// call, while staging stays bounded.
inline constexpr std::size_t kMaxChunk = 1 << 20;
inline constexpr std::size_t kLeastChunk = 16 << 10;
// Staged chunks that a source may have on their way to one place of a call, and the bytes that all
// of these take at most for one call: where many members' meet, chunks get shorter and fewer. With
// kActive calls at a time a member stages 16 MiB. Along a ring, where a chunk is reduced as soon as
// it is there, each connection has one more: kMaxChunk at most.
inline constexpr std::uint64_t kWindow = 4;
inline constexpr std::size_t kStaging = 8 << 20;
inline constexpr std::size_t kActive = 2;
// Calls a member may have posted after the first that it has not completed: bounds what others keep
// for one that lags behind.
inline constexpr std::uint64_t kAhead = 128;
// Small messages to one member that it may not have accepted yet; further ones wait to be asked
// for.
inline constexpr int kUnaccepted = 64;
// Keys of messages have this bit; keys of collectives are their sequence numbers.
inline constexpr std::uint64_t kMessage = 1ull << 63;

enum class Kind : std::uint8_t {
  post = 1,  // a call was started: key, signature; on the eager path its contribution to the reader
  message,   // a small message: key, tag in `offset`, type in `stage`; count, signature, its bytes
  offer,     // a large one is there: the same, without its bytes
  accept,    // a message has found its receiver: key; of an offer the receiver's key in `offset`
  credit,    // chunks below `offset` of a stage may be sent: key, stage
  fault,    // the communicator is dead: key, Fault and members in `stage`; two signatures, a reason
  goodbye,  // the sender leaves in good order: key is its first call that is not complete
  data,     // chunk number `offset` of a stage: key, stage
  waits     // the sender waits for member `stage` and has for long; for nobody, if there is no such
};

// The key of `waits`, from this number on, is that of a collective under way, added to it; below
// it, Python's number of a kind of message.
inline constexpr std::uint64_t kUnderWay = 16;

// Integers as x86-64 and arm64 have them; the handshake's version stands for the order of bytes.
inline constexpr std::uint32_t kMagic = 0x52415031;
struct Header {
  std::uint32_t magic = kMagic;
  Kind kind{};
  std::uint8_t reserved = 0;
  std::uint16_t signature = 0;  // bytes of it in the payload
  std::uint64_t key = 0;
  std::uint64_t offset = 0;
  std::uint32_t stage = 0;
  std::uint32_t length = 0;  // of the payload
};
static_assert(sizeof(Header) == 32);

// Why a communicator is dead, as its members tell it to each other.
struct Culprit {
  Fault fault = Fault::none;
  int member = 0;         // the one to blame
  int observer = 0;       // who noticed, or the other side of a mismatch
  std::uint64_t key = 0;  // the call it happened in
  // Signatures of their calls: both after a mismatch, the observer's after a timeout.
  std::string of_member, of_observer;
  std::string reason;
};

// What a member that gives up before it has begun sends on a connection for control frames: a
// header, and why nobody is to wait for it.
std::string abort_frame(int member, const std::string& reason);

// A signature's first two bytes say how many of its bytes must be equal, themselves included; after
// them come, of all_to_all with counts, what the member sends to each and what it gets from each,
// which must fit the others'. Its last byte says how many before it are a note for errors, which
// may differ.
bool well_formed(const std::string& signature);
// Whether two members' signatures are of different calls.
bool differ(int a, const std::string& of_a, int b, const std::string& of_b, int members);

// A call as one member makes it. Its arrays belong to it until it is settled.
struct Request : CallSpec {
  std::int64_t tag = 0;
  std::uint64_t chunk = kLeastChunk;  // bytes of one transfer at most
  std::string signature;              // what must agree, and what errors show
  const std::byte* in = nullptr;
  std::byte* out = nullptr;

  std::size_t element() const { return size_of(call.type); }
};

}  // namespace allreduce::tcp
