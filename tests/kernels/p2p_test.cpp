// Sends and recvs of the shared transport with members as threads, for the sanitizers: small, large
// and symmetric messages, any source, boxes that are full, collectives between them, and ends.
//
// Usage: p2p_test <rounds>. Prints "ok" and exits 0, or says what is wrong and exits 1.
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

// For the collectives between messages.
Choices choices(int members) {
  Choices made;
  const Band band{UINT64_MAX, {}, {}, {kPlace << 4, false, UINT64_MAX}};
  for (std::size_t i = 0; i < kCollectives; ++i)
    check(made.set(static_cast<Collective>(i), {kSmall, {band}}, members) == "", "rules");
  return made;
}

void ranks(int size, const std::function<void(Member&)>& body) {
  run_members(size, choices(size), body);
}

using Values = std::vector<std::int64_t>;

std::byte* bytes(Values& values) { return reinterpret_cast<std::byte*>(values.data()); }

std::int64_t value(int from, std::int64_t number, std::size_t i) {
  return from * 1000003 + number * 1009 + static_cast<std::int64_t>(i);
}

void fill(Values& values, int from, std::int64_t number) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(from, number, i);
}

void compare(const Values& values, int from, std::int64_t number, const std::string& what) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] != value(from, number, i)) fail(what + " brought other values");
}

Call message(Collective collective, int peer, std::size_t count) {
  return {.collective = collective, .type = Type::int64, .root = peer, .count = count};
}

std::shared_ptr<Work> send(Member& member, Values& x, int to, std::int64_t tag) {
  return member.start_message(message(Collective::send, to, x.size()), tag, bytes(x), nullptr);
}

std::shared_ptr<Work> receive(Member& member, Values& out, int from, std::int64_t tag) {
  return member.start_message(message(Collective::recv, from, out.size()), tag, nullptr,
                              bytes(out));
}

void barrier(Member& member) { finish(member, member.start({}, nullptr, nullptr), "barrier"); }

constexpr std::size_t kLengths[] = {0, 3, 512, 600, 30000};

// Hundreds of messages between all members, themselves too, and collectives among them, waited for
// in another order on each.
void test_many(int size, unsigned seed) {
  ranks(size, [&](Member& member) {
    struct One {
      Values in, out;
      int peer;
      std::int64_t number;
      std::shared_ptr<Work> sent, received, summed;
    };
    const int me = member.index();
    std::vector<One> all(static_cast<std::size_t>(60 * size));
    for (std::size_t k = 0; k < all.size(); ++k) {
      One& one = all[k];
      const std::size_t length = kLengths[k / static_cast<std::size_t>(size) % 5];
      one.peer = static_cast<int>(k) % size;
      one.number = static_cast<std::int64_t>(k) / size;
      one.in.resize(length);
      one.out.assign(length, -1);
      fill(one.in, me, one.number);
      one.sent = send(member, one.in, one.peer, one.number);
      one.received = receive(member, one.out, one.peer, one.number);
      if (k % 7 == 0)
        one.summed = member.start({.collective = Collective::barrier}, nullptr, nullptr);
    }
    std::vector<std::size_t> order(all.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    std::mt19937 random(seed * 31 + static_cast<unsigned>(me));
    for (std::size_t k = order.size(); k-- > 1;) std::swap(order[k], order[random() % (k + 1)]);
    for (std::size_t k : order) {
      if (all[k].summed) finish(member, all[k].summed, "a collective among messages");
      finish(member, all[k].received, "a recv");
      compare(all[k].out, all[k].peer, all[k].number, "a recv");
      finish(member, all[k].sent, "a send");
    }
  });
}

// Everybody sends to member 0, which takes what comes: each sender's messages in their order.
void test_any(int size) {
  constexpr int kEach = 120;
  ranks(size, [&](Member& member) {
    if (member.index() != 0) {
      std::vector<Values> values(kEach);
      std::vector<std::shared_ptr<Work>> works;
      for (int number = 0; number < kEach; ++number) {
        values[number].resize(number % 10 == 9 ? 20000 : 300);
        fill(values[number], member.index(), number);
        works.push_back(send(member, values[number], 0, number % 10 == 9));
      }
      for (const auto& work : works) finish(member, work, "a send to one who takes any");
      return;
    }
    for (const std::int64_t tag : {1, 0}) {  // the large ones first, which were sent last
      std::vector<int> seen(static_cast<std::size_t>(size));
      const int count = tag == 1 ? kEach / 10 : kEach - kEach / 10;
      for (int k = 0; k < count * (size - 1); ++k) {
        Values out(tag == 1 ? 20000 : 300);
        const auto work = receive(member, out, kAny, tag == 1 ? 1 : kAny);
        finish(member, work, "a recv of any");
        check(work->tag == tag && work->call.root > 0, "a recv of any does not know its source");
        const int nth = seen[static_cast<std::size_t>(work->call.root)]++;
        compare(out, work->call.root, tag == 1 ? nth * 10 + 9 : nth + nth / 9, "a recv of any");
      }
    }
  });
}

void test_symmetric(int size) {
  constexpr std::size_t count = 100003;
  ranks(size, [&](Member& member) {
    const int me = member.index(), to = (me + 1) % size, from = (me + size - 1) % size;
    if (me == 0) member.group().map_region(1, -1, count * 8, size);
    barrier(member);
    auto region = member.group().claim_region(1);
    auto* part = reinterpret_cast<std::int64_t*>(region->part(me));
    for (int round = 0; round < 5; ++round) {
      for (std::size_t i = 0; i < count; ++i) part[i] = value(me, round, i);
      const auto sent = member.start_message(message(Collective::send, to, count), 1,
                                             reinterpret_cast<std::byte*>(part), nullptr);
      Values out(count);
      const auto received = receive(member, out, from, kAny);
      finish(member, received, "a recv out of symmetric memory");
      compare(out, from, round, "a recv out of symmetric memory");
      finish(member, sent, "a send of symmetric memory");
    }
    barrier(member);
  });
}

void test_mismatch(int size) {
  ranks(size, [&](Member& member) {
    Values values(member.index() == 0 ? 20000 : 19999, 5);
    std::shared_ptr<Work> work;
    if (member.index() == 0)
      work = send(member, values, 1, 3);
    else
      work = receive(member, values, member.index() == 1 ? kAny : 0, 3);
    check(wait(member, *work) == Outcome::failed, "a mismatch was not noticed");
    const Culprit culprit = member.group().culprit();
    check(culprit.fault == Fault::mismatch && culprit.member == 0 && culprit.observer == 1,
          "the mismatch names others");
    const MessageRecord* calls = member.group().control().state(1).mismatch;
    check(calls[0].count == 19999 && calls[1].count == 20000 && calls[1].tag == 3,
          "the mismatch tells of another message");
    for (std::int64_t got : values) check(got == 5, "a mismatch touched the output");
  });
}

void test_leaver(int size) {
  std::barrier received(size);  // the others' errors may overtake it
  ranks(size, [&](Member& member) {
    const int me = member.index();
    Values values(600, 1), large(40000, 2);
    if (me == 0) {
      finish(member, send(member, values, 1, 0), "the send before a member left");
      member.leave();
    }
    if (me == 1) finish(member, receive(member, values, 0, 0), "a recv from who has left");
    received.arrive_and_wait();
    if (me == 0) return;
    const auto work = me == 1 ? receive(member, large, 0, kAny) : send(member, large, 0, 0);
    check(wait(member, *work) == Outcome::failed, "nobody noticed that a member left");
    const Culprit culprit = member.group().culprit();
    check(culprit.fault == Fault::left && culprit.member == 0, "the leaver is not named");
  });
}

// Works that were given up, or aborted, while another thread drove them, touch no array any more.
void test_given_up() {
  std::atomic<bool> stop{false};
  std::thread driver([&] {
    while (!stop) Engine::instance().drive_others(nullptr);
  });
  for (int round = 0; round < 20; ++round)
    ranks(2, [&](Member& member) {
      Values values(1000000, 1);
      const auto work = member.index() == 0 ? send(member, values, 1, 0)
                                            : receive(member, values, round % 2 ? 0 : kAny, 0);
      if (wait(member, *work, member.index() == 0 ? 1e-3 : 60) == Outcome::expired) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        member.give_up(*work, member.index(), "1");
        check(work->state.load() != State::pending, "what was given up still waits");
      }
      for (std::int64_t& x : values) x = -1;
    });
  stop = true;
  driver.join();
}

// A receiver that reads nothing while its box is full, and members that leave with full boxes.
void test_full_box(int size) {
  std::barrier filled(size);
  ranks(size, [&](Member& member) {
    constexpr std::size_t kCount = 3 * kLetters;
    std::vector<Values> values(kCount, Values(2));
    std::vector<std::shared_ptr<Work>> works;
    if (member.index() != 0)
      for (std::size_t k = 0; k < kCount; ++k) {
        fill(values[k], member.index(), static_cast<std::int64_t>(k));
        works.push_back(send(member, values[k], 0, 0));
      }
    filled.arrive_and_wait();
    if (member.index() == 0)
      for (int from = size - 1; from > 0; --from)
        for (std::size_t k = 0; k < kCount; ++k) {
          Values out(2);
          finish(member, receive(member, out, from, kAny), "a recv from a full box");
          compare(out, from, static_cast<std::int64_t>(k), "a recv from a full box");
        }
    for (const auto& work : works) finish(member, work, "a send to a full box");
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  test_given_up();
  for (int round = 0; round < rounds; ++round)
    for (int size : {1, 2, 3, 5}) {
      test_many(size, static_cast<unsigned>(round));
      test_symmetric(size);
      if (size == 1) continue;
      test_any(size);
      test_full_box(size);
      test_mismatch(size);
      test_leaver(size);
    }
  std::puts("ok");
  return 0;
}
