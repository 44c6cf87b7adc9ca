#include "tcp/io/engine.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
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

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Runs a member's function; a shortage ends the member, not the process.
template <class Function>
void guard(Member& member, const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    member.collapse(error.what());
  }
}

// Blocks signals for threads created meanwhile: Python's threads handle them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd < 0) fail("a descriptor of the tcp engine");
}

Descriptor::~Descriptor() { close(fd_); }

Engine& Engine::instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_engine);
  static_cast<void>(registered);
  const std::lock_guard lock(engine_mutex);
  if (engine == nullptr) engine = new Engine;
  return *engine;
}

Engine::Engine()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) fail("epoll_ctl");
  const SignalsBlocked blocked;
  std::thread([this] { loop(); }).detach();
}

void Engine::queue(Post post) {
  bool first;
  {
    const std::lock_guard lock(mutex_);
    first = posts_.empty();
    posts_.push_back(std::move(post));
  }
  const std::uint64_t one = 1;
  if (first && write(wake_.get(), &one, sizeof(one)) < 0) return;  // full: it is awake
}

void Engine::post(std::shared_ptr<Member> member, std::function<void()> function) {
  queue({std::move(member), std::move(function)});
}

void Engine::run(const std::function<void()>& function) {
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr failure;
  bool done = false;
  queue({nullptr, [&] {
           try {
             function();
           } catch (...) {
             failure = std::current_exception();
           }
           const std::lock_guard lock(mutex);
           done = true;
           changed.notify_all();
         }});
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
  if (failure) std::rethrow_exception(failure);
}

void Engine::add(const std::shared_ptr<Member>& member) { members_.push_back(member); }

void Engine::remove(Member& member) {
  std::erase_if(members_, [&](const auto& one) { return one.get() == &member; });
}

void Engine::watch(Connection& connection, Member& member) {
  const std::uint64_t registration = next_++;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = registration;
  watched_[registration] = {&connection, &member};
  connection.registration = registration;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.fd(), &event) != 0) fail("epoll_ctl");
}

void Engine::unwatch(Connection& connection) {
  if (watched_.erase(connection.registration) == 0) return;
  // Fails only for descriptors that were never watched.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd(), nullptr);
}

void Engine::update(Connection& connection, bool listens) {
  if (watched_.find(connection.registration) == watched_.end()) return;
  epoll_event event{};
  event.events = (listens ? EPOLLIN : 0u) | (connection.wants_send ? EPOLLOUT : 0u);
  event.data.u64 = connection.registration;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd(), &event) != 0) fail("epoll_ctl");
}

void Engine::take_posts() {
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    posts.swap(posts_);
  }
  for (const Post& post : posts) {
    if (post.member)
      guard(*post.member, post.function);
    else
      post.function();
  }
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

void Engine::take(const epoll_event& event) {
  if (event.data.u64 == 0) {
    std::uint64_t wakes;
    if (read(wake_.get(), &wakes, sizeof(wakes)) < 0) return;  // an earlier one took them all
    return;
  }
  const auto found = watched_.find(event.data.u64);  // gone, if an earlier event ended it
  if (found == watched_.end()) return;
  const Watched watched = found->second;
  const Member::Ready ready{(event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0,
                            (event.events & (EPOLLHUP | EPOLLERR)) != 0};
  guard(*watched.member, [&] { watched.member->on_ready(*watched.connection, ready); });
}

void Engine::loop() {
  std::array<epoll_event, kEvents> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), kEvents, patience());
    for (int i = 0; i < count; ++i) take(events[static_cast<std::size_t>(i)]);
    take_posts();
    const auto now = Clock::now();
    for (std::size_t i = 0; i < members_.size();) {
      const std::shared_ptr<Member> member = members_[i];
      guard(*member, [&] {
        member->tick(now);
        member->flush();
      });
      if (i < members_.size() && members_[i] == member) ++i;  // else it has left
    }
  }
}

}  // namespace allreduce::tcp
