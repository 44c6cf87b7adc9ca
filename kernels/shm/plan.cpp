#include "shm/plan.h"

#include <algorithm>

#include "shm/paths.h"

namespace allreduce {
namespace {

// Builds the plan of one member; a method for each path names what the path's source does.
class Planner {
 public:
  Planner(Work& work, int me, int members, bool in_place)
      : work_(work), me_(me), n_(members), in_place_(in_place), unit_(size_of(work.call.type)) {
    made_.path = work.call.path;
    made_.way = work.way;
  }

  CallPlan plan() {
    if (is_message(work_.call.collective)) {
      message();
    } else if (n_ == 1) {
      made_ = {};
      step("copy_input", !in_place_ && input_elements(work_, 1, 0) != 0);
    } else if (made_.path == Path::eager) {
      eager();
    } else if (made_.path == Path::direct) {
      direct();
    } else if (made_.path == Path::cross_process) {
      cross_process();
    } else if (made_.path == Path::pairwise) {
      pairwise();
    } else {
      staged();
    }
    return std::move(made_);
  }

 private:
  std::uint64_t bytes(std::uint64_t elements) const { return elements * unit_; }
  bool goes_past(std::uint64_t many) const { return many >= work_.way.past; }
  bool reduces_share() const { return given(work_, me_, me_).count != 0; }

  // Adds a step that this member takes if it has something to move.
  void step(const char* name, bool taken = true, bool past = false) {
    if (taken) made_.steps.push_back({name, past});
  }

  // The bytes of the longest part that this member gets from another one.
  std::uint64_t longest_from_others() const {
    std::uint64_t longest = 0;
    for (int from = 0; from < n_; ++from)
      if (from != me_) longest = std::max(longest, bytes(taken(work_, me_, from).count));
    return longest;
  }
  bool gives_to_others() const {
    for (int to = 0; to < n_; ++to)
      if (to != me_ && given(work_, me_, to).count != 0) return true;
    return false;
  }
  std::uint64_t own_copy() const { return in_place_ ? 0 : bytes(taken(work_, me_, me_).count); }

  // Whether the sender's memory is symmetric, only it knows.
  void message() {
    const bool sends = work_.call.collective == Collective::send;
    const std::uint64_t moved = bytes(work_.call.count);
    if (made_.path == Path::eager) {
      made_.staging = moved;
      step(sends ? "write_letter" : "read_letter");
    } else if (made_.path == Path::direct) {
      step("offer_in_place");
    } else {
      made_.way.chunk = kWindow;
      if (sends) made_.staging = std::min<std::uint64_t>(moved, kWindowsPerReceiver * kWindow);
      step(sends ? "offer" : "accept");
      step(sends ? "fill_windows" : "empty_windows");
    }
  }

  void eager() {
    made_.staging = kSmall;
    step("post");
    step("add_to_post", payload_bytes(work_, n_, me_) != 0);
    if (reduces(work_.call.collective))
      step("reduce_posts", given_in_post(work_, me_, me_).count != 0);
    else
      step("copy_posts", longest_from_others() + taken(work_, me_, me_).count != 0);
  }

  void direct() {
    step("post");
    if (work_.call.collective == Collective::all_reduce) {
      const Slice slice = slice_of(work_.call.count, unit_, n_, me_);
      step("reduce_slices", slice.high != slice.low);
    } else if (work_.call.collective == Collective::reduce_scatter) {
      step("reduce_share_in_place", reduces_share());
    } else {
      const std::uint64_t longest = std::max(own_copy(), longest_from_others());
      step("copy_in_place", longest != 0, goes_past(longest));
    }
    step("wait_for_all");
  }

  void cross_process() {
    step("post");
    step("pull", longest_from_others() != 0);
    copy_own();
    step("wait_for_readers", gives_to_others());
  }

  void pairwise() {
    made_.staging = kLap * kPlace;
    const std::uint64_t elements = work_.way.chunk / unit_, got = longest_from_others();
    made_.chunks = (longest_segment(work_, n_, me_) + elements - 1) / elements;
    step("exchange", gives_to_others());
    if (reduces(work_.call.collective)) return step("reduce_exchanged", reduces_share());
    step("copy_exchanged", got != 0, goes_past(got));
    copy_own();
  }

  void copy_own() { step("copy_own", own_copy() != 0, goes_past(own_copy())); }

  void staged() {
    made_.staging = kRing * kPlace;
    const std::uint64_t size = chunk_elements(work_, n_), longest = longest_segment(work_, n_, me_);
    made_.chunks = (longest + size - 1) / size;
    if (in_rings(work_.call)) return reduce_in_rings();
    step("stage", gives_to_others());
    if (work_.call.collective == Collective::reduce_scatter)
      return step("reduce_staged", reduces_share());
    step("copy_staged", longest_from_others() != 0, goes_past(bytes(longest)));
    step("copy_own", own_copy() != 0);
  }

  void reduce_in_rings() {
    const std::uint64_t count = work_.call.count;
    const bool keeps = work_.call.collective == Collective::all_reduce || me_ == work_.call.root;
    step("stage_others", count != 0);
    step("reduce_in_rings", count != 0);
    step("copy_reduced", keeps && count != 0);
  }

  const Work& work_;
  const int me_, n_;
  const bool in_place_;
  const std::uint64_t unit_;
  CallPlan made_;
};

}  // namespace

CallPlan plan_call(const CallSpec& spec, const Choices& choices, int me, int members,
                   const PlanArrays& arrays) {
  Work work;
  static_cast<CallSpec&>(work) = spec;
  if (is_message(spec.call.collective))
    work.call.path = message_path(spec.call, arrays.symmetric);
  else
    choose_path(work, choices, members, [&] { return arrays.symmetric; });
  return Planner(work, me, members, arrays.in_place).plan();
}

}  // namespace allreduce
