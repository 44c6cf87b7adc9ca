// Calls on symmetric memory: members read the inputs and write the outputs in place.
//
// all_reduce: a member reduces its slice of all inputs directly into all outputs, so each input is
// read once and each output written once. In other calls a member reads its part of the others'
// inputs. A member is done when all are: until then its input is read and its output written. An
// all_reduce with an update distributes the updated values instead of the sums.
//
// A process may be stopped in the middle of a step and continue after the others have given up. So
// a member that fails in a call replaces its output by private memory (Member::isolate), and waits
// for running steps of this process's other members (Group::begin_store).
//
// Ordinary stores, as the lines were just read: in place, 2 members, Zen 4, 1 MiB 15 us (with
// streaming stores 148), 4 MiB 80 (560), 16 MiB 850 (1420), 64 MiB 4700 (6300).
#include <algorithm>
#include <cstring>

#include "core/segments.h"
#include "shm/progress/collectives.h"

namespace allreduce {
namespace {

// Bytes of sums per block; all six arrays' blocks fit into the level-2 cache. Shorter blocks
// interrupt the hardware prefetcher more often: updates of 7.5 MB by Adam, 2 members, Zen
// 3, 2.30, 2.35 and 2.55 ms in three comparisons, and 2.44, 2.52 and 2.84 with 8 KiB.
constexpr std::size_t kBlock = 32 << 10;

Placement placement(const Share& share, const Work& work, int member) {
  Placement place;
  std::memcpy(&place, share.control().slot(member, work.seq).payload, sizeof(place));
  return place;
}

const std::byte* input(const Share& share, const Work& work, int member) {
  return work.in_region->part(member) + placement(share, work, member).in_offset;
}

std::byte* output(const Share& share, const Work& work, int member) {
  return work.out_region->part(member) + placement(share, work, member).out_offset;
}

// Reduces `count` elements of every input from `in_low`: all_reduce stores them at `out_low` of all
// outputs, reduce_scatter at `out_low` of its own.
void reduce(Share& share, Work& work, std::uint64_t in_low, std::uint64_t out_low,
            std::uint64_t count) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const bool everywhere = call.collective == Collective::all_reduce;
  for (int member = 0; member < share.members; ++member) {
    const auto m = static_cast<std::size_t>(member);
    share.in[m] = input(share, work, member) + in_low * unit;
    if (everywhere) share.out[m] = output(share, work, member) + out_low * unit;
  }
  if (!everywhere) share.out[0] = work.out + out_low * unit;
  const int outs = everywhere ? share.members : 1;
  reduce_all(call.op, call.type, share.in.data(), share.members, share.out.data(), outs, count);
}

// Like reduce, but into a block that stays in the cache; the optimizer updates this member's values
// with it, and those are stored into all outputs. Sums that are kept replace this member's own
// gradients, whose slice no other member reads.
void update(Share& share, Work& work, std::uint64_t low, std::uint64_t count) {
  const Call& call = work.call;
  const Update::Stage stage = work.update->stage;
  const bool keeps = work.update->keeps || stage != Update::Stage::both;
  const std::size_t unit = size_of(call.type);
  const std::uint64_t most = kBlock / unit;
  alignas(kLine) std::byte block[kBlock];
  for (std::uint64_t at = low, end = low + count; at < end; at += most) {
    const std::uint64_t part = std::min(most, end - at);
    for (int member = 0; member < share.members; ++member)
      share.in[static_cast<std::size_t>(member)] = input(share, work, member) + at * unit;
    std::byte* own = work.in_region->part(share.me) + work.place.in_offset + at * unit;
    void* sums = keeps ? own : block;
    if (stage != Update::Stage::values)
      reduce_all(call.op, call.type, share.in.data(), share.members, &sums, 1, part);
    if (stage == Update::Stage::sums) continue;
    std::byte* values = output(share, work, share.me) + at * unit;
    work.update->apply(values, static_cast<std::byte*>(sums), at, part);
    for (int member = 0; member < share.members; ++member)
      if (member != share.me)
        kernels().copy(output(share, work, member) + at * unit, values, part * unit);
  }
}

// Does one step of this member's share; false if none is left.
bool advance(Share& share, Work& work) {
  const Call& call = work.call;
  const std::size_t unit = size_of(call.type);
  const std::uint64_t step = work.way.chunk / unit;
  if (reduces(call.collective)) {
    Segment from = given(work, share.me, share.me), to{0, from.count};
    if (call.collective == Collective::all_reduce) {
      const Slice own = slice_of(call.count, size_of(call.type), share.members, share.me);
      from = to = {own.low, own.high - own.low};
    }
    if (work.cursor == from.count || (work.update && !work.update->admitted())) return false;
    const std::uint64_t count = std::min(step, from.count - work.cursor);
    if (work.update)
      update(share, work, from.low + work.cursor, count);
    else
      reduce(share, work, from.low + work.cursor, to.low + work.cursor, count);
    work.cursor += count;
    return true;
  }
  for (; work.peer < share.members; ++work.peer, work.cursor = 0) {
    const Segment to = taken(work, share.me, work.peer);
    if (work.cursor == to.count) continue;
    const Copy copy = to.count * unit >= work.way.past ? kernels().stream_copy : kernels().copy;
    const std::uint64_t count = std::min(step, to.count - work.cursor);
    const std::uint64_t low = given(work, work.peer, share.me).low + work.cursor;
    const std::byte* source = input(share, work, work.peer) + low * unit;
    std::byte* target = work.out + (to.low + work.cursor) * unit;
    if (source != target) copy(target, source, count * unit);
    work.cursor += count;
    return true;
  }
  return false;
}

}  // namespace

Progress step_direct(Share& share, Work& work) {
  if (!agreed(share, work) || !share.group.begin_store(work.seq)) return Progress::blocked;
  const bool moved = advance(share, work);
  share.group.end_store();
  if (moved) return Progress::moved;
  if (!work.stored) {
    work.stored = true;
    share.group.publish(share.own().finished.value, work.seq + 1);
  }
  return share.all_reached(&MemberState::finished, work.seq + 1) ? Progress::finished
                                                                 : Progress::blocked;
}

}  // namespace allreduce
