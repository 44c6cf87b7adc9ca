#include "shm/plan.h"

#include <algorithm>

#include "shm/paths.h"

namespace allreduce {
namespace {

// Builds the plan of one member; one method per path counts the work of that path's source file.
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
      add("copy_input", in_place_ ? 0 : bytes(input_elements(work_, 1, 0)));
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
  std::uint64_t own_share() const { return bytes(given(work_, me_, me_).count); }
  std::uint64_t sources(std::uint64_t each) const { return static_cast<std::uint64_t>(n_) * each; }
  bool goes_past(std::uint64_t many) const { return many >= work_.way.past; }

  void say(const char* name) { made_.steps.push_back({name}); }
  void add(const char* name, std::uint64_t read, std::uint64_t written, bool past = false) {
    if (read != 0 || written != 0) made_.steps.push_back({name, read, written, past});
  }
  void add(const char* name, std::uint64_t moved) { add(name, moved, moved); }
  void copy(const char* name, std::uint64_t moved, bool past) { add(name, moved, moved, past); }

  // The bytes that this member gets from others.
  std::uint64_t from_others() const {
    std::uint64_t sum = 0;
    for (int from = 0; from < n_; ++from)
      if (from != me_) sum += bytes(taken(work_, me_, from).count);
    return sum;
  }
  std::uint64_t own_copy() const { return in_place_ ? 0 : bytes(taken(work_, me_, me_).count); }

  // Whether the sender's memory is symmetric, only it knows.
  void message() {
    const bool sends = work_.call.collective == Collective::send;
    const std::uint64_t moved = bytes(work_.call.count);
    if (made_.path == Path::eager) {
      made_.staging = moved;
      made_.steps.push_back({sends ? "write_letter" : "read_letter", moved, moved});
    } else if (made_.path == Path::direct) {
      say("offer_in_place");
    } else {
      made_.way.chunk = kWindow;
      if (sends) made_.staging = std::min<std::uint64_t>(moved, kWindowsPerReceiver * kWindow);
      say(sends ? "offer" : "accept");
      made_.steps.push_back({sends ? "fill_windows" : "empty_windows", moved, moved});
    }
  }

  void eager() {
    made_.staging = kSmall;
    say("post");
    add("add_to_post", payload_bytes(work_, n_, me_));
    if (reduces(work_.call.collective)) {
      const std::uint64_t part = bytes(given_in_post(work_, me_, me_).count);
      add("reduce_posts", sources(part), part);
    } else {
      add("copy_posts", from_others() + bytes(taken(work_, me_, me_).count));
    }
  }

  void direct() {
    say("post");
    if (work_.call.collective == Collective::all_reduce) {
      const Slice slice = slice_of(work_.call.count, unit_, n_, me_);
      add("reduce_slices", sources(bytes(slice.high - slice.low)));
    } else if (work_.call.collective == Collective::reduce_scatter) {
      add("reduce_share_in_place", sources(own_share()), own_share());
    } else {
      std::uint64_t longest = own_copy();
      for (int from = 0; from < n_; ++from)
        if (from != me_) longest = std::max(longest, bytes(taken(work_, me_, from).count));
      copy("copy_in_place", from_others() + own_copy(), goes_past(longest));
    }
    say("wait_for_all");
  }

  void cross_process() {
    say("post");
    add("pull", from_others());
    copy("copy_own", own_copy(), goes_past(own_copy()));
    for (int to = 0; to < n_; ++to)
      if (to != me_ && given(work_, me_, to).count != 0) return say("wait_for_readers");
  }

  void pairwise() {
    made_.staging = kLap * kPlace;
    const std::uint64_t elements = work_.way.chunk / unit_;
    made_.chunks = (longest_segment(work_, n_, me_) + elements - 1) / elements;
    add("exchange", bytes(given(work_, me_, 1 - me_).count));
    if (reduces(work_.call.collective))
      return add("reduce_exchanged", 2 * own_share(), own_share());
    copy("copy_exchanged", from_others(), goes_past(from_others()));
    copy("copy_own", own_copy(), goes_past(own_copy()));
  }

  void staged() {
    made_.staging = kRing * kPlace;
    const std::uint64_t size = chunk_elements(work_, n_), longest = longest_segment(work_, n_, me_);
    made_.chunks = (longest + size - 1) / size;
    if (in_rings(work_.call)) return reduce_in_rings(size);
    std::uint64_t out = 0;
    for (int to = 0; to < n_; ++to) {
      if (to == me_) continue;
      const std::uint64_t part = bytes(given(work_, me_, to).count);
      out = personal(work_.call.collective) ? out + part : std::max(out, part);
    }
    add("stage", out);
    const bool zeros = takes(work_, n_);
    if (work_.call.collective == Collective::reduce_scatter) {
      const std::uint64_t emptied = zeros ? sources(own_share()) - own_share() : 0;
      return add("reduce_staged", sources(own_share()), own_share() + emptied);
    }
    const std::uint64_t got = from_others();
    add("copy_staged", got, zeros ? 2 * got : got, goes_past(bytes(longest)));
    add("copy_own", own_copy());
  }

  void reduce_in_rings(std::uint64_t size) {
    const std::uint64_t count = work_.call.count;
    const Slice whole = slice_of(size, unit_, n_, me_),
                rest = slice_of(count % size, unit_, n_, me_);
    const std::uint64_t own =
        bytes(count / size * (whole.high - whole.low) + (rest.high - rest.low));
    const std::uint64_t others = bytes(count) - own;
    const bool keeps = work_.call.collective == Collective::all_reduce || me_ == work_.call.root;
    add("stage_others", others);
    add("reduce_in_rings", sources(own), sources(own) - (keeps ? 0 : own));
    if (keeps) add("copy_reduced", others);
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
