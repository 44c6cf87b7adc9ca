// Calls on private arrays: members copy chunks into their rings, and read the others' chunks from
// there.
//
// One-shot all_reduce: everybody reduces every chunk from all rings. Sliced: everybody reduces its
// slice of each chunk, stores it back into its own ring, and gathers the other slices from there:
// reads 2 chunks instead of one per member. The furthest step that can be done goes first, and
// copying ahead fills the time in which the others are not ready.
#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace allreduce {
namespace {

// Up to this many members, reading every chunk whole costs less than a second synchronisation.
constexpr int kOneShotMembers = 3;

bool sliced(const Share& share, const Call& call) {
  return call.collective == Collective::all_reduce && share.members > kOneShotMembers;
}

// Elements of the array (of one member's share, for reduce_scatter) in a whole chunk.
std::uint64_t chunk_elements(const Share& share, const Call& call) {
  std::uint64_t bytes = kChunk;
  if (call.collective == Collective::reduce_scatter) {
    bytes /= static_cast<std::uint64_t>(share.members);
    if (bytes > kLine) bytes = bytes / kLine * kLine;
  }
  return bytes / size_of(call.type);
}

struct Piece {
  std::uint64_t low, count;  // elements
};

Piece piece(const Share& share, const Call& call, std::uint64_t chunk) {
  const std::uint64_t size = chunk_elements(share, call);
  const std::uint64_t low = chunk * size;
  return {low, std::min(size, call.count - low)};
}

void stage(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  std::byte* ring = share.control().chunk(share.me, work.base + chunk);
  if (call.collective == Collective::broadcast && share.me != call.root) return;
  const std::byte* in = work.in + part.low * unit;
  if (sliced(share, call)) {  // nobody else reads this member's own slice
    const Slice mine = slice_of(part.count, call.type, share.members, share.me);
    share.stager.copy(ring, in, mine.low * unit);
    share.stager.copy(ring + mine.high * unit, in + mine.high * unit,
                      (part.count - mine.high) * unit);
    return;
  }
  if (call.collective != Collective::reduce_scatter) {
    share.stager.copy(ring, in, part.count * unit);
    return;
  }
  const std::uint64_t size = chunk_elements(share, call);
  for (std::uint64_t member = 0; member < static_cast<std::uint64_t>(share.members); ++member)
    if (static_cast<int>(member) != share.me)
      share.stager.copy(ring + member * size * unit,
                        work.in + (member * call.count + part.low) * unit, part.count * unit);
}

// Reduces from `share.in` into `out`, and into `also` if that is not null.
void reduce_into(Share& share, const Work& work, void* out, void* also, std::uint64_t count) {
  void* outs[] = {out, also};
  kernels().reduce[static_cast<int>(work.call.op)][static_cast<int>(work.call.type)](
      share.in.data(), share.members, outs, also == nullptr ? 1 : 2, count, false);
}

// Points `share.in` at an offset in every member's chunk; this member's own input lies at `own`.
void point_at(Share& share, const Work& work, std::uint64_t chunk, std::size_t offset,
              const std::byte* own) {
  for (int member = 0; member < share.members; ++member)
    share.in[static_cast<std::size_t>(member)] =
        member == share.me ? own : share.control().chunk(member, work.base + chunk) + offset;
}

void reduce(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  const std::byte* own = work.in + part.low * unit;
  std::byte* out = work.out + part.low * unit;
  if (sliced(share, call)) {
    const Slice mine = slice_of(part.count, call.type, share.members, share.me);
    std::byte* ring = share.control().chunk(share.me, work.base + chunk) + mine.low * unit;
    const std::uint64_t count = mine.high - mine.low;
    out += mine.low * unit;
    const bool streams = share.stager.streams();
    point_at(share, work, chunk, mine.low * unit, own + mine.low * unit);
    reduce_into(share, work, out, streams ? nullptr : ring, count);
    if (streams) share.stager.copy(ring, out, count * unit);
  } else if (call.collective == Collective::all_reduce) {
    point_at(share, work, chunk, 0, own);
    reduce_into(share, work, out, nullptr, part.count);
  } else {
    const auto me = static_cast<std::uint64_t>(share.me);
    point_at(share, work, chunk, me * chunk_elements(share, call) * unit,
             own + me * call.count * unit);
    reduce_into(share, work, out, nullptr, part.count);
  }
}

void copy_if_apart(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from) std::memcpy(to, from, bytes);
}

// Copies a chunk from the others' rings: the reduced slices, or what they contribute.
void gather(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  const std::byte* own = work.in + part.low * unit;
  std::byte* out = work.out + part.low * unit;
  const auto ring = [&](int member) { return share.control().chunk(member, work.base + chunk); };
  if (call.collective == Collective::broadcast)
    return copy_if_apart(out, share.me == call.root ? own : ring(call.root), part.count * unit);
  for (int member = 0; member < share.members; ++member) {
    if (call.collective == Collective::all_reduce) {
      const Slice slice = slice_of(part.count, call.type, share.members, member);
      if (member != share.me)
        std::memcpy(out + slice.low * unit, ring(member) + slice.low * unit,
                    (slice.high - slice.low) * unit);
    } else {
      copy_if_apart(out + static_cast<std::uint64_t>(member) * call.count * unit,
                    member == share.me ? own : ring(member), part.count * unit);
    }
  }
}

// Whether the chunk that `gather` (or a one-shot reduction) reads next is there.
bool sources_ready(const Share& share, const Work& work, std::uint64_t chunk) {
  const std::uint64_t reached = work.base + chunk + 1;
  if (work.call.collective == Collective::broadcast)
    return share.control().state(work.call.root).staged.value.load(std::memory_order_seq_cst) >=
           reached;
  return share.all_reached(&MemberState::staged, reached);
}

bool ring_has_room(const Share& share, const Work& work) {
  const std::uint64_t position = work.base + work.staged;
  return position < kRing || share.all_reached(&MemberState::consumed, position - kRing + 1);
}

void consume(Share& share, Work& work) {
  ++work.consumed;
  share.group.publish(share.own().consumed.value, work.base + work.consumed);
}

// Does the furthest step that is possible.
Progress advance(Share& share, Work& work, std::uint64_t chunks) {
  const bool reduces = work.call.collective == Collective::all_reduce ||
                       work.call.collective == Collective::reduce_scatter;
  const bool two_steps = sliced(share, work.call);
  if (two_steps && work.consumed < work.reduced &&
      share.all_reached(&MemberState::reduced, work.base + work.consumed + 1)) {
    gather(share, work, work.consumed);
    consume(share, work);
  } else if (work.reduced < work.staged && agreed(share, work) &&
             sources_ready(share, work, work.reduced)) {
    if (reduces)
      reduce(share, work, work.reduced);
    else
      gather(share, work, work.reduced);
    ++work.reduced;
    if (two_steps)
      share.group.publish(share.own().reduced.value, work.base + work.reduced);
    else
      consume(share, work);
  } else if (work.staged < chunks && ring_has_room(share, work)) {
    stage(share, work, work.staged);
    ++work.staged;
    share.group.publish(share.own().staged.value, work.base + work.staged);
  } else {
    return Progress::blocked;
  }
  return Progress::moved;
}

}  // namespace

Progress step_staged(Share& share, Work& work, std::uint64_t& position) {
  if (!work.begun) {
    work.begun = true;
    work.base = position;
  }
  const std::uint64_t size = chunk_elements(share, work.call);
  const std::uint64_t chunks = (work.call.count + size - 1) / size;
  if (work.consumed < chunks) {
    if (!work.timed && agreed(share, work)) {
      work.timed = true;
      share.stager.begin(work.call.count * size_of(work.call.type));
    }
    return advance(share, work, chunks);
  }
  share.stager.end();
  position = work.base + chunks;
  return Progress::finished;
}

}  // namespace allreduce
