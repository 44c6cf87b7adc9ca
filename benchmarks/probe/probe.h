// Shared by the probes of the machine's limit: spinning barriers, and a clock.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace probe {

constexpr int kMostRanks = 1024;
constexpr int kSpins = 2000;  // before a core is given away, where each process has one

struct alignas(64) Arrival {
  std::atomic<std::uint64_t> count;
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The participants of a probe, and their barriers.
struct Crew {
  Arrival* arrivals;
  int rank, ranks;
  bool roomy;  // whether each process has its own core

  void meet() const {
    const std::uint64_t mine = arrivals[rank].count.load(std::memory_order_relaxed) + 1;
    arrivals[rank].count.store(mine, std::memory_order_release);  // pairs with the load in await()
    for (int other = 0; other < ranks; ++other) await(arrivals[other].count, mine);
  }

  // Waits until another process has counted so far.
  void await(const std::atomic<std::uint64_t>& count, std::uint64_t least) const {
    int tries = 0;
    while (count.load(std::memory_order_acquire) < least) {
      if (roomy && ++tries < kSpins) {
        relax();
      } else {
        sched_yield();
      }
    }
  }

  // Returns the seconds between all having come and all being done.
  template <class Act>
  double time(const Act& act) const {
    meet();
    const auto start = std::chrono::steady_clock::now();
    act();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    return taken.count();
  }
};

}  // namespace probe
