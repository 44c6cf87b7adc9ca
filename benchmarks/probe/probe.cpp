// The machine's own limit for an all-reduce of float32 in shared memory: no protocol, no checks.
//
// Every process adds its slice of all arrays and stores the sum into all of them, so that each
// input is read once and each output written once. Spinning barriers are the only synchronisation.

#include "probe.h"

namespace {

constexpr std::size_t kLineFloats = 16;

struct alignas(64) Line {
  float values[kLineFloats];
};

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
extern "C" std::size_t probe_header_bytes(int ranks) { return sizeof(probe::Arrival) * ranks; }

// Reduce once; returns the seconds between all having come and all being done. The two barriers
// inside are what any all-reduce needs: inputs have to be there, and outputs to be complete.
//
// region: the arrivals, and from `offset` on one array per rank, `lines` cache lines each.
// roomy: whether each process has a core of its own.
extern "C" double probe_all_reduce(char* region, std::size_t offset, int rank, int ranks,
                                   std::size_t lines, int stream, int roomy) {
  Line* arrays[probe::kMostRanks];
  if (ranks > probe::kMostRanks) return -1;
  for (int member = 0; member < ranks; ++member) {
    arrays[member] = reinterpret_cast<Line*>(region + offset) + member * lines;
  }
  const probe::Crew crew{reinterpret_cast<probe::Arrival*>(region), rank, ranks, roomy != 0};
  return crew.time([&] {
    crew.meet();
    if (stream) {
      reduce_slice<true>(arrays, rank, ranks, lines);
    } else {
      reduce_slice<false>(arrays, rank, ranks, lines);
    }
    crew.meet();
  });
}
