// Two processes that exchange their data, with one synchronisation per chunk.
//
// What a process has read in a ring it fills with its own next chunk: the place changes hands, and
// with the next lap through the ring it changes back. So each cache line crosses once for each
// chunk that it carries, and is never in both caches; a prefetch for writing fetches it so. A
// process gives in whichever ring it has emptied, which is free without anybody saying so.

#include <cstring>

#include "probe_private.h"

namespace probe {
namespace {

constexpr std::size_t kAhead = 8 * kLine;  // how far lines are fetched ahead
constexpr std::uint64_t kLap = 4;          // chunks of a ring
constexpr std::size_t kFloats = kLine / sizeof(float);

// A process's view of the rings.
struct Rings {
  const Job& job;
  std::size_t chunk;

  // Where a process gives its chunk of this number.
  std::byte* place(int giver, std::uint64_t number) const {
    const int ring = static_cast<int>((static_cast<std::uint64_t>(giver) + number / kLap) % 2);
    return job.rings + static_cast<std::size_t>(ring) * (kRing + kLine) +
           job.owners[0].address % kLine + number % kLap * chunk;
  }
};

void fetch([[maybe_unused]] const void* line) {
#if defined(__x86_64__)
  __builtin_prefetch(line, 1, 3);
#endif
}

// Stores a line's values, past the caches where that is asked for and known.
template <bool kStream>
void put(float* to, const float* values) {
#if defined(__AVX__)
  if constexpr (kStream) {
    for (std::size_t at = 0; at < kFloats; at += 8)
      _mm256_stream_ps(to + at, _mm256_loadu_ps(values + at));
    return;
  }
#endif
  std::memcpy(to, values, kLine);
}

// Takes whole lines out of a place, adding `own` where there is some, and puts `next` in where
// there is some. Returns the bytes that it has done.
template <bool kStream, bool kAdd, bool kNext>
std::size_t take_lines(std::byte* out, std::byte* place, const std::byte* own,
                       const std::byte* next, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    fetch(place + at + kAhead);
    float values[kFloats], coming[kFloats];
    std::memcpy(values, place + at, kLine);
    if constexpr (kAdd) {
      float more[kFloats];
      std::memcpy(more, own + at, kLine);
      for (std::size_t i = 0; i < kFloats; ++i) values[i] += more[i];
    }
    if constexpr (kNext) {
      std::memcpy(coming, next + at, kLine);
      std::memcpy(place + at, coming, kLine);
    }
    put<kStream>(reinterpret_cast<float*>(out + at), values);
  }
  return at;
}

// The parts before the first whole line of a place, and after the last one.
void take_rest(std::byte* out, std::byte* place, const std::byte* own, const std::byte* next,
               std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(float)) {
    float value, more = 0;
    std::memcpy(&value, place + at, sizeof(float));
    if (own != nullptr) std::memcpy(&more, own + at, sizeof(float));
    if (next != nullptr) std::memcpy(place + at, next + at, sizeof(float));
    value += more;
    std::memcpy(out + at, &value, sizeof(float));
  }
}

// As take_lines(), for any number of bytes; null where there is nothing to add, or to put in.
void take(std::byte* out, std::byte* place, const std::byte* own, const std::byte* next,
          std::size_t bytes, bool stream) {
  const auto at = [](auto* from, std::size_t offset) {
    return from == nullptr ? nullptr : from + offset;
  };
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(place) % kLine);
  take_rest(out, place, own, next, head);
  stream &= reinterpret_cast<std::uintptr_t>(out + head) % 32 == 0;
  const auto act = own != nullptr && next != nullptr ? take_lines<false, true, true>
                   : own != nullptr                  ? take_lines<false, true, false>
                   : next == nullptr && stream       ? take_lines<true, false, false>
                   : next == nullptr                 ? take_lines<false, false, false>
                   : stream                          ? take_lines<true, false, true>
                                                     : take_lines<false, false, true>;
  const std::size_t done =
      head + act(out + head, place + head, at(own, head), at(next, head), bytes - head);
  take_rest(out + done, place + done, at(own, done), at(next, done), bytes - done);
}

}  // namespace

void exchange(const Job& job, int collective, std::size_t chunk, bool stream) {
  const Crew& crew = job.crew;
  const int other = 1 - crew.rank;
  const Part given = part(job, collective, crew.rank, other);
  const Part taken = part(job, collective, other, crew.rank);
  const Rings rings{job, chunk};
  std::atomic<std::uint64_t>& mine = job.owners[crew.rank].given;
  const std::uint64_t base = mine.load(std::memory_order_relaxed);
  const std::uint64_t chunks = (std::max(given.bytes, taken.bytes) + chunk - 1) / chunk;
  const auto size = [&](const Part& whole, std::uint64_t number) {
    return number * chunk < whole.bytes ? std::min(chunk, whole.bytes - number * chunk) : 0;
  };
  const auto stage = [&](std::uint64_t number, std::size_t from) {
    const std::byte* in = job.in + given.from + number * chunk;
    std::memcpy(rings.place(crew.rank, base + number) + from, in + from,
                size(given, number) - from);
    mine.store(base + number + 1, std::memory_order_release);  // pairs with the load in await()
  };
  for (std::uint64_t number = 0; number < std::min(kLap, chunks); ++number) stage(number, 0);
  for (std::uint64_t number = 0; number < chunks; ++number) {
    crew.await(job.owners[other].given, base + number + 1);
    std::byte* place = rings.place(other, base + number);
    std::byte* out = job.out + taken.to + number * chunk;
    const std::byte* own = collective == kAllReduce ? job.in + number * chunk : nullptr;
    const std::size_t bytes = size(taken, number), due = size(given, number + kLap);
    const std::size_t both = std::min(bytes, due);
    const std::byte* next = job.in + given.from + (number + kLap) * chunk;
    if (both != 0) take(out, place, own, next, both, stream);
    if (both < bytes) {
      own = own != nullptr ? own + both : nullptr;
      take(out + both, place + both, own, nullptr, bytes - both, stream);
    }
    if (number + kLap < chunks) stage(number + kLap, both);
  }
#if defined(__AVX__)
  if (stream) _mm_sfence();
#endif
  if (collective != kAllReduce) copy_own(job, collective, stream);
}

}  // namespace probe
