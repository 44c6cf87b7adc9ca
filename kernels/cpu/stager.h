// Chooses how members write what their peers will read: ordinary or streaming stores.
//
// Which is faster depends on where the members run, and changes when a virtual machine's processors
// are moved. all_reduce of 1 MiB, 2 processes, Zen 4: while they sit on separate cores, 528 us with
// ordinary stores and 100 us with streaming ones (an ordinary store into a line that the other core
// caches costs 60 ns); while they share a core's caches, 62 us and 142 us (a streamed line has to
// come back from memory). A writer alone cannot see this, because it is the reader that pays. So
// one member times whole calls, and its choice, a word in the control region, holds for all; a
// member that reads it late does no harm, as readers cannot tell.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace allreduce {

class Stager {
 public:
  // `plain`: the choice that all members share. `decides`: whether this member makes it.
  Stager(std::atomic<std::uint32_t>& plain, bool decides) : plain_(plain), decides_(decides) {}

  bool streams() const { return plain_.load(std::memory_order_relaxed) == 0; }
  // Copies into shared memory. The caller's next store to an atomic publishes it.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;
  // Around a staged call of `bytes`, from when all members have posted it until this one is done.
  void begin(std::size_t bytes);
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  // What calls of one size cost each way, in nanoseconds, smoothed; 0 before the first.
  struct Costs {
    std::array<double, 2> ways{};  // streaming, ordinary
    unsigned until_trial = 1;      // calls before the slower way is tried again
  };

  std::atomic<std::uint32_t>& plain_;
  const bool decides_;
  std::array<Costs, 64> costs_{};  // by the size's number of bits
  Costs* timed_ = nullptr;
  Clock::time_point start_;
};

}  // namespace allreduce
