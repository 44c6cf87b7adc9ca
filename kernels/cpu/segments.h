// Which elements a call moves between two members, and where they lie in the arrays of both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives.h"

namespace allreduce {

// Elements of an array that belong together.
struct Segment {
  std::uint64_t low = 0, count = 0;
};

// The part of a segment that travels with a chunk of `size` elements.
inline Segment part_of(const Segment& segment, std::uint64_t chunk, std::uint64_t size) {
  const std::uint64_t done = std::min(chunk * size, segment.count);
  return {segment.low + done, std::min(size, segment.count - done)};
}

// Where shares of these lengths begin, and last where they end.
inline std::vector<std::uint64_t> offsets_of(
    const std::optional<std::vector<std::uint64_t>>& counts) {
  std::vector<std::uint64_t> offsets;
  if (!counts) return offsets;
  offsets.push_back(0);
  for (std::uint64_t count : *counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

inline Segment share_at(const std::vector<std::uint64_t>& offsets, std::uint64_t count,
                        int member) {
  const auto m = static_cast<std::size_t>(member);
  if (offsets.empty()) return {m * count, count};
  return {offsets[m], offsets[m + 1] - offsets[m]};
}

// A member's share of the array that is joined or cut.
inline Segment share_of(const Work& work, int member) {
  return share_at(work.details.offsets, work.call.count, member);
}

// Whether the input is cut into a part per member.
inline bool personal(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::scatter ||
         collective == Collective::all_to_all;
}

inline bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::reduce_scatter;
}

// Elements of a member's input, where it has one.
inline std::uint64_t input_elements(const Work& work, int members, int member) {
  const Call& call = work.call;
  const auto& offsets = work.details.offsets;
  if (personal(call.collective))
    return offsets.empty() ? call.count * static_cast<std::uint64_t>(members) : offsets.back();
  switch (call.collective) {
    case Collective::all_gather:
    case Collective::gather:
      return share_of(work, member).count;
    case Collective::barrier:
    case Collective::allocate:
      return 0;
    default:
      return call.count;
  }
}

// Whether only the root has something to give.
inline bool from_root(Collective collective) {
  return collective == Collective::broadcast || collective == Collective::scatter;
}

// What `from` gives to `to`, in the input of `from`. (In an all_to_all of unequal shares only
// `from` itself knows.)
inline Segment given(const Work& work, int from, int to) {
  const Call& call = work.call;
  if (from_root(call.collective) && from != call.root) return {};
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
      return {0, call.count};
    case Collective::all_gather:
      return {0, share_of(work, from).count};
    case Collective::gather:
      return {0, to == call.root ? share_of(work, from).count : 0};
    case Collective::scatter:
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return share_of(work, to);
    case Collective::barrier:
    case Collective::allocate:
    case Collective::send:
    case Collective::recv:
      return {};
  }
  return {};
}

// Where member `me` puts what `from` gives to it, in its output.
inline Segment taken(const Work& work, int me, int from) {
  const Call& call = work.call;
  switch (call.collective) {
    case Collective::all_gather:
      return share_of(work, from);
    case Collective::gather:
      return me == call.root ? share_of(work, from) : Segment{};
    case Collective::all_to_all:
      if (work.details.receives.empty()) return share_of(work, from);
      return share_at(work.details.receives, 0, from);
    default:
      return {0, given(work, from, me).count};
  }
}

// Elements of a member's output, where it has one.
inline std::uint64_t output_elements(const Work& work, int members, int me) {
  if (work.call.collective == Collective::all_reduce ||
      work.call.collective == Collective::reduce || work.call.collective == Collective::broadcast)
    return work.call.count;
  if (personal(work.call.collective) && work.call.collective != Collective::all_to_all)
    return share_of(work, me).count;
  const Segment last = taken(work, me, members - 1);
  return last.low + last.count;
}

// Elements that the call's longest segment has, as far as member `me` knows.
inline std::uint64_t longest_segment(const Work& work, int members, int me) {
  std::uint64_t longest = 0;
  for (int member = 0; member < members; ++member)
    longest = std::max({longest, given(work, me, member).count, taken(work, me, member).count,
                        given(work, member, member).count});
  return longest;
}

}  // namespace allreduce
