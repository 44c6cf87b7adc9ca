// Copying calls on private arrays of members who may read each other's memory: everybody copies
// what is for it straight out of the others' arrays, once. Threads of one process do so by
// themselves, for other processes the kernel does.
//
// An array is lent from its post on until whoever reads it has said so, by `finished`; then only is
// its owner done. An owner may die, leave or abort earlier. In another process, what is read is
// anything then, or an error: so nobody is done before it has seen, after its last copy, that they
// all were still there; the store of `finished` stands between the copies and that look. In this
// process the owner waits for whoever just reads (Group::begin_read), before its caller may free
// the array.
//
// Members only read. To write into another's output would be as fast, and would go on when that
// member has failed and its memory serves something else.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/segments.h"
#include "shm/collectives.h"
#include "shm/remote.h"

namespace allreduce {
namespace {

void lose(Share& share, Work& work, int member, int error) {
  work.unreadable = true;
  share.group.check_left(share.me, work.seq);
  share.group.check_peers(share.me, work.seq);
  if (error == ESRCH) return share.group.blame({Fault::lost, member, share.me, work.seq});
  explain(share, "it cannot read the array of member " + std::to_string(member) + " any more: " +
                     std::strerror(error) + "; with ALLREDUCE_SHARED_PULL=off nobody has to");
  share.group.blame({Fault::aborted, share.me, share.me, work.seq});
}

// Copies from another thread of this process, as read_process() from another process.
int read_thread(Share& share, Copy copy, int from, std::byte* to, std::uint64_t address,
                std::size_t bytes) {
  if (!share.group.begin_read(from)) return ESRCH;
  copy(to, reinterpret_cast<const std::byte*>(address), bytes);
  share.group.end_read(from);
  return 0;
}

// Copies a step's bytes of what `from` gives to this member; false if they are out of reach.
bool pull(Share& share, Work& work, int from, const Segment& to, std::uint64_t count) {
  const std::size_t unit = size_of(work.call.type), bytes = count * unit;
  std::byte* target = work.out + (to.low + work.cursor) * unit;
  const std::uint64_t offset = (given(work, from, share.me).low + work.cursor) * unit;
  const Copy copy = to.count * unit >= work.way.past ? kernels().stream_copy : kernels().copy;
  if (from == share.me) {
    if (work.in + offset == target) return true;
    copy(target, work.in + offset, bytes);
  } else {
    const std::uint64_t source = input_location(share, work, from).address + offset;
    const int pid = share.group.process_of(from);
    const int error = pid == 0 ? read_thread(share, copy, from, target, source, bytes)
                               : read_process(pid, target, source, bytes);
    if (error != 0) {
      lose(share, work, from, error);
      return false;
    }
  }
  work.read += bytes;
  work.written += bytes;
  return true;
}

// Does a step of this member's share, the own part last: the others do not wait for that.
Progress advance(Share& share, Work& work) {
  const std::uint64_t step = work.way.chunk / size_of(work.call.type);
  for (; work.peer < share.members; ++work.peer, work.cursor = 0) {
    // Everybody begins with another one.
    const int from = (share.me + 1 + work.peer) % share.members;
    if (from == share.me && !work.stored) {
      work.stored = true;
      share.group.publish(share.own().finished.value, work.seq + 1);
    }
    const Segment to = taken(work, share.me, from);
    if (work.cursor == to.count) continue;
    const std::uint64_t count = std::min(step, to.count - work.cursor);
    if (!pull(share, work, from, to, count)) return Progress::blocked;
    work.cursor += count;
    return Progress::moved;
  }
  return Progress::finished;
}

bool read_by_all(const Share& share, const Work& work) {
  for (int member = 0; member < share.members; ++member) {
    if (member == share.me || given(work, share.me, member).count == 0) continue;
    const std::atomic<std::uint64_t>& finished = share.control().state(member).finished.value;
    if (finished.load(std::memory_order_seq_cst) <= work.seq) return false;
  }
  return true;
}

// Whether the arrays that this member has read were still lent after its last copy.
//
// An owner stores `ended` (Group::end_member) before it reuses its array. These loads come after
// the copies only because the store of `finished` in advance() stands between, and because all are
// sequentially consistent: an acquiring load may be done before an earlier store, and so before the
// copies, on arm64.
bool were_lent(const Share& share, const Work& work) {
  bool looked = false;
  for (int member = 0; member < share.members; ++member) {
    if (member == share.me || taken(work, share.me, member).count == 0) continue;
    if (!std::exchange(looked, true)) {
      share.group.check_left(share.me, work.seq);
      share.group.check_peers(share.me, work.seq);
    }
    if (share.group.ended_before(member, work.seq) || share.group.lost_before(member, work.seq))
      return false;
  }
  return true;
}

}  // namespace

bool readable_by_all(const Share& share, const Work& work) {
  std::uint64_t count = 0;
  for (int member = 0; member < share.members; ++member)
    if (member != share.me && given(work, share.me, member).count != 0)
      count = input_elements(work, share.members, share.me);
  return !share.group.has_processes() || readable(work.in, count * size_of(work.call.type));
}

Progress step_cross_process(Share& share, Work& work, std::uint64_t& position) {
  if (!agreed(share, work)) return Progress::blocked;
  if (work.withheld) {
    work.way = work.rings;
    return work.way.pairwise ? step_pairwise(share, work, position)
                             : step_staged(share, work, position);
  }
  const Progress progress = advance(share, work);
  if (progress != Progress::finished) return progress;
  return read_by_all(share, work) && were_lent(share, work) ? Progress::finished
                                                            : Progress::blocked;
}

}  // namespace allreduce
