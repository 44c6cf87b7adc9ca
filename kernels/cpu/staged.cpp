// Calls on private arrays: members copy chunks into their rings, and read the others' chunks from
// there.
//
// What a member reads in another's ring it also overwrites, wherever it is the only reader. The
// cache line then moves to and fro between the two instead of being shared, and the owner's next
// store into it costs as much as a read: 2 processes, Zen 4, all_reduce of 1 MiB through 32 KiB
// chunks 68 us instead of 142; 16 MiB, with the cores further apart, 1.6 ms instead of 6.8 (2.1
// with streaming stores, which take the line from both caches).
//
// So all_reduce works in place in the rings: everybody copies in what the others are to reduce,
// reduces its own slice of each chunk from all rings, stores the result into all of them, and
// copies the rest out of its own ring. The furthest step that can be done goes first, and copying
// ahead fills the time in which the others are not ready.
#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace allreduce {
namespace {

// Places that a chunk takes in the ring. In all_reduce the owner has its results out of the ring
// and the next chunk in at once, so one chunk that fills the ring is best; the others overlap two.
std::uint64_t places(const Call& call) {
  return call.collective == Collective::all_reduce ? kRing : 1;
}

// Where in the ring a call's chunk begins, and so the count of places before it.
std::uint64_t place_of(const Work& work, std::uint64_t chunk) {
  return work.base + chunk * places(work.call);
}

// Elements of the array (of one member's share, for reduce_scatter) in a whole chunk.
std::uint64_t chunk_elements(const Share& share, const Call& call) {
  std::uint64_t bytes = kPlace * places(call);
  if (call.collective == Collective::reduce_scatter) {
    bytes /= static_cast<std::uint64_t>(share.members);
    if (bytes > kLine) bytes = bytes / kLine * kLine;
  }
  return bytes / size_of(call.type);
}

// A member's place for a chunk.
std::byte* ring(const Share& share, const Work& work, int member, std::uint64_t chunk) {
  return share.control().place(member, place_of(work, chunk));
}

struct Piece {
  std::uint64_t low, count;  // elements
};

Piece piece(const Share& share, const Call& call, std::uint64_t chunk) {
  const std::uint64_t size = chunk_elements(share, call);
  const std::uint64_t low = chunk * size;
  return {low, std::min(size, call.count - low)};
}

// Whether several members read what one stages: streaming stores are the way to write that.
bool shared_lines(const Share& share, const Call& call) {
  return share.members > 2 &&
         (call.collective == Collective::all_gather || call.collective == Collective::broadcast);
}

// Copies a chunk but for this member's slice of it.
void copy_others(const Share& share, const Call& call, std::byte* to, const std::byte* from,
                 std::uint64_t count) {
  const std::size_t unit = size_of(call.type);
  const Slice mine = slice_of(count, call.type, share.members, share.me);
  const std::size_t low = mine.low * unit, high = mine.high * unit;
  kernels().copy(to, from, low);
  kernels().copy(to + high, from + high, count * unit - high);
}

// Copies the others' slices out of the own ring, and those of the chunk that is due there into it.
// One pass over the ring's lines instead of two: 2 processes, Zen 4, 4 MiB 275 us instead of 360.
void swap_others(const Share& share, const Call& call, std::byte* out, std::byte* ring,
                 const std::byte* next, std::uint64_t count) {
  const std::size_t unit = size_of(call.type);
  const Slice mine = slice_of(count, call.type, share.members, share.me);
  const std::size_t low = mine.low * unit, high = mine.high * unit;
  kernels().swap(out, ring, next, low);
  kernels().swap(out + high, ring + high, next + high, count * unit - high);
}

void stage(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  std::byte* to = ring(share, work, share.me, chunk);
  if (call.collective == Collective::broadcast && share.me != call.root) return;
  const std::byte* in = work.in + part.low * unit;
  if (call.collective == Collective::all_reduce)  // the own slice is read where it lies
    return copy_others(share, call, to, in, part.count);
  if (call.collective != Collective::reduce_scatter) {
    const auto copy = shared_lines(share, call) ? kernels().stream_copy : kernels().copy;
    copy(to, in, part.count * unit);
    return;
  }
  const std::uint64_t size = chunk_elements(share, call);
  for (std::uint64_t member = 0; member < static_cast<std::uint64_t>(share.members); ++member)
    if (static_cast<int>(member) != share.me)
      kernels().copy(to + member * size * unit, work.in + (member * call.count + part.low) * unit,
                     part.count * unit);
}

// Reduces `count` elements that lie `offset` into every member's chunk; this member's own input
// lies at `own`. The result overwrites the others'; only all_reduce will read it there.
void reduce_from_rings(Share& share, const Work& work, std::uint64_t chunk, std::size_t offset,
                       const std::byte* own, std::byte* out, std::uint64_t count) {
  const Call& call = work.call;
  for (int member = 0; member < share.members; ++member) {
    const auto m = static_cast<std::size_t>(member);
    std::byte* theirs = ring(share, work, member, chunk) + offset;
    share.in[m] = member == share.me ? own : theirs;
    share.out[m] = member == share.me ? out : theirs;
  }
  kernels().reduce[static_cast<int>(call.op)][static_cast<int>(call.type)](
      share.in.data(), share.members, share.out.data(), share.members, count);
}

void reduce(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  const std::byte* own = work.in + part.low * unit;
  std::byte* out = work.out + part.low * unit;
  if (call.collective == Collective::all_reduce) {
    const Slice mine = slice_of(part.count, call.type, share.members, share.me);
    const std::size_t offset = mine.low * unit;
    reduce_from_rings(share, work, chunk, offset, own + offset, out + offset, mine.high - mine.low);
  } else {
    const auto me = static_cast<std::uint64_t>(share.me);
    reduce_from_rings(share, work, chunk, me * chunk_elements(share, call) * unit,
                      own + me * call.count * unit, out, part.count);
  }
}

// Copies a chunk out of the rings: the reduced slices from the own one, or what others contribute.
void gather(Share& share, const Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const Piece part = piece(share, call, chunk);
  const std::byte* own = work.in + part.low * unit;
  std::byte* out = work.out + part.low * unit;
  if (call.collective == Collective::all_reduce)
    return copy_others(share, call, out, ring(share, work, share.me, chunk), part.count);
  const bool broadcast = call.collective == Collective::broadcast;
  for (int member = 0; member < share.members; ++member) {
    if (broadcast && member != call.root) continue;
    std::byte* to = broadcast ? out : out + static_cast<std::uint64_t>(member) * call.count * unit;
    if (member == share.me) {
      if (to != own) kernels().copy(to, own, part.count * unit);
    } else if (shared_lines(share, call)) {
      kernels().copy(to, ring(share, work, member, chunk), part.count * unit);
    } else {
      kernels().swap(to, ring(share, work, member, chunk), nullptr, part.count * unit);
    }
  }
}

// Gathers a chunk of all_reduce, and stages the one that is due in its place if that is whole.
void renew(Share& share, Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::uint64_t size = chunk_elements(share, call);
  const std::uint64_t due = chunk + kRing / places(call);
  if (work.staged != due || (due + 1) * size > call.count) return gather(share, work, chunk);
  const std::size_t bytes = size * size_of(call.type);
  swap_others(share, call, work.out + chunk * bytes, ring(share, work, share.me, chunk),
              work.in + due * bytes, size);
  ++work.staged;
  share.group.publish(share.own().staged.value, place_of(work, work.staged));
}

// Whether what the first step after staging reads is there.
bool sources_ready(const Share& share, const Work& work, std::uint64_t chunk) {
  const std::uint64_t reached = place_of(work, chunk + 1);
  if (work.call.collective == Collective::broadcast)
    return share.control().state(work.call.root).staged.value.load(std::memory_order_seq_cst) >=
           reached;
  return share.all_reached(&MemberState::staged, reached);
}

bool ring_has_room(const Share& share, const Work& work) {
  const std::uint64_t end = place_of(work, work.staged + 1);
  return end <= kRing || share.all_reached(&MemberState::consumed, end - kRing);
}

void consume(Share& share, Work& work) {
  ++work.consumed;
  share.group.publish(share.own().consumed.value, place_of(work, work.consumed));
}

// Does the furthest step that is possible.
Progress advance(Share& share, Work& work, std::uint64_t chunks) {
  const bool reduces = work.call.collective == Collective::all_reduce ||
                       work.call.collective == Collective::reduce_scatter;
  const bool two_steps = work.call.collective == Collective::all_reduce;
  if (two_steps && work.consumed < work.reduced &&
      share.all_reached(&MemberState::reduced, place_of(work, work.consumed + 1))) {
    renew(share, work, work.consumed);
    consume(share, work);
  } else if (work.reduced < work.staged && agreed(share, work) &&
             sources_ready(share, work, work.reduced)) {
    if (reduces)
      reduce(share, work, work.reduced);
    else
      gather(share, work, work.reduced);
    ++work.reduced;
    if (two_steps)
      share.group.publish(share.own().reduced.value, place_of(work, work.reduced));
    else
      consume(share, work);
  } else if (work.staged < chunks && ring_has_room(share, work)) {
    stage(share, work, work.staged);
    ++work.staged;
    share.group.publish(share.own().staged.value, place_of(work, work.staged));
  } else {
    return Progress::blocked;
  }
  return Progress::moved;
}

}  // namespace

Progress step_staged(Share& share, Work& work, std::uint64_t& position) {
  if (!work.begun) {
    work.begun = true;
    const std::uint64_t whole = places(work.call);
    work.base = (position + whole - 1) / whole * whole;
    // Places that it skips are consumed.
    if (work.base != position) share.group.publish(share.own().consumed.value, work.base);
  }
  const std::uint64_t size = chunk_elements(share, work.call);
  const std::uint64_t chunks = (work.call.count + size - 1) / size;
  if (work.consumed < chunks) return advance(share, work, chunks);
  position = place_of(work, chunks);
  return Progress::finished;
}

}  // namespace allreduce
