// The progress of a whole process: a thread that waits for one call also performs this process's
// share of all other started calls that nobody drives, over all communicators. Waits in different
// orders on different ranks then cannot deadlock.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/member.h"

namespace allreduce {

// Lets the other thread of this core go on, between two looks at what a peer is to write.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

enum class Outcome { done, failed, expired, interrupted };
// What the rest of the process has to do: nothing, nothing that is possible now, or it did some.
enum class Others { idle, blocked, moved };

class Engine {
 public:
  // One per process; a child made by fork gets a new one, whose locks nobody holds.
  static Engine& instance();

  void add(Member* member);
  void remove(Member* member);

  // Drives until the work is done or failed, `seconds` have passed, or `interrupted` says so (asked
  // every 50 ms).
  Outcome wait(Member& member, Work& work, double seconds,
               const std::function<bool()>& interrupted);
  // One round over all members that nobody waits for.
  Others drive_others(const Member* except);
  // Rounds over all of them as long as there is something to do, and until who waits for that has
  // answered; for a millisecond at most.
  Others drive_all();

 private:
  std::mutex mutex_;
  std::vector<Member*> members_;
};

}  // namespace allreduce
