#include "shm/progress/member.h"

#include <algorithm>
#include <cstring>

#include "core/segments.h"
#include "core/utf8.h"
#include "shm/paths.h"
#include "shm/progress/engine.h"

namespace allreduce {

Member::Member(std::shared_ptr<Group> group, int index)
    : group_(std::move(group)), share_(*group_, index), messages_(share_) {
  Engine::instance().add(this);
}

Member::~Member() {
  if (group_->inherited()) return;
  Engine::instance().remove(this);
  leave();
}

std::shared_ptr<Work> Member::start(Call call, const std::byte* in, std::byte* out, Details details,
                                    const Update* update) {
  auto work = std::make_shared<Work>();
  work->call = call;
  work->details = std::move(details);
  work->update = update;
  work->in = in;
  work->out = out;
  if (group_->inherited()) {  // where the lock may be held by a thread that the fork left behind
    work->state.store(State::failed, std::memory_order_release);
    return work;
  }
  std::lock_guard lock(mutex_);
  const bool dead = group_->culprit_word() != 0;
  if (left_ || (dead && queue_.empty())) {
    work->state.store(State::failed, std::memory_order_release);
    return work;
  }
  if (share_.members == 1) {
    copy_alone(*work);
    return work;
  }
  choose_path(*work, group_->choices(), share_.members, [&] { return locate(*work); });
  work->seq = started_;
  queue_.push_back(work);
  ++started_;  // after the code that may throw
  pending_.store(queue_.size(), std::memory_order_release);
  if (!dead) post_ready();  // else it fails when the calls before it are over
  return work;
}

std::shared_ptr<Work> Member::start_message(const Call& call, std::int64_t tag, const std::byte* in,
                                            std::byte* out, std::string note) {
  auto work = std::make_shared<Work>();
  work->call = call;
  work->tag = tag;
  work->details.note = std::move(note);
  work->in = in;
  work->out = out;
  if (!group_->inherited()) {
    std::lock_guard lock(mutex_);
    if (!left_ && group_->culprit_word() == 0) {
      messages_.start(work);
      return work;
    }
  }
  work->state.store(State::failed, std::memory_order_release);
  return work;
}

// Finds where in symmetric memory the arrays of a call lie, if they do.
bool Member::locate(Work& work) {
  const Call& call = work.call;
  const std::uint64_t in = input_elements(work, share_.members, index()), unit = size_of(call.type);
  work.in_region = group_->find_region(index(), work.in, in * unit);
  if (!work.in_region) return false;
  const bool writes = call.collective == Collective::all_reduce;
  if (writes) work.out_region = group_->find_region(index(), work.out, in * unit);
  if (writes && !work.out_region) return false;
  work.place.in_region = work.in_region->id;
  work.place.in_offset = static_cast<std::uint64_t>(work.in - work.in_region->part(index()));
  if (!writes) return true;
  work.place.out_region = work.out_region->id;
  work.place.out_offset = static_cast<std::uint64_t>(work.out - work.out_region->part(index()));
  return true;
}

void Member::copy_alone(Work& work) {
  const Call& call = work.call;
  const std::size_t bytes = input_elements(work, 1, 0) * size_of(call.type);
  if (call.op == Op::logical_and || call.op == Op::logical_or) {  // 1 or 0, of one member too
    const void* in[] = {work.in};
    void* out[] = {work.out};
    reduce_all(call.op, call.type, in, 1, out, 1, call.count);
  } else if (bytes != 0 && work.in != work.out) {
    std::memcpy(work.out, work.in, bytes);
  }
  work.seq = started_++;
  work.state.store(State::done, std::memory_order_release);
}

bool Member::finished_by_all(std::uint64_t calls) {
  if (known_done_ >= calls) return true;
  std::uint64_t least = UINT64_MAX;
  for (int member = 0; member < share_.members; ++member)
    least =
        std::min(least, share_.control().state(member).done.value.load(std::memory_order_seq_cst));
  known_done_ = least;
  return least >= calls;
}

void Member::post_ready() {
  while (posted_ < started_) {
    if (posted_ >= kSlots && !finished_by_all(posted_ - kSlots + 1)) return;
    post(share_, *queue_[posted_ - queue_.front()->seq]);
    ++posted_;
  }
}

void Member::expose(const std::shared_ptr<SymmetricRegion>& region, std::byte* low,
                    std::uint64_t bytes) {
  const auto same = [&](const Exposed& one) { return one.low == low && one.high == low + bytes; };
  if (bytes != 0 && std::none_of(exposed_.begin(), exposed_.end(), same))
    exposed_.push_back({region, low, low + bytes});
}

// Records the memory that other processes may write during a posted call: its output; and, if an
// update keeps state of the values, their slices of it, which this process reads to save it
// (graph/update/sharded_update.py).
void Member::expose(const Work& work) {
  if (!work.out_region || work.seq >= posted_ || !group_->has_processes()) return;
  const std::uint64_t unit = size_of(work.call.type), bytes = work.call.count * unit;
  expose(work.out_region, work.out, bytes);
  if (work.update == nullptr) return;
  for (const std::byte* slots : work.update->slots()) {
    const auto region = group_->find_region(index(), slots, bytes);
    if (!region) continue;
    for (int member = 0; member < share_.members; ++member) {
      if (group_->process_of(member) == 0) continue;
      const Slice part = slice_of(work.call.count, unit, share_.members, member);
      std::byte* theirs = region->part(member) + (slots - region->part(index()));
      expose(region, theirs + part.low * unit, (part.high - part.low) * unit);
    }
  }
}

// After the word, or `left`, that says so.
void Member::fail_all() {
  group_->end_member(index());
  group_->await_stores();
  for (const auto& work : queue_) expose(*work);
  for (const auto& work : queue_) work->state.store(State::failed, std::memory_order_release);
  queue_.clear();
  pending_.store(0, std::memory_order_release);
  messages_.fail_all();
}

// Whether the first call may complete although the communicator is dead: all members have begun it,
// and will do their shares. A member that died may have done its share before.
bool Member::may_complete(Work& head) {
  if (posted_ <= head.seq || head.unreadable || !agreed(share_, head)) return false;
  if (head.call.path == Path::eager) return true;  // all contributions are here
  bool lost = false;
  for (int member = 0; member < share_.members; ++member) {
    if (group_->ended_before(member, head.seq)) return false;
    lost |= group_->lost_before(member, head.seq);
  }
  if (!lost) return true;
  const auto now = Clock::now();
  if (blocked_since_ == Clock::time_point{}) blocked_since_ = now;
  return now - blocked_since_ < kLastCalls;
}

Progress Member::advance() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || (queue_.empty() && !messages_.busy())) return Progress::blocked;
  const bool dead = group_->culprit_word() != 0;
  if (dead) {
    messages_.end();
    if (queue_.empty() || !may_complete(*queue_.front())) {
      fail_all();
      return Progress::finished;
    }
  }
  const Progress messages = dead ? Progress::blocked : messages_.advance();
  if (queue_.empty()) return messages;
  if (!dead && posted_ < started_) post_ready();
  Work& head = *queue_.front();
  if (posted_ <= head.seq) return messages;
  Progress progress = Progress::blocked;
  switch (head.call.path) {
    case Path::eager:
      progress = step_eager(share_, head);
      break;
    case Path::direct:
      progress = step_direct(share_, head);
      break;
    case Path::staged:
      progress = step_staged(share_, head, ring_position_);
      break;
    case Path::cross_process:
      progress = step_cross_process(share_, head, ring_position_);
      break;
    case Path::pairwise:
      progress = step_pairwise(share_, head, ring_position_);
      break;
    case Path::chain:  // of tcp
      break;
  }
  if (progress != Progress::blocked) blocked_since_ = {};
  if (progress == Progress::finished) {
    // Pairs with settled() of a thread that sleeps in a wait for it; publish() wakes it.
    head.state.store(State::done, std::memory_order_seq_cst);
    // Pairs with finished_by_all() and check_left() of the others.
    group_->publish(share_.own().done.value, head.seq + 1);
    queue_.pop_front();
    pending_.store(queue_.size(), std::memory_order_release);
  }
  return progress == Progress::blocked ? messages : progress;
}

void Member::check_peers(Clock::time_point now) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || now - looked_ < kLookInterval) return;
  looked_ = now;
  std::uint64_t number = 0;
  if (!queue_.empty()) {
    Work& head = *queue_.front();
    if (posted_ > head.seq) check_posts(share_, head);
    group_->check_peers(index(), head.seq);
  } else if (messages_.tell_first(number)) {
    group_->check_peers(index(), number);
  }
  if (!group_->some_left()) return;
  if (left_seen_ == Clock::time_point{}) left_seen_ = now;
  if (now - left_seen_ < kLastDeaths) return;
  messages_.check_left();
  if (!queue_.empty()) group_->check_left(index(), queue_.front()->seq);
}

std::shared_ptr<Work> Member::last() {
  std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.back();
}

void Member::leave() {
  if (group_->inherited()) return;
  std::lock_guard lock(mutex_);
  if (left_) return;
  left_ = true;
  share_.own().left.store(1, std::memory_order_seq_cst);
  fail_all();
  group_->wake();
}

void Member::note(std::uint64_t seq, std::string_view text) {
  std::lock_guard lock(mutex_);
  if (seq >= started_) return;  // it failed in its start
  if (seq >= posted_) {         // its slot still has an older call
    if (!queue_.empty()) queue_[seq - queue_.front()->seq]->details.note = text;
    return;
  }
  Note& own = share_.control().note(share_.me, seq);
  if (own.read(seq) == nullptr) own.write(seq, text);
}

std::uint64_t Member::exposed() {
  if (group_->inherited()) return 0;
  std::lock_guard lock(mutex_);
  if (group_->culprit_word() != 0) {
    messages_.end();
    if (queue_.empty() || !may_complete(*queue_.front())) fail_all();
  }
  std::uint64_t bytes = 0;
  for (const Exposed& one : exposed_) bytes += static_cast<std::uint64_t>(one.high - one.low);
  return bytes;
}

// Not under the lock of calls, which start with the GIL. A second caller waits until it is done.
void Member::isolate() {
  std::lock_guard isolating(isolating_);
  for (;;) {
    Exposed first;
    {
      std::lock_guard lock(mutex_);
      if (exposed_.empty()) return;
      first = exposed_.front();
    }
    first.region->mapping.isolate(first.low, first.high);
    std::lock_guard lock(mutex_);
    exposed_.erase(exposed_.begin());  // others only append
  }
}

void Member::abort(std::string_view reason) {
  if (group_->inherited()) return;
  std::uint64_t next = 0;
  {
    std::lock_guard lock(mutex_);
    next = started_;
    explain(share_, reason);
  }
  group_->blame({Fault::aborted, index(), index(), next});
  std::lock_guard lock(mutex_);
  fail_all();
}

// Another thread may be in the middle of a step of it: not while this one has the lock, and then
// nothing is left to do.
void Member::give_up(const Work& work, int blamed, std::string_view reason) {
  std::lock_guard lock(mutex_);
  if (work.state.load(std::memory_order_acquire) != State::pending) return;
  explain(share_, reason);
  if (is_message(work.call.collective))
    messages_.give_up(work);
  else
    group_->blame({Fault::timeout, blamed, index(), work.seq});
  fail_all();
}

}  // namespace allreduce
