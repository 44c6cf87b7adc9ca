#include "shm/memory/group.h"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace allreduce {
namespace {

// Counts the forks between this process and the first that loaded the library.
std::atomic<std::uint32_t> fork_generation{0};
const int fork_watch = pthread_atfork(
    nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Group::Group(int fd, int members, int cores, Choices choices)
    : members_(members),
      oversubscribed_(members > cores),
      choices_(std::move(choices)),
      fork_generation_(fork_generation.load(std::memory_order_relaxed)),
      region_(fd, Control::bytes(members)),
      control_(region_.data(), members),
      processes_(static_cast<std::size_t>(members)),
      readers_(static_cast<std::size_t>(members)),
      lost_(static_cast<std::size_t>(members)) {}

void Group::add_peer(int fd, int pid, std::vector<int> members) {
  std::lock_guard lock(peers_mutex_);
  has_processes_ = true;
  for (int member : members) processes_[static_cast<std::size_t>(member)] = pid;
  peers_.push_back({fd, std::move(members)});
}

// Pairs with end_member(): either this thread sees that the member has ended, or the member sees
// this thread.
bool Group::begin_read(int member) {
  readers_[static_cast<std::size_t>(member)].fetch_add(1, std::memory_order_seq_cst);
  if (control_.state(member).ended.load(std::memory_order_seq_cst) == 0) return true;
  end_read(member);
  return false;
}

void Group::end_read(int member) {
  readers_[static_cast<std::size_t>(member)].fetch_sub(1, std::memory_order_seq_cst);
}

void Group::end_member(int member) {
  control_.state(member).ended.store(1, std::memory_order_seq_cst);
  // Also orders the member's later stores into its arrays after `ended`: step_cross_process()
  // relies on this.
  while (readers_[static_cast<std::size_t>(member)].load(std::memory_order_seq_cst) != 0)
    sched_yield();
}

// `ended` and `left` are loaded first: after one of them was stored, `done` does not grow. A
// leaving process may be killed between its two stores.
bool Group::ended_before(int member, std::uint64_t seq) const {
  const MemberState& state = control_.state(member);
  return (state.ended.load(std::memory_order_seq_cst) != 0 ||
          state.left.load(std::memory_order_seq_cst) != 0) &&
         state.done.value.load(std::memory_order_seq_cst) <= seq;
}

bool Group::lost_before(int member, std::uint64_t seq) const {
  return lost_[static_cast<std::size_t>(member)].load(std::memory_order_seq_cst) &&
         control_.state(member).done.value.load(std::memory_order_seq_cst) <= seq;
}

// Pairs with end_member() and await_stores(): either this thread sees that the member has ended, or
// the member sees this thread.
bool Group::begin_store(std::uint64_t seq) {
  stores_.fetch_add(1, std::memory_order_seq_cst);
  for (int member = 0; member < members_; ++member)
    if (process_of(member) == 0 && ended_before(member, seq)) {
      end_store();
      return false;
    }
  return true;
}

void Group::end_store() { stores_.fetch_sub(1, std::memory_order_seq_cst); }

void Group::await_stores() const {
  while (stores_.load(std::memory_order_seq_cst) != 0) sched_yield();
}

void Group::check_peers(int observer, std::uint64_t seq) {
  std::lock_guard lock(peers_mutex_);
  if (peers_.empty()) return;
  std::vector<pollfd> polls;
  for (const Peer& peer : peers_) polls.push_back({peer.fd, POLLRDHUP, 0});
  if (poll(polls.data(), polls.size(), 0) <= 0) return;
  for (std::size_t i = polls.size(); i-- > 0;) {
    if ((polls[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) continue;
    for (int member : peers_[i].members) {
      if (control_.state(member).left.load(std::memory_order_acquire) != 0) continue;
      lost_[static_cast<std::size_t>(member)].store(true, std::memory_order_seq_cst);
      blame({Fault::lost, member, observer, seq});
    }
    // All members there have left, or one is to blame: nothing more to learn from this socket.
    peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Group::some_left() const {
  for (int member = 0; member < members_; ++member)
    if (control_.state(member).left.load(std::memory_order_acquire) != 0) return true;
  return false;
}

void Group::check_left(int observer, std::uint64_t seq) {
  for (int member = 0; member < members_; ++member) {
    const MemberState& state = control_.state(member);
    // Pairs with the store in Member::leave(). That is a member's last, so `done` cannot grow after
    // it was seen. Sequentially consistent for step_cross_process().
    if (state.left.load(std::memory_order_seq_cst) != 0 &&
        state.done.value.load(std::memory_order_acquire) <= seq)
      blame({Fault::left, member, observer, seq});
  }
}

void Group::drop_peers() {
  std::lock_guard lock(peers_mutex_);
  peers_.clear();
}

bool Group::inherited() const {
  return fork_generation_ != fork_generation.load(std::memory_order_relaxed);
}

void Group::map_region(std::uint32_t id, int fd, std::size_t part_bytes, int users) {
  auto region = std::make_shared<SymmetricRegion>(id, fd, part_bytes, members_);
  std::lock_guard lock(regions_mutex_);
  std::erase_if(regions_, [](const auto& old) { return old.expired(); });
  regions_.push_back(region);
  unclaimed_.push_back({std::move(region), users});
  region_count_.store(static_cast<int>(regions_.size()), std::memory_order_release);
}

std::shared_ptr<SymmetricRegion> Group::claim_region(std::uint32_t id) {
  std::lock_guard lock(regions_mutex_);
  for (std::size_t i = 0; i < unclaimed_.size(); ++i) {
    if (unclaimed_[i].region->id != id) continue;
    auto region = unclaimed_[i].region;
    if (--unclaimed_[i].users == 0)
      unclaimed_.erase(unclaimed_.begin() + static_cast<std::ptrdiff_t>(i));
    return region;
  }
  return nullptr;
}

std::shared_ptr<SymmetricRegion> Group::find_region(int member, const std::byte* pointer,
                                                    std::size_t bytes) {
  if (region_count_.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard lock(regions_mutex_);
  for (const auto& weak : regions_)
    if (auto region = weak.lock(); region && region->holds(member, pointer, bytes)) return region;
  return nullptr;
}

std::shared_ptr<SymmetricRegion> Group::find_region(std::uint32_t id) {
  std::lock_guard lock(regions_mutex_);
  for (const auto& weak : regions_)
    if (auto region = weak.lock(); region && region->id == id) return region;
  return nullptr;
}

void Group::release_region(std::uint32_t id) {
  std::lock_guard lock(regions_mutex_);
  std::erase_if(unclaimed_, [id](const Unclaimed& entry) { return entry.region->id == id; });
}

void Group::blame(const Culprit& culprit) {
  std::uint64_t none = 0;
  // Pairs with culprit_word(): a thread that sees the word also sees the reason written before it.
  if (control_.header().culprit.compare_exchange_strong(none, culprit.pack(),
                                                        std::memory_order_seq_cst))
    wake();
}

void Group::wake() {
  std::atomic<std::uint32_t>& wakes = control_.header().wakes;
  wakes.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&wakes), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

void Group::wait_for_wake(std::uint32_t seen, int microseconds) {
  const timespec limit{microseconds / 1000000, microseconds % 1000000 * 1000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&control_.header().wakes), FUTEX_WAIT, seen,
          &limit, nullptr, 0);
}

}  // namespace allreduce
