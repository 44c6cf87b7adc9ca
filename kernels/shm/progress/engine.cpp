#include "shm/progress/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace allreduce {
namespace {

using Clock = std::chrono::steady_clock;

// Spins before the first yield: about 10 us. A peer on another core has answered by then; one that
// waits for this core gets it. With two members on one core, 1500 spins made each hand-over 60 us.
constexpr int kSpins = 200;
// A look at the clock and at other members' calls costs as much as many spins.
constexpr int kSpinsPerRound = 64;
// Steps between two looks around, at the clock and for signals: a step takes some tens of us.
constexpr int kStepsPerRound = 16;
// Yields are cheap while the peer runs on this core; past this time it does something else.
constexpr auto kYieldTime = std::chrono::microseconds(500);
// Bounds how late a dead process is noticed by a sleeper, and a call that another thread started.
constexpr int kSleepMicroseconds = 10000;
constexpr int kShortSleepMicroseconds = 500;
constexpr auto kSignalInterval = std::chrono::milliseconds(50);
// The time that a waiting thread spends on other members' calls at once. With one step each per
// millisecond, 256 MB between 2 processes took 11 s instead of 0.3.
constexpr auto kTurn = std::chrono::milliseconds(1);
// In which a peer that waits has seen a step, and done the next one.
constexpr auto kAnswer = std::chrono::microseconds(100);

Engine* engine = nullptr;
std::once_flag engine_once;

// Spins, yields, then sleeps, as long as nothing moves.
class Patience {
 public:
  explicit Patience(bool crowded) : first_spin_(crowded ? kSpins : 0), spins_(first_spin_) {}

  void reset() { spins_ = first_spin_; }
  // Whether a spin is all that is due now; if not, it is time to look around.
  bool spin() {
    if (spins_ >= kSpins) return false;
    ++spins_;
    relax();
    return spins_ % kSpinsPerRound != 0;
  }
  // Whether spinning and yielding is over.
  bool spent(Clock::time_point now) {
    if (spins_ < kSpins) return false;
    if (spins_ == kSpins) yields_until_ = now + kYieldTime;
    ++spins_;
    return now >= yields_until_;
  }
  bool spinning() const { return spins_ < kSpins; }

 private:
  const int first_spin_;
  int spins_;
  Clock::time_point yields_until_;
};

// Counts a thread as driving a member for as long as it waits.
class Driving {
 public:
  explicit Driving(Member& member) : member_(member) { member_.waiters.fetch_add(1); }
  ~Driving() { member_.waiters.fetch_sub(1); }

 private:
  Member& member_;
};

// Pairs with the stores of `done`: after these a thread looks for sleepers, and a sleeper looks
// here after it has registered (Group::publish, Group::sleep), so one of them sees the other.
bool settled(const Work& work) {
  return work.state.load(std::memory_order_seq_cst) != State::pending;
}

}  // namespace

Engine& Engine::instance() {
  std::call_once(engine_once, [] {
    engine = new Engine;
    pthread_atfork(nullptr, nullptr, [] { engine = new Engine; });
  });
  return *engine;
}

void Engine::add(Member* member) {
  std::lock_guard lock(mutex_);
  members_.push_back(member);
}

void Engine::remove(Member* member) {
  std::lock_guard lock(mutex_);
  std::erase(members_, member);
}

Others Engine::drive_others(const Member* except) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return Others::blocked;
  Others others = Others::idle;
  for (Member* member : members_) {
    if (member == except || !member->busy() || member->waiters.load() != 0) continue;
    if (member->advance() != Progress::blocked)
      others = Others::moved;
    else if (others == Others::idle)
      others = Others::blocked;
  }
  return others;
}

Others Engine::drive_all() {
  auto now = Clock::now(), until = now;
  const auto end = now + kTurn;
  for (;;) {
    const Others others = drive_others(nullptr);
    now = Clock::now();
    if (others == Others::moved)
      until = now + kAnswer;
    else if (others == Others::idle || now >= until)
      return others;
    else
      sched_yield();
    if (now >= end) return others;
  }
}

Outcome Engine::wait(Member& member, Work& work, double seconds,
                     const std::function<bool()>& interrupted) {
  const Driving driving(member);
  Group& group = member.group();
  Patience patience(group.oversubscribed());
  int steps = 0;  // since the last look around
  const auto drive = [&] {
    const int before = steps;
    while (steps < kStepsPerRound && !settled(work) && member.advance() != Progress::blocked)
      ++steps;
    return steps != before;
  };
  Clock::time_point start{}, next_peers{}, next_signals{};
  for (;;) {
    const bool moved = drive();
    if (settled(work)) break;
    if (moved) patience.reset();
    if (steps < kStepsPerRound && patience.spin()) continue;
    steps = 0;
    const auto now = Clock::now();
    if (start == Clock::time_point{}) {
      start = now;
      next_peers = now + Member::kLookInterval;
      next_signals = now + kSignalInterval;
    }
    const Others others = drive_others(&member);
    const bool expired = now - start >= std::chrono::duration<double>(seconds);
    if (now >= next_peers || expired) {  // a thread that polls without waiting has to look, too
      member.check_peers(now);
      next_peers = now + Member::kLookInterval;
    }
    if (now >= next_signals) {
      // It may wait for the GIL, and other threads that wait then drive this member, too.
      member.waiters.fetch_sub(1);
      const bool stop = interrupted();
      member.waiters.fetch_add(1);
      if (stop) return Outcome::interrupted;
      next_signals = now + kSignalInterval;
    }
    if (expired) return Outcome::expired;
    if (others == Others::moved || patience.spinning()) continue;
    if (!patience.spent(now))
      sched_yield();
    else
      group.sleep(others == Others::idle ? kSleepMicroseconds : kShortSleepMicroseconds,
                  [&] { return drive() || settled(work); });
  }
  return work.state.load(std::memory_order_acquire) == State::done ? Outcome::done
                                                                   : Outcome::failed;
}

}  // namespace allreduce
