// The memory that members of a communicator share: the layout of its control region.
//
// Every word that one member writes and others read is a lock-free atomic in the region. Plain
// bytes (payloads, staged chunks, symmetric buffers) are handed over by such a word: the writer
// stores it after the bytes, the reader loads it before them. All these stores and loads are
// sequentially consistent, which costs nothing over acquire on x86 loads and about 8 ns per store,
// because a writer must also see members that went to sleep before its store (Group::publish,
// Group::sleep).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "core/call.h"
#include "core/slices.h"
#include "shm/memory/layout.h"
#include "shm/p2p/mailbox.h"

namespace allreduce {

// Calls a member may have posted before the slowest member finished the first of them.
inline constexpr std::size_t kSlots = 64;
// Payload that travels in the flag's own cache line.
inline constexpr std::size_t kInline = 40;
// Bytes of a payload stored next to its slot, for eager calls: a page.
inline constexpr std::size_t kSmall = 4096;
// A member's ring for staged bytes: places, and bytes of each, which is what a chunk has at least.
// All of it, 512 KiB, should stay in the level-2 cache: all_reduce of 16 MiB, 2 processes, Zen 4
// (1 MiB), 1.25 ms in chunks of 512 KiB, 1.4 in chunks of 256 KiB, 1.5 where two of these take
// turns. (choices.h says how many places a chunk takes.)
inline constexpr std::size_t kRing = 128;
inline constexpr std::size_t kPlace = 4 << 10;
// Places for pairwise exchange: both rings together, 128 KiB, stay in a level-2 cache together with
// the data that moves.
inline constexpr std::size_t kLap = 16;
// Bytes of a place: one line more than a chunk, which may begin anywhere in its first line
// (staged.cpp).
inline constexpr std::size_t kPlaceStride = kPlace + kLine;

// The location of a call's arrays in symmetric memory: a region's id (0: none) and a byte offset.
struct Placement {
  std::uint64_t in_offset = 0;
  std::uint64_t out_offset = 0;
  std::uint32_t in_region = 0;
  std::uint32_t out_region = 0;
};
static_assert(sizeof(Placement) <= kInline);

// The address of a member's input in its own memory, for the others to read it, or to compute its
// offset in the rings.
struct InputLocation {
  std::uint64_t address = 0;
  std::uint64_t longest = 0;   // elements of its longest segment, if the call uses the rings
  std::uint64_t withheld = 0;  // others cannot read it: the call uses the rings
};
static_assert(sizeof(InputLocation) <= kInline);

struct alignas(kLine) Slot {
  std::atomic<std::uint64_t> flag;  // sequence number + 1 of the call that was posted here last
  std::uint64_t signature;
  std::uint64_t detail;  // a hash of further facts that must agree: shapes, unequal shares
  std::byte payload[kInline];
};
static_assert(sizeof(Slot) == kLine);

// A send or recv, for the errors of other members.
struct MessageRecord {
  Collective collective = Collective::send;
  Type type = Type::none;
  int peer = 0;
  std::int64_t tag = 0;
  std::uint64_t count = 0;
  Remark remark;
};

// One member's words. Calls are numbered from 0, and places of the ring through all staged calls.
struct MemberState {
  Counter done;      // calls this member has completed: their slots may be reused
  Counter finished;  // calls whose share of direct work this member has stored everywhere, or for
                     // which it has copied all it needs out of the others' arrays
  Counter staged;    // places this member has copied into its ring
  Counter reduced;   // places whose slice this member has reduced in all rings
  Counter consumed;  // places this member will never touch again, in any ring
  alignas(kLine) std::atomic<std::uint32_t> left;  // closed in good order
  // The message in which it has waited long, for others' errors: 0 for none, otherwise as Python
  // encodes it.
  std::atomic<std::uint32_t> message;
  char reason[kLine * 4 - sizeof(left) - sizeof(message)];  // why this member ended it
  // Takes part in no call any more: it has left, or its calls have failed. Stored before it takes
  // its arrays back.
  alignas(kLine) std::atomic<std::uint32_t> ended;
  // The message in which this member blamed a peer, and that peer's own message. Written before the
  // culprit's word, which names this member as the observer.
  MessageRecord mismatch[2];
};

// Why a communicator is dead: one word, set once, so that all members report the same cause.
struct Culprit {
  static constexpr std::uint64_t kNumber = (1ull << 35) - 1;

  Fault fault = Fault::none;
  int member = 0;         // the one to blame
  int observer = 0;       // who noticed
  std::uint64_t seq = 0;  // the call, or message, it happened in

  // The word holds the low bits of the number, and whether it is a message's.
  std::uint64_t pack() const {
    const std::uint64_t number = (seq & kNumber) | ((seq & kMessage) != 0 ? kNumber + 1 : 0);
    return static_cast<std::uint64_t>(fault) | static_cast<std::uint64_t>(member) << 4 |
           static_cast<std::uint64_t>(observer) << 16 | number << 28;
  }
  static Culprit unpack(std::uint64_t word) {
    const std::uint64_t number = word >> 28;
    return {static_cast<Fault>(word & 15), static_cast<int>(word >> 4 & (kMaxMembers - 1)),
            static_cast<int>(word >> 16 & (kMaxMembers - 1)),
            (number & kNumber) | (number > kNumber ? kMessage : 0)};
  }
  // The same with the whole number of the call, of which one near it is known.
  Culprit near(std::uint64_t known) const {
    if ((seq & kMessage) != 0) return *this;
    const std::uint64_t base = known - std::min(known, kNumber / 2);
    return {fault, member, observer, base + ((seq - base) & kNumber)};
  }
};

struct Header {
  alignas(kLine) std::atomic<std::uint64_t> culprit;
  alignas(kLine) std::atomic<std::uint32_t> sleepers;  // threads of any process in Group::sleep
  alignas(kLine) std::atomic<std::uint32_t> wakes;     // the futex they sleep on
};

// A view of the control region: finds the words and bytes of each member.
class Control {
 public:
  Control(std::byte* base, int members) : base_(base), members_(members) {}

  static std::size_t bytes(int members) {
    return sizeof_states(members) + static_cast<std::size_t>(members) * per_member(members);
  }
  // Begins the lives of the atomics in zeroed memory, which is their initial state.
  Header& header() const { return *std::launder(reinterpret_cast<Header*>(base_)); }
  MemberState& state(int member) const {
    return *std::launder(reinterpret_cast<MemberState*>(base_ + kPage) + member);
  }
  Slot& slot(int member, std::uint64_t seq) const {
    return *std::launder(reinterpret_cast<Slot*>(own(member)) + seq % kSlots);
  }
  std::byte* payload(int member, std::uint64_t seq, std::size_t bytes) const {
    if (bytes <= kInline) return slot(member, seq).payload;
    return own(member) + kSlots * kLine + seq % kSlots * kSmall;
  }
  Note& note(int member, std::uint64_t seq) const {
    return *std::launder(reinterpret_cast<Note*>(own(member) + kSlots * (kLine + kSmall)) +
                         seq % kSlots);
  }
  std::byte* place(int member, std::uint64_t position) const {
    return own(member) + kSlots * kPerSlot + position % kRing * kPlaceStride;
  }
  // A page that two members hand to and fro with small contributions; each has one at first.
  std::byte* spare(int member) const { return own(member + 1) - sizeof(Mailbox) - kSmall; }
  Mailbox& mailbox(int member) const {
    std::byte* end = own(member + 1);
    return *std::launder(reinterpret_cast<Mailbox*>(end - sizeof(Mailbox)));
  }

 private:
  static constexpr std::size_t kPerSlot = kLine + kSmall + sizeof(Note);
  static_assert(kSlots * kPerSlot % alignof(Mailbox) == 0);

  static std::size_t sizeof_states(int members) {
    std::size_t bytes = kPage + static_cast<std::size_t>(members) * sizeof(MemberState);
    return (bytes + kPage - 1) / kPage * kPage;
  }
  static std::size_t per_member(int members) {
    return kSlots * kPerSlot + (members > 1 ? kRing * kPlaceStride + kSmall + sizeof(Mailbox) : 0);
  }
  std::byte* own(int member) const {
    return base_ + sizeof_states(members_) +
           static_cast<std::size_t>(member) * per_member(members_);
  }

  std::byte* base_;
  int members_;
};

// The number of this layout: builds whose numbers differ must not share a region. Raise the first
// term when words change their meaning and no size does.
inline constexpr std::uint64_t layout_number() {
  std::uint64_t number = 2;
  for (const std::uint64_t part :
       {kSlots, kInline, kSmall, kRing, kPlaceStride, kLap, sizeof(Header), sizeof(MemberState),
        sizeof(Slot), sizeof(Note), sizeof(MessageRecord), sizeof(Mailbox), kLine, kPage})
    number = (number ^ part) * 0x100000001b3;  // FNV-1a
  return number;
}

}  // namespace allreduce
