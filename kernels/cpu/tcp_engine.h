// The thread of a process that drives all its tcp members: one epoll loop.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tcp_member.h"

namespace allreduce::tcp {

class Engine {
 public:
  // One per process, with its thread; a child made by fork gets a new one when it asks.
  static Engine& instance();

  // Has the thread run a function, and returns at once.
  void post(std::function<void()> function);
  // Waits until it has run.
  void run(const std::function<void()>& function);

  // --- the engine's thread ---
  void add(const std::shared_ptr<Member>& member);
  void remove(Member& member);
  void watch(Connection& connection, Member& member);
  void unwatch(Connection& connection);
  // After `wants_send` has changed; `listens`: whether it is still read.
  void update(Connection& connection, bool listens);

 private:
  struct Watched {
    Connection* connection;
    Member* member;
  };
  Engine();
  void loop();
  void take_posts();
  int patience() const;

  int epoll_;
  int wake_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posts_;
  std::vector<std::shared_ptr<Member>> members_;
  std::unordered_map<std::uint64_t, Watched> watched_;
  std::uint64_t next_ = 1;
};

}  // namespace allreduce::tcp
