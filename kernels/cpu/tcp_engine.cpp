#include "tcp_engine.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <system_error>
#include <thread>

namespace allreduce::tcp {
namespace {

constexpr int kEvents = 64;

Engine* engine = nullptr;
std::mutex engine_mutex;

void forget_engine() {
  engine = nullptr;  // its thread is the parent's
  new (&engine_mutex) std::mutex;
}

}  // namespace

Engine& Engine::instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_engine);
  static_cast<void>(registered);
  const std::lock_guard lock(engine_mutex);
  if (engine == nullptr) engine = new Engine;
  return *engine;
}

Engine::Engine()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_ < 0 || wake_ < 0) {
    const int code = errno;
    if (epoll_ >= 0) close(epoll_);
    if (wake_ >= 0) close(wake_);
    throw std::system_error(code, std::generic_category(), "tcp engine");
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  // Signals are for the threads of Python.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { loop(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::post(std::function<void()> function) {
  bool first;
  {
    const std::lock_guard lock(mutex_);
    first = posts_.empty();
    posts_.push_back(std::move(function));
  }
  const std::uint64_t one = 1;
  if (first && write(wake_, &one, sizeof(one)) < 0) return;  // full: it is awake
}

void Engine::run(const std::function<void()>& function) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  post([&] {
    function();
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
}

void Engine::add(const std::shared_ptr<Member>& member) { members_.push_back(member); }

void Engine::remove(Member& member) {
  std::erase_if(members_, [&](const auto& one) { return one.get() == &member; });
}

void Engine::watch(Connection& connection, Member& member) {
  connection.registration = next_++;
  watched_[connection.registration] = {&connection, &member};
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = connection.registration;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, connection.fd(), &event);
}

void Engine::unwatch(Connection& connection) {
  if (watched_.erase(connection.registration) == 0) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.fd(), nullptr);
}

void Engine::update(Connection& connection, bool listens) {
  if (watched_.find(connection.registration) == watched_.end()) return;
  epoll_event event{};
  event.events = (listens ? EPOLLIN : 0u) | (connection.wants_send ? EPOLLOUT : 0u);
  event.data.u64 = connection.registration;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd(), &event);
}

void Engine::take_posts() {
  std::vector<std::function<void()>> posts;
  {
    const std::lock_guard lock(mutex_);
    posts.swap(posts_);
  }
  for (const auto& function : posts) function();
}

int Engine::patience() const {
  std::optional<Clock::time_point> first;
  for (const auto& member : members_) {
    const auto deadline = member->deadline();
    if (deadline && (!first || *deadline < *first)) first = deadline;
  }
  if (!first) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*first - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

void Engine::loop() {
  std::array<epoll_event, kEvents> events;
  for (;;) {
    const int count = epoll_wait(epoll_, events.data(), kEvents, patience());
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == 0) {
        std::uint64_t wakes;
        if (read(wake_, &wakes, sizeof(wakes)) < 0) continue;
        continue;
      }
      const auto found = watched_.find(event.data.u64);  // gone, if an earlier event ended it
      if (found == watched_.end()) continue;
      const bool readable = (event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0;
      const bool broken = (event.events & (EPOLLERR | EPOLLHUP)) != 0;
      found->second.member->on_ready(*found->second.connection, readable, broken);
    }
    take_posts();
    const auto now = Clock::now();
    const auto members = members_;  // a tick may remove one
    for (const auto& member : members) {
      member->tick(now);
      member->flush();
    }
  }
}

}  // namespace allreduce::tcp
