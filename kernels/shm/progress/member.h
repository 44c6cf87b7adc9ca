// One member of a communicator in this process: its queue of started calls, in start order.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "shm/p2p/p2p.h"
#include "shm/progress/collectives.h"

namespace allreduce {

class Member {
 public:
  using Clock = std::chrono::steady_clock;
  // Between two looks at the control plane, each of which is a system call.
  static constexpr auto kLookInterval = std::chrono::milliseconds(10);
  // If a member left because of a death, that death shows within this time: the system closes the
  // dead process's sockets one after the other, with other work in between.
  static constexpr auto kLastDeaths = std::chrono::milliseconds(100);
  // How long a call that all had begun goes on without progress after a death.
  static constexpr auto kLastCalls = std::chrono::milliseconds(100);

  Member(std::shared_ptr<Group> group, int index);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Group& group() const { return *group_; }
  int index() const { return share_.me; }

  // Chooses the call's path and queues it; posts it if the ring of slots has room, never blocks.
  // An array that the call does not need here is null.
  // With an update both arrays must lie in symmetric memory, and it has to stay until the end.
  std::shared_ptr<Work> start(Call call, const std::byte* in, std::byte* out, Details details = {},
                              const Update* update = nullptr);
  // Starts a send to the member `call.root`, or a recv from it. A tag, and a recv's source, may be
  // kAny.
  std::shared_ptr<Work> start_message(const Call& call, std::int64_t tag, const std::byte* in,
                                      std::byte* out, std::string note = {});
  // Advances the first unfinished call, and the messages; blocked also if another thread does so.
  Progress advance();
  // Works on the control plane while a wait lasts: dead processes, members that left, mismatches.
  // Does nothing if it has done so just now.
  void check_peers(Clock::time_point now);
  // The call that was started last, if it has not settled.
  std::shared_ptr<Work> last();
  // Refuses new calls, drops started ones, and informs the others. Idempotent.
  void leave();
  // Tells the others about its call `seq`, unless it has done so.
  void note(std::uint64_t seq, std::string_view text);
  // The bytes of arrays here that other processes may still store into, once this member has failed
  // or left: they may be stopped in the middle of a call, and go on at any time.
  std::uint64_t exposed();
  // Takes those out of the memory that processes share; throws std::system_error if some stay.
  void isolate();
  // Kills the communicator in this member's name.
  void abort(std::string_view reason);
  // Kills it because a call or a message took too long, unless it is complete by now. `blamed` is
  // the member that a call waits for; a message blames its other side.
  void give_up(const Work& work, int blamed, std::string_view reason);

  bool busy() const { return pending_.load(std::memory_order_acquire) != 0 || messages_.busy(); }
  // How long a quick call waits before Python takes over: bindings/comm/fast_method.cpp.
  double fast_seconds = 0;
  // Threads that wait for this member's works, and so drive it.
  std::atomic<int> waiters{0};

 private:
  bool locate(Work& work);
  void post_ready();
  bool finished_by_all(std::uint64_t calls);
  bool may_complete(Work& head);
  void copy_alone(Work& work);
  void expose(const Work& work);
  void expose(const std::shared_ptr<SymmetricRegion>& region, std::byte* low, std::uint64_t bytes);
  void fail_all();

  const std::shared_ptr<Group> group_;
  std::mutex mutex_;
  Share share_;
  Messages messages_;
  std::deque<std::shared_ptr<Work>> queue_;
  std::atomic<std::size_t> pending_{0};
  std::uint64_t started_ = 0;          // calls so far
  std::uint64_t posted_ = 0;           // of them, in their slots
  std::uint64_t known_done_ = 0;       // every member has finished at least so many
  std::uint64_t ring_position_ = 0;    // places of all staged calls so far
  Clock::time_point looked_{};         // at the control plane
  Clock::time_point left_seen_{};      // when it was first seen there that some have left
  Clock::time_point blocked_since_{};  // in its first call, after a death
  bool left_ = false;
  // Memory here into which others may still store.
  struct Exposed {
    std::shared_ptr<SymmetricRegion> region;
    std::byte *low, *high;
  };
  std::vector<Exposed> exposed_;
  std::mutex isolating_;  // before mutex_
};

}  // namespace allreduce
