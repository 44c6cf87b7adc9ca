// The machine's own limit for an all-reduce of float32 in shared memory: no protocol, no checks.
//
// Every process adds its slice of all arrays and stores the sum into all of them, so that each
// input is read once and each output written once. Spinning barriers are the only synchronisation.

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr std::size_t kLineFloats = 16;
constexpr int kSpins = 2000;  // before a core is given away, where each process has one

struct alignas(64) Line {
  float values[kLineFloats];
};

struct alignas(64) Arrival {
  std::atomic<std::uint32_t> count;
};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void meet(Arrival* arrivals, int rank, int ranks, int spins) {
  const std::uint32_t mine = arrivals[rank].count.load(std::memory_order_relaxed) + 1;
  arrivals[rank].count.store(mine, std::memory_order_release);  // pairs with the loads below
  for (int other = 0; other < ranks; ++other) {
    int tries = 0;
    // The difference, because counts wrap.
    while (static_cast<std::int32_t>(arrivals[other].count.load(std::memory_order_acquire) - mine) <
           0) {
      if (++tries < spins) {
        relax();
      } else {
        sched_yield();
      }
    }
  }
}

template <bool kStream>
void store(Line& to, const Line& value) {
#if defined(__AVX512F__)
  if constexpr (kStream) {
    _mm512_stream_ps(to.values, _mm512_load_ps(value.values));
    return;
  }
#elif defined(__AVX__)
  if constexpr (kStream) {
    for (int at = 0; at < 16; at += 8) {
      _mm256_stream_ps(to.values + at, _mm256_load_ps(value.values + at));
    }
    return;
  }
#endif
  to = value;
}

// `kRanks` is 0 where the number of arrays is known at run time only.
template <bool kStream, int kRanks>
void reduce(Line* const* arrays, int ranks, std::size_t from, std::size_t to) {
  const int members = kRanks ? kRanks : ranks;
  for (std::size_t line = from; line < to; ++line) {
    Line sum = arrays[0][line];
    for (int member = 1; member < members; ++member) {
      for (std::size_t at = 0; at < kLineFloats; ++at) {
        sum.values[at] += arrays[member][line].values[at];
      }
    }
    for (int member = 0; member < members; ++member) {
      store<kStream>(arrays[member][line], sum);
    }
  }
#if defined(__AVX__)
  if constexpr (kStream) _mm_sfence();
#endif
}

template <bool kStream>
void reduce_slice(Line* const* arrays, int rank, int ranks, std::size_t lines) {
  const std::size_t from = lines * rank / ranks;
  const std::size_t to = lines * (rank + 1) / ranks;
  if (ranks == 2) {
    reduce<kStream, 2>(arrays, ranks, from, to);
  } else {
    reduce<kStream, 0>(arrays, ranks, from, to);
  }
}

}  // namespace

// Bytes that the arrivals of `ranks` processes take at the start of the region; zeros at first.
extern "C" std::size_t probe_header_bytes(int ranks) { return sizeof(Arrival) * ranks; }

// Reduce once; returns the seconds between all having come and all being done. The two barriers
// inside are what any all-reduce needs: inputs have to be there, and outputs to be complete.
//
// region: the arrivals, and from `offset` on one array per rank, `lines` cache lines each.
// roomy: whether each process has a core of its own.
extern "C" double probe_all_reduce(char* region, std::size_t offset, int rank, int ranks,
                                   std::size_t lines, int stream, int roomy) {
  constexpr int kMostRanks = 1024;
  Line* arrays[kMostRanks];
  if (ranks > kMostRanks) return -1;
  auto* arrivals = reinterpret_cast<Arrival*>(region);
  for (int member = 0; member < ranks; ++member) {
    arrays[member] = reinterpret_cast<Line*>(region + offset) + member * lines;
  }
  const int spins = roomy ? kSpins : 0;
  meet(arrivals, rank, ranks, spins);
  const auto start = std::chrono::steady_clock::now();
  meet(arrivals, rank, ranks, spins);
  if (stream) {
    reduce_slice<true>(arrays, rank, ranks, lines);
  } else {
    reduce_slice<false>(arrays, rank, ranks, lines);
  }
  meet(arrivals, rank, ranks, spins);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return taken.count();
}
