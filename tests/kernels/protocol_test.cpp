// The shared transport's protocol with members as threads, for the sanitizers: every path of every
// collective, works in flight, members that run ahead, wait in other orders, disagree and abort.
//
// Usage: protocol_test <rounds>. Prints "ok" and exits 0, or says what is wrong and exits 1.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "members.h"

using namespace allreduce;

namespace {

// Every size of chunk and kind of store for some collective, and several for one; what can be is
// cross_process in one of its bands, and what has short chunks pairwise in one, or instead of being
// cross_process.
Choices choices(int members) {
  Choices made;
  for (std::uint64_t i = 0; i < kCollectives; ++i) {
    const std::uint64_t chunk = kPlace << (2 + i % 6);
    const auto collective = static_cast<Collective>(i);
    const Way cross_process{copies(collective) ? kPage * 3 : 0, false, 9000}, none;
    const Way soon{chunk, i % 3 == 0, i % 2 == 0 ? 5000u : UINT64_MAX};
    const Band low{100000, {}, i % 2 == 1 ? cross_process : none, soon};
    const bool pairwise = members == 2 && chunk <= kLap * kPlace;
    const Way late{chunk, i % 3 == 1, 100000, pairwise}, direct{64 << 10, false, 200000};
    const Band high{UINT64_MAX, direct, i % 2 == 0 ? cross_process : none, late};
    check(made.set(collective, {kSmall, {low, high}}, members) == "", "rules");
  }
  return made;
}

void ranks(int size, const std::function<void(Member&)>& body) {
  run_members(size, choices(size), body);
}

template <class T>
std::byte* bytes(T* data) {
  return reinterpret_cast<std::byte*>(data);
}

float value(int member, std::size_t i) { return static_cast<float>((i * 7 + member * 3) % 11); }

float expected_sum(int size, std::size_t i) {
  float sum = 0;
  for (int member = 0; member < size; ++member) sum += value(member, i);
  return sum;
}

Call reduction(Collective collective, std::size_t count) {
  return {.collective = collective, .op = Op::sum, .type = Type::float32, .count = count};
}

// The collectives that give to the root only, or take from it.
void rooted(Member& member, float* in, float* out, std::size_t count) {
  const int size = member.group().members(), me = member.index(), root = size / 2;
  const std::size_t n = static_cast<std::size_t>(size);
  for (std::size_t i = 0; i < count * n; ++i) in[i] = value(me, i);
  const auto run = [&](Collective collective, Op op, bool has_in, bool has_out) {
    const Call call{
        .collective = collective, .op = op, .type = Type::float32, .root = root, .count = count};
    finish(member, member.start(call, has_in ? bytes(in) : nullptr, has_out ? bytes(out) : nullptr),
           "a rooted collective");
  };
  run(Collective::reduce, Op::sum, true, me == root);
  for (std::size_t i = 0; me == root && i < count; ++i)
    check(out[i] == expected_sum(size, i), "reduce");
  run(Collective::gather, Op::none, true, me == root);
  for (std::size_t i = 0; me == root && i < count * n; ++i)
    check(out[i] == value(static_cast<int>(i / count), i % count), "gather");
  run(Collective::scatter, Op::none, me == root, true);
  for (std::size_t i = 0; i < count; ++i)
    check(out[i] == value(root, i + count * static_cast<std::size_t>(me)), "scatter");
}

// Elements of a member's share where they differ; one has none.
std::uint64_t share(int member, std::size_t count) {
  return member == 1 ? 0 : count / static_cast<std::size_t>(member + 1);
}

// all_to_all with equal shares and with unequal ones; the others with unequal shares.
void exchange(Member& member, float* in, float* out, std::size_t count) {
  const int size = member.group().members(), me = member.index();
  const std::size_t n = static_cast<std::size_t>(size);
  for (std::size_t i = 0; i < count * n; ++i) in[i] = value(me, i);
  Call call{.collective = Collective::all_to_all, .type = Type::float32, .count = count};
  finish(member, member.start(call, bytes(in), bytes(out)), "all_to_all");
  for (std::size_t i = 0; i < count * n; ++i)
    check(out[i] ==
              value(static_cast<int>(i / count), i % count + static_cast<std::size_t>(me) * count),
          "all_to_all");
  Details common, mine;
  for (auto* offsets : {&common.offsets, &mine.offsets, &mine.receives}) offsets->push_back(0);
  for (int other = 0; other < size; ++other) {
    common.offsets.push_back(common.offsets.back() + share(other, count));
    mine.offsets.push_back(mine.offsets.back() + share((me + other) % size, count));
    mine.receives.push_back(mine.receives.back() + share((me + other) % size, count));
  }
  call.count = 0;
  finish(member, member.start(call, bytes(in), bytes(out), mine), "an unequal all_to_all");
  for (int from = 0; from < size; ++from) {
    std::uint64_t low = 0;  // of this member's part of the other's input
    for (int to = 0; to < me; ++to) low += share((from + to) % size, count);
    const std::uint64_t at = mine.receives[static_cast<std::size_t>(from)];
    for (std::uint64_t i = 0; i < share((me + from) % size, count); ++i)
      check(out[at + i] == value(from, low + i), "an unequal all_to_all");
  }
  call.count = common.offsets.back();
  call.collective = Collective::all_gather;
  finish(member, member.start(call, bytes(in), bytes(out), common), "an unequal all_gather");
  for (int from = 0; from < size; ++from)
    for (std::uint64_t i = 0; i < share(from, count); ++i)
      check(out[common.offsets[static_cast<std::size_t>(from)] + i] == value(from, i),
            "an unequal all_gather");
  call.collective = Collective::reduce_scatter;
  call.op = Op::sum;
  finish(member, member.start(call, bytes(in), bytes(out), common), "an unequal reduce_scatter");
  for (std::uint64_t i = 0; i < share(me, count); ++i)
    check(out[i] == expected_sum(size, i + common.offsets[static_cast<std::size_t>(me)]),
          "an unequal reduce_scatter");
}

// Every collective on the given arrays of `count` times `size` elements.
void collectives(Member& member, float* in, float* out, std::size_t count) {
  const int size = member.group().members(), me = member.index();
  const std::size_t n = static_cast<std::size_t>(size);
  const auto fill = [&](std::size_t elements) {
    for (std::size_t i = 0; i < elements; ++i) in[i] = value(me, i);
  };
  fill(count);
  finish(member, member.start(reduction(Collective::all_reduce, count), bytes(in), bytes(out)),
         "all_reduce");
  for (std::size_t i = 0; i < count; ++i) check(out[i] == expected_sum(size, i), "all_reduce");
  finish(member, member.start(reduction(Collective::all_reduce, count), bytes(in), bytes(in)),
         "all_reduce in place");
  for (std::size_t i = 0; i < count; ++i) check(in[i] == expected_sum(size, i), "in place");
  fill(count * n);
  finish(member, member.start(reduction(Collective::reduce_scatter, count), bytes(in), bytes(out)),
         "reduce_scatter");
  for (std::size_t i = 0; i < count; ++i)
    check(out[i] == expected_sum(size, i + count * static_cast<std::size_t>(me)), "scatter");
  Call gather{.collective = Collective::all_gather, .type = Type::float32, .count = count};
  finish(member, member.start(gather, bytes(in), bytes(out)), "all_gather");
  for (int from = 0; from < size; ++from)
    for (std::size_t i = 0; i < count; ++i)
      check(out[static_cast<std::size_t>(from) * count + i] == value(from, i), "all_gather");
  Call broadcast{
      .collective = Collective::broadcast, .type = Type::float32, .root = size - 1, .count = count};
  finish(member, member.start(broadcast, bytes(in), bytes(out)), "broadcast");
  for (std::size_t i = 0; i < count; ++i) check(out[i] == value(size - 1, i), "broadcast");
  rooted(member, in, out, count);
  exchange(member, in, out, count);
}

void test_collectives(int size) {
  for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{11}, std::size_t{900},
                            std::size_t{5003}, std::size_t{100003}}) {
    const std::size_t room = std::max<std::size_t>(1, count * static_cast<std::size_t>(size));
    ranks(size, [&](Member& member) {
      // Elsewhere in a cache line on every member.
      const std::size_t skipped = static_cast<std::size_t>(member.index()) * 5;
      std::vector<float> in(skipped + room), out(skipped + room);
      collectives(member, in.data() + skipped, out.data() + skipped, count);
    });
  }
}

void test_symmetric(int size) {
  constexpr std::size_t count = 50021;
  const std::size_t room = count * static_cast<std::size_t>(size) * sizeof(float);
  ranks(size, [&](Member& member) {
    if (member.index() == 0) {
      member.group().map_region(1, -1, room, size);
      member.group().map_region(2, -1, room, size);
    }
    Call barrier{};
    finish(member, member.start(barrier, nullptr, nullptr), "barrier");
    auto in = member.group().claim_region(1), out = member.group().claim_region(2);
    for (int round = 0; round < 3; ++round)
      collectives(member, reinterpret_cast<float*>(in->part(member.index())),
                  reinterpret_cast<float*>(out->part(member.index())), count);
    finish(member, member.start(barrier, nullptr, nullptr), "barrier");
  });
}

// More works than slots, of all sizes, waited for in another order on each member.
void test_in_flight(int size, unsigned seed) {
  ranks(size, [&](Member& member) {
    constexpr std::size_t lengths[] = {1, 700, 3000, 40000};
    struct One {
      std::vector<float> in, out;
      std::shared_ptr<Work> work;
    };
    std::vector<One> all(150);
    for (std::size_t k = 0; k < all.size(); ++k) {
      const std::size_t count = lengths[k % 4];
      all[k].in.assign(count, static_cast<float>(k % 50 + static_cast<unsigned>(member.index())));
      all[k].out.assign(count, -1);
      all[k].work = member.start(reduction(Collective::all_reduce, count), bytes(all[k].in.data()),
                                 bytes(all[k].out.data()));
    }
    std::vector<std::size_t> order(all.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    std::mt19937 random(seed + static_cast<unsigned>(member.index()));
    for (std::size_t k = order.size(); k-- > 1;) std::swap(order[k], order[random() % (k + 1)]);
    for (std::size_t k : order) {
      finish(member, all[k].work, "a work in flight");
      const float expected = static_cast<float>((k % 50) * static_cast<unsigned>(size) +
                                                static_cast<unsigned>(size * (size - 1) / 2));
      for (float got : all[k].out) check(got == expected, "a work in flight got another's values");
    }
  });
}

// Two communicators whose works are waited for in opposite orders, by one thread per rank.
void test_two_communicators(int size) {
  auto other = std::make_shared<Group>(-1, size, 2, choices(size));
  ranks(size, [&](Member& first) {
    Member second(other, first.index());
    for (int round = 0; round < 20; ++round) {
      std::vector<float> a(60000, 1), b(60000, 2);
      auto call = reduction(Collective::all_reduce, a.size());
      auto one = first.start(call, bytes(a.data()), bytes(a.data()));
      auto two = second.start(call, bytes(b.data()), bytes(b.data()));
      if (first.index() % 2 == 0) {
        finish(first, one, "the first communicator");
        finish(second, two, "the second communicator");
      } else {
        finish(second, two, "the second communicator");
        finish(first, one, "the first communicator");
      }
      check(a.back() == size && b.back() == 2 * size, "two communicators");
    }
  });
}

void test_mismatch(int size) {
  ranks(size, [&](Member& member) {
    std::vector<float> data(20000, 5);
    const std::size_t count = member.index() == size - 1 ? 15000 : 20000;
    auto work = member.start(reduction(Collective::all_reduce, count), bytes(data.data()),
                             bytes(data.data()));
    double waited = 0;  // a mismatch with the last member is seen by the periodic look, too
    Outcome outcome;
    do {
      outcome = wait(member, *work, 1);
    } while (outcome == Outcome::expired && ++waited < 30);
    check(outcome == Outcome::failed, "a mismatch was not noticed");
    check(member.group().culprit().fault == Fault::mismatch, "the fault is no mismatch");
    for (float got : data) check(got == 5, "a mismatch touched the output");
  });
}

void test_abort(int size) {
  ranks(size, [&](Member& member) {
    std::vector<float> data(300000, 1);
    if (member.index() == 1) {
      member.abort("enough");
      return;
    }
    for (;;) {
      auto work = member.start(reduction(Collective::all_reduce, data.size()), bytes(data.data()),
                               bytes(data.data()));
      if (wait(member, *work) == Outcome::failed) break;
    }
    const Culprit culprit = member.group().culprit();
    check(culprit.fault == Fault::aborted && culprit.member == 1, "the abort has no author");
    check(std::strcmp(member.group().control().state(1).reason, "enough") == 0, "no reason");
  });
}

// A work whose wait gave up while another thread drove it touches its arrays no more.
void test_given_up() {
  std::atomic<bool> stop{false};
  std::thread driver([&] {
    while (!stop) Engine::instance().drive_others(nullptr);
  });
  for (int round = 0; round < 20; ++round)
    ranks(2, [&](Member& member) {
      // A step of it outlasts the wait.
      std::vector<float> in(200000, 1), out(in.size());
      auto call = reduction(Collective::all_reduce, in.size());
      auto work = member.start(call, bytes(in.data()), bytes(out.data()));
      if (wait(member, *work, member.index() == 0 ? 2e-4 : 60) == Outcome::expired) {
        // Time in which the driver takes over: Python waits for its lock here.
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        member.give_up(*work, 1 - member.index(), "1");
        check(work->state.load() != State::pending, "what was given up still waits");
      }
      for (float& x : out) x = -1;
    });
  stop = true;
  driver.join();
}

// Who has failed may free its array, from which another thread still copies.
void test_taken_back(int size) {
  Choices whole;  // in one step, of which most rounds see the middle
  const Band band{UINT64_MAX, {}, {4 << 20, false, UINT64_MAX}, {64 << 10, false, UINT64_MAX}};
  check(whole.set(Collective::broadcast, {kSmall, {band}}, size) == "", "rules");
  for (int round = 0; round < 5; ++round)
    run_members(size, whole, [&](Member& member) {
      const int me = member.index();
      std::vector<float> out(400000, -1);
      auto in = std::make_unique<std::vector<float>>(out.size(), 1.0f);
      const Call call{.collective = Collective::broadcast,
                      .type = Type::float32,
                      .root = size - 1,
                      .count = out.size()};
      auto work = member.start(call, bytes(in->data()), bytes(out.data()));
      if (wait(member, *work, me == size - 1 ? 2e-5 * (round + 1) : 60) == Outcome::expired)
        member.give_up(*work, 0, "1");
      if (work->state.load() == State::failed) {
        for (float& x : *in) x = 2;
        in.reset();
        return;
      }
      for (float got : out) check(got == 1, "what was copied is not what was lent");
    });
}

// The culprit's word has room for a part of a call's number.
void test_numbers() {
  const std::uint64_t lap = Culprit::kNumber + 1;
  for (std::uint64_t seq : {std::uint64_t{0}, lap - 1, lap, 5 * lap + 7, 1000 * lap - 1})
    for (std::int64_t apart : {-100000, -1, 0, 1, 100000}) {
      const std::uint64_t known = seq + static_cast<std::uint64_t>(apart);
      if (apart < 0 && seq == 0) continue;
      const Culprit packed = Culprit::unpack(Culprit{Fault::lost, 4095, 4094, seq}.pack());
      const Culprit found = packed.near(known);
      check(found.seq == seq && found.fault == Fault::lost, "a culprit's number is another");
      check(found.member == 4095 && found.observer == 4094, "a culprit is another");
    }
  const Culprit message = Culprit::unpack(Culprit{Fault::left, 1, 0, kMessage | 9}.pack());
  check(message.near(12).seq == (kMessage | 9), "a message is taken for a call");
}

void test_leaver(int size) {
  std::barrier first_done(size);  // the error of the second call may overtake the first one
  ranks(size, [&](Member& member) {
    float x = 1;
    auto first = member.start(reduction(Collective::all_reduce, 1), bytes(&x), bytes(&x));
    finish(member, first, "the call before a member left");
    first_done.arrive_and_wait();
    if (member.index() == 0) return member.leave();
    auto second = member.start(reduction(Collective::all_reduce, 1), bytes(&x), bytes(&x));
    check(wait(member, *second) == Outcome::failed, "nobody noticed that a member left");
    const Culprit culprit = member.group().culprit();
    check(culprit.fault == Fault::left && culprit.member == 0, "the leaver is not named");
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  test_numbers();
  test_given_up();
  test_taken_back(2);
  for (int round = 0; round < rounds; ++round)
    for (int size : {1, 2, 3, 5}) {
      test_collectives(size);
      test_symmetric(size);
      test_in_flight(size, static_cast<unsigned>(round));
      test_two_communicators(size);
      if (size == 1) continue;
      test_mismatch(size);
      test_abort(size);
      test_leaver(size);
    }
  std::puts("ok");
  return 0;
}
