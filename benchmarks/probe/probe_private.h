// Shared by the private probe's algorithms: the participants, the addresses of arrays and rings,
// and the parts that processes exchange.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "probe.h"

namespace probe {

constexpr std::size_t kLine = 64;
constexpr std::size_t kRing = 512 << 10;  // bytes of a process's ring

// A process's addresses, in the region that all of them map.
struct alignas(64) Owner {
  std::uint64_t process, address;
  std::atomic<std::uint64_t> given;  // chunks that it has exchanged, in all calls
};

struct Job {
  Crew crew;
  Owner* owners;
  std::byte* rings;
  std::byte *in, *out;
  std::size_t bytes;  // of one input

  // Rings begin as far into a cache line as their owners' arrays, so that vectors lie in one line.
  std::byte* ring(int of) const {
    return rings + static_cast<std::size_t>(of) * (kRing + kLine) + owners[of].address % kLine;
  }
  std::size_t cut(std::size_t whole, int at) const {
    return whole / kLine * static_cast<std::size_t>(at) / static_cast<std::size_t>(crew.ranks) *
           kLine;
  }
  std::size_t low(std::size_t whole) const { return cut(whole, crew.rank); }
  std::size_t high(std::size_t whole) const {
    return crew.rank + 1 == crew.ranks ? whole : cut(whole, crew.rank + 1);
  }
};

enum Collective { kAllReduce, kAllGather, kBroadcast, kAllToAll };

// A part that one process sends to another: its place in the sender's input and in the receiver's
// output.
struct Part {
  std::size_t from, to, bytes;
};

inline Part part(const Job& job, int collective, int giver, int taker) {
  const std::size_t share = job.bytes / static_cast<std::size_t>(job.crew.ranks);
  const auto place = static_cast<std::size_t>(giver);
  if (collective == kAllReduce) return {0, 0, job.bytes};
  if (collective == kAllGather) return {0, place * job.bytes, job.bytes};
  if (collective == kAllToAll)
    return {static_cast<std::size_t>(taker) * share, place * share, share};
  return {0, 0, giver == 0 && taker != 0 ? job.bytes : 0};
}

// Copies what a process keeps for itself; past the caches where that is asked for and known.
void copy_own(const Job& job, int collective, bool stream);

// Between two processes, through their rings, `chunk` bytes at a time: probe_exchange.cpp.
void exchange(const Job& job, int collective, std::size_t chunk, bool stream);

}  // namespace probe
