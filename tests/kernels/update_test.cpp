// Updates where gradients are reduced, with members as threads, for the sanitizers: pieces of all
// lengths in flight behind the header that says whether they may be done.
//
// Usage: update_test <rounds>. Prints "ok" and exits 0, or says what is wrong and exits 1.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "members.h"

using namespace allreduce;

namespace {

constexpr std::size_t kHeader = 16, kRoom = 60000;

Choices choices(int members) {
  Choices made;
  for (std::size_t i = 0; i < kCollectives; ++i) {
    const Way staged{kPlace << 4, false, UINT64_MAX}, direct{i % 2 ? kPage : 0, false, UINT64_MAX};
    check(made.set(static_cast<Collective>(i), {kSmall, {{UINT64_MAX, direct, {}, staged}}},
                   members) == "",
          "rules");
  }
  return made;
}

// What it keeps of an element is how often it was updated; values move by the sums of gradients.
class Descent : public TypedUpdate<float> {
 public:
  Descent(const float* header, float* slots, std::uint64_t count) : slots_(slots) {
    header_ = header;
    count_ = count;
  }
  void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
             std::uint64_t count) const override {
    for (std::uint64_t i = 0; i < count; ++i) {
      float value, sum;
      std::memcpy(&value, values + i * sizeof(float), sizeof(float));
      std::memcpy(&sum, sums + i * sizeof(float), sizeof(float));
      value -= sum / *header_;
      std::memcpy(values + i * sizeof(float), &value, sizeof(float));
      slots_[low + i] += 1;
    }
  }

 private:
  float* slots_;
};

float gradient(int member, std::size_t i, int step) {
  return static_cast<float>((i + static_cast<std::size_t>(member + step)) % 5);
}

// One member's memory: header and gradients, and the values.
struct Memory {
  float *gradients, *values;
  std::vector<float> slots = std::vector<float>(kRoom);
};

void write_gradients(const Memory& memory, int me, int step, bool agree) {
  memory.gradients[0] = 1;  // a sample of each member
  for (std::size_t i = 1; i < kHeader; ++i)
    memory.gradients[i] = agree || me == 0 ? 1.0f : static_cast<float>(i % 2);
  for (std::size_t i = kHeader; i < kRoom; ++i) memory.gradients[i] = gradient(me, i, step);
}

void step(Member& member, Memory& memory, int number, bool agree) {
  const int size = member.group().members();
  write_gradients(memory, member.index(), number, agree);
  const std::vector<float> sums(kHeader - 1, static_cast<float>(size));
  constexpr std::size_t cuts[] = {kHeader, kHeader + 1, 2000, 2016, 30001, kRoom};
  std::vector<std::unique_ptr<Descent>> updates;
  std::vector<std::shared_ptr<Work>> works;
  Call call{.collective = Collective::all_reduce, .op = Op::sum, .type = Type::float32};
  call.count = kHeader;
  auto* header = reinterpret_cast<std::byte*>(memory.gradients);
  works.push_back(member.start(call, header, header));
  for (std::size_t k = 0; k + 1 < std::size(cuts); ++k) {
    const std::size_t low = cuts[k];
    call.count = cuts[k + 1] - low;
    updates.push_back(
        std::make_unique<Descent>(memory.gradients, memory.slots.data() + low, call.count));
    updates.back()->expected.assign(reinterpret_cast<const char*>(sums.data()),
                                    sums.size() * sizeof(float));
    updates.back()->keeps = k % 2 == 1;
    works.push_back(member.start(call, reinterpret_cast<std::byte*>(memory.gradients + low),
                                 reinterpret_cast<std::byte*>(memory.values + low), {},
                                 updates.back().get()));
  }
  for (const auto& work : works) finish(member, work, "an update");
}

void test_updates(int size) {
  run_members(size, choices(size), [&](Member& member) {
    Group& group = member.group();
    if (member.index() == 0)
      for (std::uint32_t id : {1, 2}) group.map_region(id, -1, kRoom * sizeof(float), size);
    finish(member, member.start(Call{}, nullptr, nullptr), "barrier");
    const auto first = group.claim_region(1), second = group.claim_region(2);
    Memory memory{reinterpret_cast<float*>(first->part(member.index())),
                  reinterpret_cast<float*>(second->part(member.index()))};
    std::vector<float> expected(kRoom);
    for (int number = 0; number < 4; ++number) {
      const bool agree = number != 2;
      step(member, memory, number, agree);
      for (std::size_t i = kHeader; agree && i < kRoom; ++i) {
        float sum = 0;
        for (int other = 0; other < size; ++other) sum += gradient(other, i, number);
        expected[i] -= sum / static_cast<float>(size);
      }
      check(std::memcmp(memory.values, expected.data(), kRoom * sizeof(float)) == 0,
            agree ? "values" : "values of members that do not agree");
    }
    float updated = 0;  // three times, what is this member's
    for (float times : memory.slots) updated += times;
    check(updated < 3.0f * kRoom, "a member has updated all");
    finish(member, member.start(Call{}, nullptr, nullptr), "barrier");
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int round = 0; round < rounds; ++round)
    for (int size : {2, 3, 4}) test_updates(size);
  std::puts("ok");
  return 0;
}
