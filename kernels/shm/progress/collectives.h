// One member's share of a call, as steps that never block: each returns its progress.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shm/memory/group.h"
#include "shm/progress/protocol.h"
#include "shm/update.h"

namespace allreduce {

enum class Progress : std::uint8_t { blocked, moved, finished };

// The sequence number of a call that failed before it got one.
inline constexpr std::uint64_t kUnstarted = kMessage - 1;

// A started call of one member. Until `state` is done, only the holder of the member's lock
// accesses the other fields.
struct Work : CallSpec {
  std::uint64_t seq = kUnstarted;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Placement place;
  std::shared_ptr<SymmetricRegion> in_region, out_region;
  const Update* update = nullptr;  // of an all_reduce that hands out values instead of sums
  std::atomic<State> state{State::pending};
  Way way;

  int agreed = 0;  // members 0..agreed-1 have posted the same call

  // Staged and pairwise path: chunks of this call, the first of which lies at place `base`; and
  // whether the others have to be through with all places before it.
  std::uint64_t base = 0;
  std::uint64_t staged = 0, reduced = 0, consumed = 0;
  std::uint64_t longest = 0;  // elements of the longest segment, of all members once they agreed
  bool begun = false, elsewhere = false;

  // Cross-process path: the staged path to use instead, whether it must be used, whether reading
  // failed.
  Way rings;
  bool withheld = false, unreadable = false;

  // Direct and cross_process path: elements done, in the segment from `peer` if there is one from
  // each member (cross_process: counted from the next member); and whether the end was published.
  std::uint64_t cursor = 0;
  int peer = 0;
  bool stored = false;

  // send and recv: `call.root` is the other member, `cursor` counts the bytes moved. A recv from
  // any source stores its message's tag here once they are matched.
  std::int64_t tag = 0;
  std::atomic<bool> met{false};  // whether a recv has its message
};

// The state that one member's steps use.
struct Share {
  Group& group;
  const int me;
  const int members;
  std::vector<const void*> in;  // scratch: one pointer per member
  std::vector<void*> out;
  Path in_rings = Path::staged;  // the path of the last call that used the rings
  unsigned spares;  // of two members: which of both spare pages are this one's, as bits

  Share(Group& group, int me)
      : group(group),
        me(me),
        members(group.members()),
        in(static_cast<std::size_t>(members)),
        out(static_cast<std::size_t>(members)),
        spares(members == 2 ? 1u << me : 0) {}

  const Control& control() const { return group.control(); }
  MemberState& own() const { return control().state(me); }
  // Whether every member's counter has reached `value`.
  bool all_reached(Counter MemberState::* counter, std::uint64_t value) const;
};

// Stores why this member ends the communicator, before the word that makes others read it.
void explain(Share& share, std::string_view reason);
// Writes the call into the member's slot, for the others to compare.
void post(Share& share, Work& work);
// Whether all members have posted this same call; blames the first that posted another.
bool agreed(Share& share, Work& work);
// Checks all available posts, also beyond a missing one: a mismatch must not wait for a straggler.
void check_posts(Share& share, Work& work);

Progress step_eager(Share& share, Work& work);
Progress step_direct(Share& share, Work& work);
// A member's post about its input, once posted; of a staged or cross_process call.
InputLocation input_location(const Share& share, const Work& work, int member);
// Whether the others can read this member's input in place.
bool readable_by_all(const Share& share, const Work& work);
// Advances `position`, the member's place in the ring, past this call when it is finished.
Progress step_staged(Share& share, Work& work, std::uint64_t& position);
// As step_staged, for two members.
Progress step_pairwise(Share& share, Work& work, std::uint64_t& position);
// Begins a call in the rings at the next of `position` where a chunk fits.
void begin_in_rings(Share& share, Work& work, Path path, std::uint64_t position,
                    std::uint64_t places);
// Whether earlier calls, which used the places differently, are finished on all members.
bool rings_are_free(const Share& share, Work& work);
// As step_staged or step_pairwise, which it is if somebody's input cannot be read.
Progress step_cross_process(Share& share, Work& work, std::uint64_t& position);

}  // namespace allreduce
