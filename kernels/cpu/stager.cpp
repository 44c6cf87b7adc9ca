#include "stager.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "reduce_kernels.h"

namespace allreduce {
namespace {

// The slower way is tried so rarely that trials cost about this part of all calls' time.
constexpr double kTrialShare = 1.0 / 32;
constexpr double kRarestTrial = 1024;

// Whatever disturbs a call makes it longer: shorter times are believed at once, longer ones slowly,
// and one during which a member lost its core counts for no more than a few times what is known.
void learn(double& cost, double measured, double other) {
  if (cost == 0 || measured < cost)
    cost = measured;
  else
    cost += (std::min(measured, 4 * std::max(cost, other)) - cost) / 8;
}

}  // namespace

void Stager::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (streams())
    kernels().stream_copy(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

void Stager::begin(std::size_t bytes) {
  if (!decides_) return;
  timed_ = &costs_[static_cast<std::size_t>(std::bit_width(bytes))];
  const auto& ways = timed_->ways;
  bool plain = ways[1] != 0 && ways[1] < ways[0];
  if (timed_->until_trial-- == 0) {
    plain = !plain;
    const double low = std::min(ways[0], ways[1]), high = std::max(ways[0], ways[1]);
    timed_->until_trial =
        low > 0 ? static_cast<unsigned>(std::min(high / low / kTrialShare, kRarestTrial)) : 1;
  }
  plain_.store(plain ? 1 : 0, std::memory_order_relaxed);
  start_ = Clock::now();
}

void Stager::end() {
  if (timed_ == nullptr) return;
  const std::chrono::duration<double, std::nano> taken = Clock::now() - start_;
  const std::size_t way = plain_.load(std::memory_order_relaxed);
  learn(timed_->ways[way], taken.count(), timed_->ways[1 - way]);
  timed_ = nullptr;
}

}  // namespace allreduce
