// The machine's own limit for collectives on private arrays: no protocol, no checks.
//
// Private data has to be moved once more than shared data. There are two ways: through rings
// in shared memory, which one process writes and another reads; or by process_vm_readv, with which
// the kernel copies straight out of the other process. Both are here, and what two processes can do
// in rings besides is in probe_exchange.cpp; whoever times them takes the fastest. Spinning
// barriers are the only synchronisation.

#include "probe_private.h"

#include <sys/uio.h>

#include <cstring>
#include <vector>

namespace {

using namespace probe;

constexpr std::size_t kBlock = 128 << 10;  // bytes that are pulled and added while in the cache
constexpr std::size_t kPull = 1 << 20;     // bytes that one system call copies
constexpr std::size_t kPast = 4 << 20;     // bytes from which own parts go past the caches

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
void renew(std::byte* out, std::byte* ring, const std::byte* next, std::size_t bytes) {
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

// In place, through the rings: each process copies in the data that others add, adds its own slice
// of a chunk into all rings, and copies the rest out.
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
      renew(here, own, here + kRing, low);
      renew(here + high, own + high, here + kRing + high, whole - high);
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

void probe::copy_own(const Job& job, int collective, bool stream) {
  const Part own = part(job, collective, job.crew.rank, job.crew.rank);
  copy_out(job.out + own.to, job.in + own.from, own.bytes, stream);
}

// Bytes that arrivals, owners and rings of `ranks` processes take in the region; zeros at first.
extern "C" std::size_t probe_private_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * (sizeof(Arrival) + sizeof(Owner) + kRing + kLine);
}

// Carry out one collective; returns the seconds between all having come and all being done, or -1
// where it cannot be done so.
//
// collective: as `Collective` numbers them. bytes: of the input, on every process the same.
// way: 0 all_reduce through the rings, a ring full at a time; 1 by the kernel; 2 between two
// processes through the rings, `chunk` bytes at a time, 3 also out past the caches. A region is for
// one way and one chunk. roomy: whether each process has its own core.
extern "C" double probe_private(std::byte* region, int rank, int ranks, int process, std::byte* in,
                                std::byte* out, std::size_t bytes, int collective, int way,
                                std::size_t chunk, int roomy) {
  static std::vector<std::byte> scratch;
  auto* arrivals = reinterpret_cast<Arrival*>(region);
  auto* owners = reinterpret_cast<Owner*>(arrivals + ranks);
  const Crew crew{arrivals, rank, ranks, roomy != 0};
  const Job job{crew, owners, reinterpret_cast<std::byte*>(owners + ranks), in, out, bytes};
  owners[rank].process = static_cast<std::uint64_t>(process);
  owners[rank].address = reinterpret_cast<std::uint64_t>(in);
  const bool reduces = collective == kAllReduce, exchanges = way > 1;
  if (exchanges && (ranks != 2 || (reduces && way == 3))) return -1;
  if (way == 0 && !reduces) return -1;
  bool good = true;
  const double seconds = crew.time([&] {
    if (exchanges)
      exchange(job, collective, chunk, way == 3);
    else if (way == 0)
      all_reduce_by_rings(job);
    else
      good = reduces ? all_reduce_by_pulls(job, scratch) : copy_by_pulls(job, collective);
  });
  return good ? seconds : -1;
}
