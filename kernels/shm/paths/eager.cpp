// Posts calls, compares posts, and executes calls whose payload travels with the post: every member
// reads every payload, so they need one synchronisation.
//
// Two members pass a payload longer than a line in a page that changes hands: its reader writes its
// own next payload there. 4 KiB: 0.9 us instead of 1.5 (hyperthreads of one core, Zen 3). Payloads
// posted in advance are stored in the slots' own pages, which do not fit into the level-1 cache.
#include <algorithm>
#include <cstring>

#include "core/utf8.h"
#include "shm/paths.h"
#include "shm/progress/collectives.h"

namespace allreduce {

bool Share::all_reached(Counter MemberState::* counter, std::uint64_t value) const {
  for (int member = 0; member < members; ++member)
    if ((control().state(member).*counter).value.load(std::memory_order_seq_cst) < value)
      return false;
  return true;
}

namespace {

// The spare page, from 1, that holds a member's payload; 0: none.
unsigned spare_of(const Share& share, const Work& work, int member) {
  if (share.members != 2 || payload_bytes(work, share.members, member) <= kInline) return 0;
  const auto page = std::to_integer<unsigned>(share.control().slot(member, work.seq).payload[0]);
  return page <= 2 ? page : 0;
}

std::byte* payload(const Share& share, const Work& work, int member) {
  const unsigned spare = spare_of(share, work, member);
  if (spare != 0) return share.control().spare(static_cast<int>(spare) - 1);
  return share.control().payload(member, work.seq, payload_bytes(work, share.members, member));
}

// Stores this member's contribution for the others to read.
void put(Share& share, const Work& work) {
  const std::size_t bytes = payload_bytes(work, share.members, share.me);
  if (bytes == 0) return;
  if (share.members == 2 && bytes > kInline) {
    const unsigned spare = share.spares == 0 ? 0 : share.spares == 2 ? 2 : 1;
    share.control().slot(share.me, work.seq).payload[0] = std::byte(spare);
    share.spares &= ~spare;
  }
  std::memcpy(payload(share, work, share.me), work.in, bytes);
}

}  // namespace

void explain(Share& share, std::string_view reason) {
  MemberState& own = share.own();
  if (share.group.culprit_word() == 0 && own.reason[0] == 0)  // written once at most
    std::memcpy(own.reason, reason.data(), fitting(reason, sizeof(own.reason) - 1));
}

InputLocation input_location(const Share& share, const Work& work, int member) {
  InputLocation location;
  std::memcpy(&location, share.control().slot(member, work.seq).payload, sizeof(location));
  return location;
}

void post(Share& share, Work& work) {
  Slot& slot = share.control().slot(share.me, work.seq);
  slot.signature = work.call.pack();
  slot.detail = work.details.hash;
  if (work.call.path == Path::direct) {
    std::memcpy(slot.payload, &work.place, sizeof(work.place));
  } else if (work.call.path == Path::eager) {
    put(share, work);
  } else {
    work.longest = longest_segment(work, share.members, share.me);
    const bool withheld = work.call.path == Path::cross_process && !readable_by_all(share, work);
    const InputLocation location{reinterpret_cast<std::uint64_t>(work.in), work.longest,
                                 withheld ? 1u : 0u};
    std::memcpy(slot.payload, &location, sizeof(location));
  }
  if (!work.details.note.empty())
    share.control().note(share.me, work.seq).write(work.seq, work.details.note);
  // Pairs with the loads of `flag` in agreed() and check_posts().
  share.group.publish(slot.flag, work.seq + 1);
}

namespace {

bool posted(const Slot& slot, const Work& work) {
  return slot.flag.load(std::memory_order_seq_cst) == work.seq + 1;
}

bool holds(const std::shared_ptr<SymmetricRegion>& region, std::uint64_t offset,
           std::uint64_t bytes) {
  return !region || (bytes <= region->part_bytes && offset <= region->part_bytes - bytes);
}

// Whether a member has posted this call with arrays inside the regions.
bool same_call(const Share& share, const Slot& slot, const Work& work, int member) {
  if (slot.signature != work.call.pack() || slot.detail != work.details.hash) return false;
  if (work.call.path != Path::direct) return true;
  Placement place;
  std::memcpy(&place, slot.payload, sizeof(place));
  const std::uint64_t bytes = input_elements(work, share.members, member) * size_of(work.call.type);
  return place.in_region == work.place.in_region && place.out_region == work.place.out_region &&
         holds(work.in_region, place.in_offset, bytes) &&
         holds(work.out_region, place.out_offset, bytes);
}

void blame_mismatch(Share& share, const Work& work, int member) {
  share.group.blame({Fault::mismatch, member, share.me, work.seq});
}

}  // namespace

bool agreed(Share& share, Work& work) {
  for (; work.agreed < share.members; ++work.agreed) {
    const Slot& slot = share.control().slot(work.agreed, work.seq);
    if (!posted(slot, work)) return false;
    if (!same_call(share, slot, work, work.agreed)) {
      blame_mismatch(share, work, work.agreed);
      return false;
    }
    if (work.call.path != Path::eager && work.call.path != Path::direct) {
      const InputLocation location = input_location(share, work, work.agreed);
      work.longest = std::max(work.longest, location.longest);
      work.withheld |= location.withheld != 0;
    }
  }
  return true;
}

void check_posts(Share& share, Work& work) {
  for (int member = work.agreed; member < share.members; ++member) {
    const Slot& slot = share.control().slot(member, work.seq);
    if (posted(slot, work) && !same_call(share, slot, work, member))
      return blame_mismatch(share, work, member);
  }
}

namespace {

// Reduces this member's part of all payloads; its own input is read from its array.
void reduce_payloads(Share& share, const Work& work) {
  const Call& call = work.call;
  const Segment part = given(work, share.me, share.me);
  const std::size_t offset = part.low * size_of(call.type);
  for (int member = 0; member < share.members; ++member)
    share.in[static_cast<std::size_t>(member)] =
        (member == share.me ? work.in : payload(share, work, member)) + offset;
  share.out[0] = work.out;
  // A payload with this member as its only reader is overwritten, as in staged.cpp, unless its page
  // changes hands.
  const bool take = share.members == 2 && payload_bytes(work, share.members, share.me) > kInline &&
                    spare_of(share, work, 1 - share.me) == 0;
  if (take) share.out[1] = payload(share, work, 1 - share.me) + offset;
  reduce_all(call.op, call.type, share.in.data(), share.members, share.out.data(), take ? 2 : 1,
             part.count);
}

void copy_payloads(const Share& share, const Work& work) {
  const std::size_t unit = size_of(work.call.type);
  for (int from = 0; from < share.members; ++from) {
    const Segment to = taken(work, share.me, from);
    if (to.count == 0) continue;
    const std::byte* source = from == share.me ? work.in : payload(share, work, from);
    std::memmove(work.out + to.low * unit, source + given(work, from, share.me).low * unit,
                 to.count * unit);
  }
}

}  // namespace

Progress step_eager(Share& share, Work& work) {
  if (!agreed(share, work)) return Progress::blocked;
  if (!reduces(work.call.collective))
    copy_payloads(share, work);
  else if (work.out != nullptr)
    reduce_payloads(share, work);
  share.spares |= share.members == 2 ? spare_of(share, work, 1 - share.me) : 0;
  return Progress::finished;
}

}  // namespace allreduce
