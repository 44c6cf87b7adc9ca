// Members of one communicator of the shared transport as threads, and checks that end the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shm/progress/engine.h"
#include "shm/progress/member.h"

namespace allreduce {

[[noreturn]] inline void fail(std::string_view what) {
  std::fprintf(stderr, "FAILED: %.*s\n", static_cast<int>(what.size()), what.data());
  std::exit(1);
}

// Called for every element: it makes no string of what it may have to say.
inline void check(bool condition, std::string_view what) {
  if (!condition) fail(what);
}

inline Outcome wait(Member& member, Work& work, double seconds = 60) {
  static const std::function<bool()> kNever = [] { return false; };
  return Engine::instance().wait(member, work, seconds, kNever);
}

inline void finish(Member& member, const std::shared_ptr<Work>& work, const std::string& what) {
  check(wait(member, *work) == Outcome::done, what + " did not complete");
}

// Runs `body(member)` in a thread per member of one group.
inline void run_members(int size, Choices choices, const std::function<void(Member&)>& body) {
  auto group = std::make_shared<Group>(-1, size, 2, std::move(choices));
  std::vector<std::thread> threads;
  for (int index = 0; index < size; ++index)
    threads.emplace_back([&, index] {
      Member member(group, index);
      body(member);
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace allreduce
