// A started call, as the thread that waits for it sees it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "tcp/io/protocol.h"

namespace allreduce::tcp {

class Work {
 public:
  explicit Work(Request given) : request(std::move(given)) {}

  // Its arrays, which the engine reads and writes until it is settled, and what it is.
  Request request;
  std::atomic<std::uint64_t> key{0};  // given by the engine
  std::atomic<bool> met{false};       // a recv and its message

  State state() const { return state_.load(std::memory_order_acquire); }
  bool settled() const { return state() != State::pending; }

  // Called by the engine, after the last access to the arrays.
  void settle(State state) {
    {
      const std::lock_guard lock(mutex_);
      state_.store(state, std::memory_order_release);
    }
    changed_.notify_all();
  }

  // Blocks until it is settled or the time is over.
  bool wait(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return settled(); });  // by the steady clock
  }

 private:
  std::atomic<State> state_{State::pending};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace allreduce::tcp
