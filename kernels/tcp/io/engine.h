// The thread of a process that drives all its tcp members: one epoll loop.
#pragma once

#include <sys/epoll.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tcp/member/member.h"

namespace allreduce::tcp {

// A descriptor of the kernel's, closed with its owner.
class Descriptor {
 public:
  // Takes the result of a system call; throws std::system_error if it failed.
  explicit Descriptor(int fd);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

class Engine {
 public:
  // One per process, with its thread; a child made by fork gets a new one when it asks.
  static Engine& instance();

  // Has the thread run a function of a member, and returns at once. If it throws, the member ends.
  void post(std::shared_ptr<Member> member, std::function<void()> function);
  // Waits until a function has run, and rethrows its exception.
  void run(const std::function<void()>& function);

  // --- the engine's thread; failures throw std::system_error ---
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
  struct Post {
    std::shared_ptr<Member> member;  // null: the function throws nothing
    std::function<void()> function;
  };
  Engine();
  void queue(Post post);
  void loop();
  void take(const epoll_event& event);
  void take_posts();
  int patience() const;

  const Descriptor epoll_;
  const Descriptor wake_;
  std::mutex mutex_;
  std::vector<Post> posts_;
  std::vector<std::shared_ptr<Member>> members_;
  std::unordered_map<std::uint64_t, Watched> watched_;
  std::uint64_t next_ = 1;
};

}  // namespace allreduce::tcp
