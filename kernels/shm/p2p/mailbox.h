// Sends and recvs in shared memory: the letters that members write into each other's mailboxes, and
// the windows through which large messages move (see p2p.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/call.h"
#include "shm/memory/layout.h"

namespace allreduce {

// Letters that may lie in a member's box, and a message's bytes that travel with its letter.
inline constexpr std::size_t kLetters = 32;
inline constexpr std::size_t kEager = 4096;
// A member's windows for the chunks of what it sends, bytes of each, and how many of them one
// receiver may have: one that is busy elsewhere does not hold up the others.
inline constexpr std::size_t kWindows = 8;
inline constexpr std::size_t kWindow = 32 << 10;
inline constexpr int kWindowsPerReceiver = 4;
// Small messages that one member has sent to another and that no recv has taken yet.
inline constexpr int kUntaken = 32;
// In the numbers of messages; those of calls never come so far.
inline constexpr std::uint64_t kMessage = 1ull << 62;

// Letters about sends and recvs.
enum class LetterKind : std::uint8_t {
  message,  // a small message, in the letter's payload
  offer,    // a message that the sender keeps, or that lies in symmetric memory
  accept,   // the receiver has a place for an offered message
  chunk,    // a part of an accepted message lies in a window of the sender
  fetched,  // the receiver has read the offered message in symmetric memory
  taken     // recvs have taken so many small messages
};

struct Letter {
  LetterKind kind = LetterKind::message;
  Type type = Type::none;
  std::uint16_t from = 0;
  std::uint32_t where = 0;   // chunk: the window; offer: the symmetric region, or 0
  std::int64_t tag = 0;      // message, offer
  std::uint64_t count = 0;   // message, offer: elements; chunk: bytes; taken: messages
  std::uint64_t send = 0;    // the number of the send
  std::uint64_t recv = 0;    // the number of the recv, once they have met
  std::uint64_t offset = 0;  // chunk: bytes into the message; offer: bytes into the region's part
};

// Twice the lap of the box in which it is to be written next, and one more while it waits to be
// read.
struct alignas(kLine) LetterBox {
  std::atomic<std::uint64_t> turn;
  Letter letter;
};
static_assert(sizeof(LetterBox) == kLine);

// A member's mailbox, which all others write to, and the windows that they read from.
struct alignas(kPage) Mailbox {
  alignas(kLine) std::atomic<std::uint64_t> next;  // positions that writers have taken
  Counter filled[kWindows];  // 1 from when the owner gives a chunk till its receiver has copied it
  LetterBox letters[kLetters];
  Remark remarks[kLetters];  // of the senders of messages and offers
  alignas(kLine) std::byte payloads[kLetters][kEager];
  alignas(kLine) std::byte windows[kWindows][kWindow];
};

}  // namespace allreduce
