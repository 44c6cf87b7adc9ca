// The progress of a whole process: a thread that waits for one call also performs this process's
// share of all other started calls that no thread drives, over all communicators, so that waits in
// different orders on different ranks cannot deadlock.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/progress/member.h"

namespace allreduce {

// Yields to the core's other hardware thread between two polls.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

enum class Outcome { done, failed, expired, interrupted };
// Progress of the rest of the process: nothing to do, nothing possible now, or some done.
enum class Others { idle, blocked, moved };

class Engine {
 public:
  // One per process; a child made by fork gets a new one with free locks.
  static Engine& instance();

  void add(Member* member);
  void remove(Member* member);

  // Drives until the work is done or failed, `seconds` have passed, or `interrupted` says so (asked
  // every 50 ms).
  Outcome wait(Member& member, Work& work, double seconds,
               const std::function<bool()>& interrupted);
  // One round over all members that no thread waits for.
  Others drive_others(const Member* except);
  // Rounds over all of them while there is progress, until the waiting peers have answered; for a
  // millisecond at most.
  Others drive_all();

 private:
  std::mutex mutex_;
  std::vector<Member*> members_;
};

}  // namespace allreduce
