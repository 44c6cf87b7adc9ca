// Calls on private arrays: members copy chunks into their rings and read the others' chunks there.
//
// If a member is the only reader of a chunk in another's ring, it also overwrites it. The cache
// line then moves back and forth between the two instead of being shared, and the owner's next
// store into it costs as much as a read: 2 processes, Zen 4, all_reduce of 1 MiB through 32 KiB
// chunks 68 us instead of 142; 16 MiB, with the cores further apart, 1.6 ms instead of 6.8 (2.1
// with streaming stores, which evict the line from both caches). With streaming stores, chunks are
// not overwritten.
//
// So all_reduce works in place in the rings: a member copies in the others' slices of its input,
// reduces its own slice of each chunk from all rings, stores the result into all of them, and
// copies the other slices out of its own ring. The furthest possible step goes first; copying ahead
// fills the time while the others are not ready.
#include <algorithm>
#include <cstring>

#include "shm/paths.h"
#include "shm/progress/collectives.h"

namespace allreduce {
namespace {

// The number of a ring's places that a chunk takes.
std::uint64_t places(const Work& work) { return work.way.chunk / kPlace; }

// The position at which a call's chunk begins: the count of places before it.
std::uint64_t place_of(const Work& work, std::uint64_t chunk) {
  return work.base + chunk * places(work);
}

std::uint64_t chunks(const Share& share, const Work& work) {
  const std::uint64_t size = chunk_elements(work, share.members);
  return (work.longest + size - 1) / size;
}

// The address, in the ring of `from`, of a chunk for `to`: at the same offset in a cache line as in
// its array, so that no vector of either spans two lines. NumPy's large arrays begin 16 bytes into
// one: 2 processes, Zen 4, all_reduce of 1 MiB 39 us instead of 43, 4 MiB 165 instead of 180.
std::byte* ring(const Share& share, const Work& work, std::uint64_t chunk, int from, int to) {
  std::byte* place = share.control().place(from, place_of(work, chunk)) +
                     input_location(share, work, from).address % kLine;
  if (!personal(work.call.collective)) return place;
  return place + static_cast<std::uint64_t>(to) * chunk_elements(work, share.members) *
                     size_of(work.call.type);
}

// Copies a chunk except this member's slice.
void copy_others(const Share& share, const Work& work, Copy copy, std::byte* to,
                 const std::byte* from, std::uint64_t elements) {
  const std::size_t unit = size_of(work.call.type);
  const Slice mine = slice_of(elements, size_of(work.call.type), share.members, share.me);
  const std::size_t low = mine.low * unit, high = mine.high * unit;
  copy(to, from, low);
  copy(to + high, from + high, elements * unit - high);
}

// Copies the others' slices out of the own ring, and the due chunk's slices into it.
// One pass over the ring's lines instead of two: 2 processes, Zen 4, 4 MiB 275 us instead of 360.
// With stores past the caches it is slower: 4 MiB 395 us instead of 380, 16 MiB 1.54 ms instead of
// 1.41; there one read-and-write pass of each process over its own array takes 0.90 ms of 1.15.
void swap_others(const Share& share, const Work& work, std::byte* out, std::byte* ring,
                 const std::byte* next, std::uint64_t elements) {
  const std::size_t unit = size_of(work.call.type);
  const Slice mine = slice_of(elements, size_of(work.call.type), share.members, share.me);
  const std::size_t low = mine.low * unit, high = mine.high * unit;
  kernels().swap(out, ring, next, low);
  kernels().swap(out + high, ring + high, next + high, elements * unit - high);
}

void stage(Share& share, Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const std::uint64_t size = chunk_elements(work, share.members);
  const Copy copy = work.way.streaming ? kernels().stream_copy : kernels().copy;
  for (int to = 0; to < share.members; ++to) {
    const Segment part = part_of(given(work, share.me, to), chunk, size);
    if (to == share.me || part.count == 0) continue;
    std::byte* place = ring(share, work, chunk, share.me, to);
    const std::byte* in = work.in + part.low * unit;
    if (in_rings(call)) {  // the own slice is read where it lies
      copy_others(share, work, copy, place, in, part.count);
    } else {
      copy(place, in, part.count * unit);
    }
    if (!personal(call.collective)) return;  // the same for all
  }
}

// Reduces this member's part of a chunk from all rings; its own input is read from its array. The
// result overwrites the others' inputs; in all_reduce and reduce it is read there.
void reduce(Share& share, Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  Segment part =
      part_of(given(work, share.me, share.me), chunk, chunk_elements(work, share.members));
  Slice mine{0, part.count};
  if (in_rings(call)) mine = slice_of(part.count, size_of(call.type), share.members, share.me);
  std::size_t outs = 0;
  for (int member = 0; member < share.members; ++member) {
    const bool own = member == share.me;
    std::byte* theirs = ring(share, work, chunk, member, share.me) + mine.low * unit;
    share.in[static_cast<std::size_t>(member)] =
        own ? work.in + (part.low + mine.low) * unit : theirs;
    if (!own && (in_rings(call) || takes(work, share.members))) share.out[outs++] = theirs;
  }
  if (work.out != nullptr) {
    const std::uint64_t low =
        in_rings(call) ? part.low + mine.low : chunk * chunk_elements(work, share.members);
    share.out[outs++] = work.out + low * unit;
  }
  reduce_all(call.op, call.type, share.in.data(), share.members, share.out.data(),
             static_cast<int>(outs), mine.high - mine.low);
}

// Copies a chunk out of the rings: reduced slices from the own ring, or the others' parts.
void gather(Share& share, Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const std::uint64_t size = chunk_elements(work, share.members);
  if (in_rings(call)) {
    const Segment part = part_of({0, call.count}, chunk, size);
    return copy_others(share, work, kernels().copy, work.out + part.low * unit,
                       ring(share, work, chunk, share.me, share.me), part.count);
  }
  for (int from = 0; from < share.members; ++from) {
    const Segment whole = taken(work, share.me, from), part = part_of(whole, chunk, size);
    if (part.count == 0) continue;
    const bool past = whole.count * unit >= work.way.past;
    const Copy copy = past ? kernels().stream_copy : kernels().copy;
    std::byte* out = work.out + part.low * unit;
    const std::uint64_t bytes = part.count * unit;
    if (from == share.me) {
      const std::byte* own = work.in + part_of(given(work, from, from), chunk, size).low * unit;
      if (out != own) copy(out, own, bytes);
    } else if (takes(work, share.members)) {
      std::byte* theirs = ring(share, work, chunk, from, share.me);
      if (past)
        kernels().stream_swap(out, theirs, nullptr, nullptr, nullptr, bytes);
      else
        kernels().swap(out, theirs, nullptr, bytes);
    } else {
      copy(out, ring(share, work, chunk, from, share.me), bytes);
    }
  }
}

// Gathers a chunk of all_reduce, and stages the due one in its place if that is a whole chunk.
void renew(Share& share, Work& work, std::uint64_t chunk) {
  const Call& call = work.call;
  const std::uint64_t size = chunk_elements(work, share.members);
  const std::uint64_t due = chunk + kRing / places(work);
  if (work.way.streaming || work.staged != due || (due + 1) * size > call.count)
    return gather(share, work, chunk);
  const std::size_t bytes = size * size_of(call.type);
  swap_others(share, work, work.out + chunk * bytes, ring(share, work, chunk, share.me, share.me),
              work.in + due * bytes, size);
  ++work.staged;
  share.group.publish(share.own().staged.value, place_of(work, work.staged));
}

// Whether the inputs of the first step after staging are there.
bool sources_ready(const Share& share, const Work& work, std::uint64_t chunk) {
  const std::uint64_t reached = place_of(work, chunk + 1);
  const auto staged = [&](int member) {
    return share.control().state(member).staged.value.load(std::memory_order_seq_cst) >= reached;
  };
  if (from_root(work.call.collective)) return staged(work.call.root);
  if (work.call.collective == Collective::gather && share.me != work.call.root) return true;
  return share.all_reached(&MemberState::staged, reached);
}

bool ring_has_room(const Share& share, Work& work) {
  if (!rings_are_free(share, work)) return false;
  const std::uint64_t end = place_of(work, work.staged + 1);
  return end <= kRing || share.all_reached(&MemberState::consumed, end - kRing);
}

void consume(Share& share, Work& work) {
  ++work.consumed;
  share.group.publish(share.own().consumed.value, place_of(work, work.consumed));
}

// Does the furthest possible step.
Progress advance(Share& share, Work& work) {
  const Collective collective = work.call.collective;
  const bool two_steps = in_rings(work.call) && work.out != nullptr;
  if (two_steps && work.consumed < work.reduced &&
      share.all_reached(&MemberState::reduced, place_of(work, work.consumed + 1))) {
    if (collective == Collective::all_reduce)
      renew(share, work, work.consumed);
    else
      gather(share, work, work.consumed);
    consume(share, work);
  } else if (work.reduced < work.staged && agreed(share, work) &&
             sources_ready(share, work, work.reduced)) {
    if (reduces(collective))
      reduce(share, work, work.reduced);
    else
      gather(share, work, work.reduced);
    ++work.reduced;
    if (in_rings(work.call))
      share.group.publish(share.own().reduced.value, place_of(work, work.reduced));
    if (!two_steps) consume(share, work);
  } else if (work.staged < chunks(share, work) && ring_has_room(share, work)) {
    stage(share, work, work.staged);
    ++work.staged;
    share.group.publish(share.own().staged.value, place_of(work, work.staged));
  } else {
    return Progress::blocked;
  }
  return Progress::moved;
}

}  // namespace

void begin_in_rings(Share& share, Work& work, Path path, std::uint64_t position,
                    std::uint64_t places) {
  work.begun = true;
  work.base = (position + places - 1) / places * places;
  // On the pairwise path, a skipped place is not known to be free.
  work.elsewhere = share.in_rings != path || (path == Path::pairwise && work.base != position);
  share.in_rings = path;
  // Places that it skips are consumed.
  if (work.base != position) share.group.publish(share.own().consumed.value, work.base);
}

bool rings_are_free(const Share& share, Work& work) {
  if (work.elsewhere) work.elsewhere = !share.all_reached(&MemberState::consumed, work.base);
  return !work.elsewhere;
}

Progress step_staged(Share& share, Work& work, std::uint64_t& position) {
  if (!work.begun) begin_in_rings(share, work, Path::staged, position, places(work));
  // In this order: a member that sends nothing learns only from the others' posts that there are
  // chunks to consume.
  if (!agreed(share, work) || work.consumed < chunks(share, work)) return advance(share, work);
  position = place_of(work, chunks(share, work));
  return Progress::finished;
}

}  // namespace allreduce
