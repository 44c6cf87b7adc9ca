// Which path a call takes through shared memory, and in what chunks: pure, for the engine and for
// plans alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/segments.h"
#include "shm/progress/collectives.h"

namespace allreduce {

// Bytes that one step updates where the choices have no way in symmetric memory.
inline constexpr std::uint64_t kUpdateStep = 256 << 10;

// Bytes of the largest input of any member.
inline std::uint64_t largest_input(const CallSpec& spec, int members) {
  std::uint64_t count = 0;
  for (int member = 0; member < members; ++member)
    count = std::max(count, input_elements(spec, members, member));
  return count * size_of(spec.call.type);
}

// Whether a call on symmetric memory has its own path. In the other collectives the root alone
// decides which arrays it passes, and the offsets of unequal shares of all_to_all are unknown to
// others. Empty arrays have no address, so all members take the other path if a share is empty.
inline bool reads_in_place(const CallSpec& spec) {
  const Collective collective = spec.call.collective;
  const auto& offsets = spec.details.offsets;
  if (std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end()) return false;
  if (collective == Collective::all_to_all) return spec.details.receives.empty();
  return collective != Collective::reduce && collective != Collective::scatter;
}

// Small contributions take the same path in any memory; for larger ones, either all members pass
// symmetric memory or none. All members choose alike: the choice depends only on values that agree.
// `in_symmetric_memory` is called only if it decides.
template <class Ask>
void choose_path(Work& work, const Choices& choices, int members, const Ask& in_symmetric_memory) {
  const Collective collective = work.call.collective;
  // The count of an allocation is its size: neither it nor a barrier moves data.
  if (collective == Collective::allocate || collective == Collective::barrier) return;
  const std::uint64_t bytes =
      work.details.receives.empty() ? largest_input(work, members) : UINT64_MAX;
  const Band& band = choices.band(collective, bytes);
  if (work.update) {  // there is no other way for it
    in_symmetric_memory();
    work.call.path = Path::direct;
    work.way = band.direct;
    if (work.way.chunk == 0) work.way.chunk = kUpdateStep;
    return;
  }
  if (bytes <= choices.eager_bytes(collective)) return;
  work.call.path = band.staged.pairwise ? Path::pairwise : Path::staged;
  work.way = work.rings = band.staged;
  if (band.direct.chunk != 0 && reads_in_place(work) && in_symmetric_memory()) {
    work.call.path = Path::direct;
    work.way = band.direct;
  } else if (band.cross_process.chunk != 0 && work.details.receives.empty()) {
    work.call.path = Path::cross_process;
    work.way = band.cross_process;
  }
}

// Whether a message travels with its letter, if its receiver's box has room.
inline bool fits_letter(const Call& call) { return call.count * size_of(call.type) <= kEager; }

// How a member's side of a message goes.
inline Path message_path(const Call& call, bool symmetric) {
  if (fits_letter(call)) return Path::eager;
  return symmetric && call.collective == Collective::send ? Path::direct : Path::staged;
}

// Bytes that a member's payload holds, on the eager path.
inline std::uint64_t payload_bytes(const CallSpec& spec, int members, int member) {
  if (from_root(spec.call.collective) && member != spec.call.root) return 0;
  return input_elements(spec, members, member) * size_of(spec.call.type);
}

// Whether chunks are reduced in the rings themselves.
inline bool in_rings(const Call& call) {
  return call.collective == Collective::all_reduce || call.collective == Collective::reduce;
}

// Elements of a segment in a whole chunk, on the staged path.
inline std::uint64_t chunk_elements(const Work& work, int members) {
  std::uint64_t bytes = work.way.chunk;
  if (personal(work.call.collective))
    bytes = bytes / static_cast<std::uint64_t>(members) / kLine * kLine;
  return bytes / size_of(work.call.type);
}

// Whether readers on the staged path overwrite the places they have read: never if several members
// read one place.
inline bool takes(const Work& work, int members) {
  const Collective collective = work.call.collective;
  const bool several =
      members > 2 && (collective == Collective::all_gather || collective == Collective::broadcast);
  return !several && !work.way.streaming;
}

}  // namespace allreduce
