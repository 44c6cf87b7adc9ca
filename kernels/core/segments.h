// Which elements a call moves between two members, and where they lie in the arrays of both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/call.h"

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
inline Segment share_of(const CallSpec& spec, int member) {
  return share_at(spec.details.offsets, spec.call.count, member);
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

// Whether it reduces by an operator that its type has no kernel for.
inline bool lacks_kernel(const Call& call) {
  const auto op = static_cast<int>(call.op), type = static_cast<int>(call.type);
  return reduces(call.collective) &&
         (op >= kOps || type >= kTypes || kernels().reduce[op][type] == nullptr);
}

// Elements of a member's input, where it has one.
inline std::uint64_t input_elements(const CallSpec& spec, int members, int member) {
  const Call& call = spec.call;
  const auto& offsets = spec.details.offsets;
  if (personal(call.collective))
    return offsets.empty() ? call.count * static_cast<std::uint64_t>(members) : offsets.back();
  switch (call.collective) {
    case Collective::all_gather:
    case Collective::gather:
      return share_of(spec, member).count;
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

// The segment that `from` sends to `to`, in the input of `from`. (In an all_to_all of unequal
// shares only `from` itself knows.)
inline Segment given(const CallSpec& spec, int from, int to) {
  const Call& call = spec.call;
  if (from_root(call.collective) && from != call.root) return {};
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
      return {0, call.count};
    case Collective::all_gather:
      return {0, share_of(spec, from).count};
    case Collective::gather:
      return {0, to == call.root ? share_of(spec, from).count : 0};
    case Collective::scatter:
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return share_of(spec, to);
    case Collective::barrier:
    case Collective::allocate:
    case Collective::send:
    case Collective::recv:
      return {};
  }
  return {};
}

// The place in member `me`'s output of the segment from `from`.
inline Segment taken(const CallSpec& spec, int me, int from) {
  const Call& call = spec.call;
  switch (call.collective) {
    case Collective::all_gather:
      return share_of(spec, from);
    case Collective::gather:
      return me == call.root ? share_of(spec, from) : Segment{};
    case Collective::all_to_all:
      if (spec.details.receives.empty()) return share_of(spec, from);
      return share_at(spec.details.receives, 0, from);
    default:
      return {0, given(spec, from, me).count};
  }
}

// The part of its input that `from` sends to `to` with a post to each member; for a reduce, to the
// root only.
inline Segment given_in_post(const CallSpec& spec, int from, int to) {
  const bool unread = spec.call.collective == Collective::reduce && to != spec.call.root;
  return unread ? Segment{} : given(spec, from, to);
}

// Elements of a member's output, where it has one.
inline std::uint64_t output_elements(const CallSpec& spec, int members, int me) {
  if (spec.call.collective == Collective::all_reduce ||
      spec.call.collective == Collective::reduce || spec.call.collective == Collective::broadcast)
    return spec.call.count;
  if (personal(spec.call.collective) && spec.call.collective != Collective::all_to_all)
    return share_of(spec, me).count;
  const Segment last = taken(spec, me, members - 1);
  return last.low + last.count;
}

// Elements that the call's longest segment has, as far as member `me` knows.
inline std::uint64_t longest_segment(const CallSpec& spec, int members, int me) {
  std::uint64_t longest = 0;
  for (int member = 0; member < members; ++member)
    longest = std::max({longest, given(spec, me, member).count, taken(spec, me, member).count,
                        given(spec, member, member).count});
  return longest;
}

}  // namespace allreduce
