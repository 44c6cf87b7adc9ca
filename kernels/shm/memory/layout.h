// Sizes and words shared by the layouts of calls (protocol.h) and of messages (p2p/mailbox.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/slices.h"

namespace allreduce {

inline constexpr std::size_t kPage = 4096;

// An array's shape and call site, as text for the errors of other members.
struct Remark {
  static constexpr std::size_t kText = 180;

  void set(std::string_view from) {
    length = static_cast<std::uint16_t>(std::min(from.size(), kText));
    std::memcpy(text, from.data(), length);
  }
  std::string_view get() const { return {text, std::min<std::size_t>(length, kText)}; }

  std::uint16_t length = 0;
  char text[kText];
};

// A member's note on a call. Written before the post if the call may be waited for elsewhere,
// otherwise by the member that fails: a successful call writes none.
struct alignas(kLine) Note {
  // Pairs with the load in read().
  void write(std::uint64_t seq, std::string_view from) {
    remark.set(from);
    of.store(seq + 1, std::memory_order_release);
  }
  // The note on a call, or null; it stays as long as the call is not complete everywhere.
  const Remark* read(std::uint64_t seq) const {
    return of.load(std::memory_order_acquire) == seq + 1 ? &remark : nullptr;
  }

  std::atomic<std::uint64_t> of;  // sequence number + 1
  Remark remark;
};
static_assert(sizeof(Note) == 3 * kLine);

struct alignas(kLine) Counter {
  std::atomic<std::uint64_t> value;
};

}  // namespace allreduce
