#include "replay/replay.h"

#include <chrono>

namespace allreduce {
namespace {

// A signal's handler, as that of Ctrl-C, is not to wait longer.
constexpr auto kPatience = std::chrono::milliseconds(50);
// So many operations take far less time, and reading the clock costs nothing in comparison.
constexpr std::size_t kUnwatched = 1 << 22;

}  // namespace

std::size_t Replay::run(std::size_t first, std::size_t last,
                        const std::function<bool()>& interrupted) const {
  using Clock = std::chrono::steady_clock;
  std::size_t work = 0;
  Clock::time_point asked{};
  for (std::size_t i = first; i < last; ++i) {
    const auto& [operations, task] = tasks_[i];
    if (!task(bases_)) return i - first;
    work += operations;
    if (work < kUnwatched) continue;
    work = 0;
    const Clock::time_point now = Clock::now();
    if (asked == Clock::time_point{}) asked = now;
    if (now - asked < kPatience) continue;
    if (interrupted()) return i + 1 - first;
    asked = now;
  }
  return last - first;
}

}  // namespace allreduce
