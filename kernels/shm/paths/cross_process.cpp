// Copying calls on private arrays of members that can read each other's memory: each member copies
// its part directly from the others' arrays, once. Threads of one process copy themselves; the
// kernel copies from other processes.
//
// An array may be read from its post until all its readers have stored `finished`; only then is its
// owner done. An owner may die, leave or abort earlier. A read from its process then returns
// garbage or an error. So each member checks after its last copy that all owners were still there;
// its store of `finished` orders the copies before that check. Within one process an owner waits
// for current readers (Group::begin_read) before its caller may free the array.
//
// Members only read. Writing into another member's output would be as fast, but could continue
// after that member failed and reused its memory.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/segments.h"
#include "shm/memory/remote.h"
#include "shm/progress/collectives.h"

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

// Copies one step's bytes from member `from`; false if they cannot be read.
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
  return true;
}

// Does one step of this member's share, its own part last: the others do not wait for that.
Progress advance(Share& share, Work& work) {
  const std::uint64_t step = work.way.chunk / size_of(work.call.type);
  for (; work.peer < share.members; ++work.peer, work.cursor = 0) {
    // Each member begins with another peer.
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

// Whether the arrays that this member has read were still valid after its last copy.
//
// An owner stores `ended` (Group::end_member) before it reuses its array. These loads follow the
// copies only because the store of `finished` in advance() is between them and all are sequentially
// consistent: on arm64 an acquiring load may execute before an earlier store, and so before the
// copies.
bool inputs_still_valid(const Share& share, const Work& work) {
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
  return read_by_all(share, work) && inputs_still_valid(share, work) ? Progress::finished
                                                                     : Progress::blocked;
}

}  // namespace allreduce
