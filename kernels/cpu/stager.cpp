#include "stager.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "reduce_kernels.h"

namespace allreduce {
namespace {

// Below this, reading the clock would cost as much as the copy, and say as little.
constexpr std::size_t kMeasured = 16 << 10;
// The slower way is tried so rarely that trials take this part of the time of all copies.
constexpr double kTrialShare = 1.0 / 16;
constexpr double kRarestTrial = 1024;

}  // namespace

// Whatever disturbs a copy makes it longer: shorter ones are believed at once, longer ones slowly,
// and one during which the thread lost its core counts for no more than a few times what is known.
void Stager::Way::learn(double measured, double other) {
  if (cost == 0 || measured < cost)
    cost = measured;
  else
    cost += (std::min(measured, 4 * std::max(cost, other)) - cost) / 8;
}

void Stager::schedule_trial() {
  const double low = std::min(plain_.cost, stream_.cost),
               high = std::max(plain_.cost, stream_.cost);
  until_trial_ =
      low > 0 ? static_cast<unsigned>(std::min(high / low / kTrialShare, kRarestTrial)) : 2;
}

void Stager::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  bool stream = plain_.cost == 0 || stream_.cost <= plain_.cost;
  const bool measured = bytes >= kMeasured;
  const bool trial = measured && --until_trial_ == 0;
  if (trial) stream = !stream;
  const auto start =
      measured ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
  if (stream)
    kernels().stream_copy(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
  if (!measured) return;
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  Way& way = stream ? stream_ : plain_;
  way.learn(taken.count() / static_cast<double>(bytes), (stream ? plain_ : stream_).cost);
  if (trial) schedule_trial();
}

}  // namespace allreduce
