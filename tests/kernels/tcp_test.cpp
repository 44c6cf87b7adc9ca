// The tcp transport's native side with members as threads, connected over loopback, for the
// sanitizers: many calls of all kinds at once on all paths, waited for in different orders, then
// the ways a communicator ends.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "tcp/io/engine.h"

using namespace allreduce;
using namespace allreduce::tcp;

namespace {

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::abort();                                                              \
    }                                                                            \
  } while (false)

using Members = std::vector<std::shared_ptr<Member>>;

// Two ends of a connection over loopback.
std::pair<int, int> make_ends() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener, raw, size) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, raw, &size) == 0);
  const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(::connect(caller, raw, size) == 0);
  const int called = accept(listener, nullptr, nullptr);
  CHECK(called >= 0);
  close(listener);
  return {caller, called};
}

Members connect(int members, int channels) {
  const auto n = static_cast<std::size_t>(members);
  std::vector<std::vector<std::vector<int>>> fds(n, std::vector<std::vector<int>>(n));
  for (std::size_t a = 0; a < n; ++a)
    for (std::size_t b = a + 1; b < n; ++b)
      for (int channel = 0; channel < kData + channels; ++channel) {
        const auto [low, high] = make_ends();
        fds[a][b].push_back(low);
        fds[b][a].push_back(high);
      }
  Members made;
  for (int m = 0; m < members; ++m)
    made.push_back(std::make_shared<Member>(m, fds[static_cast<std::size_t>(m)]));
  for (const auto& member : made) Engine::instance().run([&] { member->attach(); });
  return made;
}

std::shared_ptr<Work> start(const std::shared_ptr<Member>& member, Request request) {
  const std::string text = std::to_string(static_cast<int>(request.call.collective)) + " " +
                           std::to_string(request.call.count) + " " +
                           std::to_string(request.call.root);
  const auto agreed = static_cast<std::uint16_t>(text.size() + 2);
  request.signature.assign(reinterpret_cast<const char*>(&agreed), 2);
  request.signature += text;
  request.signature += '\0';  // no note
  auto work = std::make_shared<Work>(std::move(request));
  member->submit(work);
  return work;
}

State settle(Work& work) {
  for (int i = 0; i < 600 && !work.wait(std::chrono::milliseconds(50));) ++i;
  CHECK(work.settled());
  return work.state();
}

void leave(const std::shared_ptr<Member>& member) {
  auto farewell = std::make_shared<Work>(Request{});
  Engine::instance().run([&] { member->leave(Clock::now() + std::chrono::seconds(25), farewell); });
  CHECK(settle(*farewell) == State::done);
}

// A started call, its arrays, and what each element of its output has to be.
struct Started {
  std::shared_ptr<Work> work;
  std::vector<float> in, out;
  float expected;
};

std::byte* bytes(std::vector<float>& array) { return reinterpret_cast<std::byte*>(array.data()); }

std::unique_ptr<Started> begin(const std::shared_ptr<Member>& member, int index) {
  const int n = member->members(), me = member->index();
  const auto width = static_cast<std::size_t>(n);
  const Collective kinds[] = {Collective::all_reduce, Collective::reduce_scatter,
                              Collective::all_gather, Collective::broadcast,
                              Collective::reduce,     Collective::all_to_all};
  Request request;
  request.call.collective = kinds[index % 6];
  request.call.count =
      std::vector<std::uint64_t>{5, 3000, 150001}[static_cast<std::size_t>(index) % 3];
  request.call.path =
      request.call.count == 5 ? Path::eager : (index % 2 == 0 ? Path::chain : Path::direct);
  request.call.op = Op::sum;
  request.call.type = Type::float32;
  request.call.root = index % n;
  const bool wide_in = request.call.collective == Collective::reduce_scatter ||
                       request.call.collective == Collective::all_to_all;
  const bool wide_out = request.call.collective == Collective::all_gather ||
                        request.call.collective == Collective::all_to_all;
  auto started = std::make_unique<Started>();
  started->in.assign(request.call.count * (wide_in ? width : 1), 1.0f);
  started->out.assign(request.call.count * (wide_out ? width : 1), -1.0f);
  const bool sums = request.call.collective != Collective::all_gather &&
                    request.call.collective != Collective::broadcast &&
                    request.call.collective != Collective::all_to_all;
  started->expected = sums ? static_cast<float>(n) : 1.0f;
  if (request.call.collective == Collective::reduce && me != request.call.root) {
    started->expected = -1.0f;  // untouched
  }
  request.in = bytes(started->in);
  request.out = bytes(started->out);
  started->work = start(member, std::move(request));
  return started;
}

void many(const std::shared_ptr<Member>& member, int calls) {
  std::vector<std::unique_ptr<Started>> all;
  for (int index = 0; index < calls; ++index) all.push_back(begin(member, index));
  std::shuffle(all.begin(), all.end(), std::mt19937(static_cast<unsigned>(member->index())));
  for (const auto& one : all) {
    CHECK(settle(*one->work) == State::done);
    for (const float value : one->out) CHECK(value == one->expected);
  }
}

// Messages in a ring, small and large, received by any source.
void messages(const std::shared_ptr<Member>& member) {
  const int n = member->members(), me = member->index();
  for (const std::uint64_t count : {std::uint64_t{3}, std::uint64_t{200000}}) {
    std::vector<float> in(count, static_cast<float>(me)), out(count);
    Request send, receive;
    send.call.collective = Collective::send;
    receive.call.collective = Collective::recv;
    send.call.type = receive.call.type = Type::float32;
    send.call.count = receive.call.count = count;
    send.call.path = receive.call.path = count == 3 ? Path::eager : Path::direct;
    send.call.root = (me + 1) % n;
    receive.call.root = kAny;
    receive.tag = kAny;
    send.in = bytes(in);
    receive.out = bytes(out);
    const auto sent = start(member, std::move(send)), got = start(member, std::move(receive));
    CHECK(settle(*got) == State::done);
    CHECK(settle(*sent) == State::done);
    for (const float value : out) CHECK(value == static_cast<float>((me + n - 1) % n));
  }
}

template <class Function>
void on_threads(const Members& members, const Function& function) {
  std::vector<std::thread> threads;
  for (const auto& member : members) threads.emplace_back([&, member] { function(member); });
  for (std::thread& thread : threads) thread.join();
}

Fault fault_of(const std::shared_ptr<Member>& member) {
  Fault found = Fault::none;
  Engine::instance().run([&] { found = member->culprit().fault; });
  return found;
}

// One starts another call than the rest; nobody's output is touched.
void disagree(int n) {
  const Members members = connect(n, 1);
  on_threads(members, [&](const std::shared_ptr<Member>& member) {
    const auto one = begin(member, member->index() == n - 1 ? 2 : 0);
    CHECK(settle(*one->work) == State::failed);
    for (const float value : one->out) CHECK(value == -1.0f);
    CHECK(fault_of(member) == Fault::mismatch);
    leave(member);
  });
}

// One leaves, or aborts, in the middle of what the others need it for.
void desert(int n, bool abort) {
  const Members members = connect(n, 2);
  on_threads(members, [&](const std::shared_ptr<Member>& member) {
    std::vector<std::unique_ptr<Started>> all;
    for (int index = 0; index < 24; ++index) all.push_back(begin(member, index));
    if (member->index() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      if (abort)
        Engine::instance().run([&] { member->die({Fault::aborted, 0, 0, 0, "", "", "enough"}); });
      leave(member);
    }
    const auto last = start(member, Request{});  // a barrier that member 0 never makes
    CHECK(settle(*last) == State::failed);
    for (const auto& one : all) settle(*one->work);
    if (member->index() != 0) CHECK(fault_of(member) == (abort ? Fault::aborted : Fault::left));
    leave(member);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int round = 0; round < rounds; ++round)
    for (const int n : {1, 2, 3, 4}) {
      const Members members = connect(n, 1 + round % 3);
      on_threads(members, [](const std::shared_ptr<Member>& member) {
        many(member, 36);
        if (member->members() > 1) messages(member);
        leave(member);
      });
      if (n == 1) continue;
      disagree(n);
      desert(n, true);
      desert(n, false);
    }
  std::puts("ok");
  std::fflush(stdout);
  std::quick_exit(0);  // the engine's thread waits for ever
}
