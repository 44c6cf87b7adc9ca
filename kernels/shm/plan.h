// Plans one member's part of a call through shared memory: pure, and without other members, so that
// a simulator can ask for any rank and size.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/progress/collectives.h"

namespace allreduce {

// Steps of different chunks overlap.
struct PlanStep {
  const char* name;
  bool past = false;  // stores to the output go past the caches
};

struct CallPlan {
  Path path = Path::eager;
  Way way;
  std::uint64_t chunks = 0;   // that go through the rings
  std::uint64_t staging = 0;  // bytes of staging memory, at most
  std::vector<PlanStep> steps;
};

// Where a member's arrays lie.
struct PlanArrays {
  bool symmetric;  // in symmetric memory, as far as the call's direct path needs that
  bool in_place;   // its own part of the output is that of the input
};

CallPlan plan_call(const CallSpec& spec, const Choices& choices, int me, int members,
                   const PlanArrays& arrays);

}  // namespace allreduce
