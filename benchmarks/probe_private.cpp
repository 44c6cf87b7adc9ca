// The machine's own limit for collectives on private arrays: no protocol, no checks.
//
// What is private has to be moved once more than what is shared. There are two ways: through rings
// in shared memory, which each process writes and the others read; or by process_vm_readv, with
// which the kernel copies straight out of the other process. Both are here; whoever times them
// takes the faster one. Spinning barriers are the only synchronisation.

#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "probe.h"

namespace {

using probe::Crew;

constexpr std::size_t kLine = 64;
constexpr std::size_t kRing = 512 << 10;   // bytes of a process's ring
constexpr std::size_t kBlock = 128 << 10;  // bytes that are pulled and added while in the cache
constexpr std::size_t kPull = 1 << 20;     // bytes that one system call copies
constexpr std::size_t kPast = 4 << 20;     // bytes from which own parts go past the caches

// What a process has told of itself, in the region that all of them map.
struct alignas(64) Owner {
  std::uint64_t process, address;
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

void add(std::byte* to, const std::byte* from, std::size_t bytes) {
  auto* total = reinterpret_cast<float*>(to);
  const auto* more = reinterpret_cast<const float*>(from);
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) total[i] += more[i];
}

// Returns whether the kernel has copied; it may be forbidden.
bool pull(const Owner& from, std::byte* to, std::size_t at, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t step = std::min(kPull, bytes - done);
    const iovec here{to + done, step};
    const iovec there{reinterpret_cast<void*>(from.address + at + done), step};
    const ssize_t copied =
        process_vm_readv(static_cast<pid_t>(from.process), &here, 1, &there, 1, 0);
    if (copied <= 0) return false;
    done += static_cast<std::size_t>(copied);
  }
  return true;
}

// Moves a ring's lines to the output and the next chunk's into the ring, in one pass.
void exchange(std::byte* out, std::byte* ring, const std::byte* next, std::size_t bytes) {
  auto* to = reinterpret_cast<float*>(out);
  auto* middle = reinterpret_cast<float*>(ring);
  const auto* from = reinterpret_cast<const float*>(next);
#pragma GCC ivdep
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) {
    const float value = middle[i];
    middle[i] = from[i];
    to[i] = value;
  }
}

// In place, through the rings: each process copies in what the others are to add, adds its own
// slice of a chunk into all rings, and copies the rest out.
void all_reduce_by_rings(const Job& job) {
  const Crew& crew = job.crew;
  std::byte* own = job.ring(crew.rank);
  for (std::size_t start = 0; start < job.bytes; start += kRing) {
    const std::size_t whole = std::min(kRing, job.bytes - start);
    const std::size_t low = job.low(whole), high = job.high(whole);
    std::byte* here = job.in + start;
    if (start == 0) {
      std::memcpy(own, here, low);
      std::memcpy(own + high, here + high, whole - high);
    }
    crew.meet();
    for (int other = 0; other < crew.ranks; ++other)
      if (other != crew.rank) add(here + low, job.ring(other) + low, high - low);
    for (int other = 0; other < crew.ranks; ++other)
      if (other != crew.rank) std::memcpy(job.ring(other) + low, here + low, high - low);
    crew.meet();
    const std::size_t next = start + kRing;
    if (next + kRing <= job.bytes) {
      exchange(here, own, here + kRing, low);
      exchange(here + high, own + high, here + kRing + high, whole - high);
      continue;
    }
    std::memcpy(here, own, low);
    std::memcpy(here + high, own + high, whole - high);
    if (next < job.bytes) {
      const std::size_t rest = job.bytes - next;
      std::memcpy(own, here + kRing, job.low(rest));
      std::memcpy(own + job.high(rest), here + kRing + job.high(rest), rest - job.high(rest));
    }
  }
  crew.meet();
}

// In place, by the kernel: each process pulls its own slice of the others', and then their results.
bool all_reduce_by_pulls(const Job& job, std::vector<std::byte>& scratch) {
  const Crew& crew = job.crew;
  const std::size_t low = job.low(job.bytes), high = job.high(job.bytes);
  bool good = true;
  scratch.resize(kBlock);
  crew.meet();
  for (std::size_t at = low; at < high && good; at += kBlock) {
    const std::size_t bytes = std::min(kBlock, high - at);
    for (int other = 0; other < crew.ranks && good; ++other) {
      if (other == crew.rank) continue;
      good = pull(job.owners[other], scratch.data(), at, bytes);
      add(job.in + at, scratch.data(), bytes);
    }
  }
  crew.meet();
  for (int other = 0; other < crew.ranks && good; ++other) {
    if (other == crew.rank) continue;
    Job theirs = job;
    theirs.crew.rank = other;
    const std::size_t from = theirs.low(job.bytes), to = theirs.high(job.bytes);
    good = pull(job.owners[other], job.in + from, from, to - from);
  }
  crew.meet();
  return good;
}

enum Collective { kAllReduce, kAllGather, kBroadcast, kAllToAll };

// What a process gives to another: where it lies in the giver's input and in the taker's output.
struct Part {
  std::size_t from, to, bytes;
};

Part part(const Job& job, int collective, int giver, int taker) {
  const std::size_t share = job.bytes / static_cast<std::size_t>(job.crew.ranks);
  const auto place = static_cast<std::size_t>(giver);
  if (collective == kAllGather) return {0, place * job.bytes, job.bytes};
  if (collective == kAllToAll)
    return {static_cast<std::size_t>(taker) * share, place * share, share};
  return {0, 0, giver == 0 && taker != 0 ? job.bytes : 0};
}

// Copies past the caches where that is asked for and known.
void copy_out(std::byte* to, const std::byte* from, std::size_t bytes, bool stream) {
#if defined(__AVX__)
  constexpr std::size_t kVector = sizeof(__m256i);
  std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kVector;
  if (stream && head <= bytes) {
    std::memcpy(to, from, head);
    for (; head + kVector <= bytes; head += kVector)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + head),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + head)));
    _mm_sfence();
    to += head, from += head, bytes -= head;
  }
#endif
  std::memcpy(to, from, bytes);
}

void copy_own(const Job& job, int collective, bool stream) {
  const Part own = part(job, collective, job.crew.rank, job.crew.rank);
  copy_out(job.out + own.to, job.in + own.from, own.bytes, stream);
}

// Between two processes: one writes half of its ring while the other reads the other half.
void copy_by_rings(const Job& job, int collective, bool stream) {
  const Crew& crew = job.crew;
  const int other = 1 - crew.rank;
  const Part given = part(job, collective, crew.rank, other);
  const Part taken = part(job, collective, other, crew.rank);
  const std::size_t half = kRing / 2, most = std::max(given.bytes, taken.bytes);
  const auto chunk = [&](const Part& whole, std::size_t start) {
    return start < whole.bytes ? std::min(half, whole.bytes - start) : 0;
  };
  for (std::size_t start = 0; start < most + half; start += half) {
    const std::size_t side = start / half % 2 * half;
    std::memcpy(job.ring(crew.rank) + side, job.in + given.from + start, chunk(given, start));
    if (start != 0) {
      const std::size_t before = start - half;
      copy_out(job.out + taken.to + before, job.ring(other) + (half - side), chunk(taken, before),
               stream);
    }
    crew.meet();
  }
  copy_own(job, collective, stream);
  crew.meet();
}

bool copy_by_pulls(const Job& job, int collective) {
  const Crew& crew = job.crew;
  bool good = true;
  crew.meet();
  for (int turn = 1; turn < crew.ranks && good; ++turn) {
    const int giver = (crew.rank + turn) % crew.ranks;
    const Part taken = part(job, collective, giver, crew.rank);
    good = pull(job.owners[giver], job.out + taken.to, taken.from, taken.bytes);
  }
  copy_own(job, collective, job.bytes >= kPast);
  crew.meet();
  return good;
}

}  // namespace

// Bytes that arrivals, owners and rings of `ranks` processes take in the region; zeros at first.
extern "C" std::size_t probe_private_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * (sizeof(probe::Arrival) + sizeof(Owner) + kRing + kLine);
}

// Carry out one collective; returns the seconds between all having come and all being done, or -1
// where it cannot be done so.
//
// collective: as `Collective` numbers them. bytes: of the input, on every process the same.
// way: 0 through the rings, 1 by the kernel, 2 through the rings and out past the caches. roomy:
// whether each process has its own core.
extern "C" double probe_private(std::byte* region, int rank, int ranks, int process, std::byte* in,
                                std::byte* out, std::size_t bytes, int collective, int way,
                                int roomy) {
  static std::vector<std::byte> scratch;
  auto* arrivals = reinterpret_cast<probe::Arrival*>(region);
  auto* owners = reinterpret_cast<Owner*>(arrivals + ranks);
  const Crew crew{arrivals, rank, ranks, roomy != 0};
  const Job job{crew, owners, reinterpret_cast<std::byte*>(owners + ranks), in, out, bytes};
  owners[rank] = {static_cast<std::uint64_t>(process), reinterpret_cast<std::uint64_t>(in)};
  if (way != 1 && collective != kAllReduce && ranks != 2) return -1;
  bool good = true;
  const double seconds = crew.time([&] {
    if (collective == kAllReduce && way == 1) {
      good = all_reduce_by_pulls(job, scratch);
    } else if (collective == kAllReduce) {
      all_reduce_by_rings(job);
    } else if (way == 1) {
      good = copy_by_pulls(job, collective);
    } else {
      copy_by_rings(job, collective, way == 2);
    }
  });
  return good ? seconds : -1;
}
