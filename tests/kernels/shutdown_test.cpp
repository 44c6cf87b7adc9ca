// How calls of the shared transport end when the communicator dies behind them: a call that all
// members had begun still completes on the last of them, whatever the others did next.
//
// One thread advances all members by single steps, in an order drawn at random. Each member has its
// own mapping of the control region and sockets to the others, as a process has.
//
// Usage: shutdown_test <rounds>. Prints "ok" and exits 0, or says what is wrong and exits 1.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <random>
#include <thread>

#include "members.h"

using namespace allreduce;

namespace {

constexpr std::array kPaths = {Path::eager, Path::direct, Path::staged, Path::cross_process,
                               Path::pairwise};

// What the first member that has completed the call does next, which ends the communicator.
enum class End { mismatch, abort, leave, die, give_up };
constexpr std::array kEnds = {End::mismatch, End::abort, End::leave, End::die, End::give_up};

std::size_t count_of(Path path) { return path == Path::eager ? 100 : 30000; }

Call call_on(Path path, std::size_t count) {
  const bool copies = path == Path::cross_process;
  return {.collective = copies ? Collective::all_gather : Collective::all_reduce,
          .op = copies ? Op::none : Op::sum,
          .type = Type::float32,
          .count = count};
}

Choices choices_for(Path path, int members) {
  Choices made;
  const Way rings{16 << 10, false, UINT64_MAX, path == Path::pairwise}, none;
  const Way direct{path == Path::direct ? kLeastStep : 0, false, UINT64_MAX};
  const Way cross_process{kLeastStep, false, UINT64_MAX};
  for (std::uint64_t i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    const bool pulls = path == Path::cross_process && copies(collective);
    const Band band{UINT64_MAX, direct, pulls ? cross_process : none, rings};
    check(made.set(collective, {kSmall, {band}}, members) == "", "rules");
  }
  return made;
}

int file_of(std::size_t size) {
  const int fd = memfd_create("shutdown_test", MFD_CLOEXEC);
  check(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "no memory");
  return fd;
}

// A process of a job, with one member.
struct Process {
  std::shared_ptr<Group> group;
  std::unique_ptr<Member> member;
  std::vector<int> sockets;
  std::shared_ptr<SymmetricRegion> region;
  std::vector<float> in, out;  // where the arrays lie in no symmetric memory
  std::shared_ptr<Work> work;

  void close_sockets() {
    for (int fd : std::exchange(sockets, {})) close(fd);
  }
  float* input(std::size_t) { return region ? floats() : in.data(); }
  float* output(std::size_t count) { return region ? floats() + count : out.data(); }
  float* floats() { return reinterpret_cast<float*>(region->part(member->index())); }
};

class Job {
 public:
  Job(int size, Path path, unsigned seed)
      : size_(size), path_(path), count_(count_of(path)), random_(seed), processes_(at(size)) {
    const int control = file_of(Control::bytes(size));
    const std::size_t part = 2 * count_ * sizeof(float) + kPage;
    const int symmetric = file_of(part * at(size));
    for (int rank = 0; rank < size; ++rank) {
      Process& own = process(rank);
      own.group = std::make_shared<Group>(control, size, 2, choices_for(path, size));
    }
    for (int low = 0; low < size; ++low)
      for (int high = low + 1; high < size; ++high) link(low, high);
    for (int rank = 0; rank < size; ++rank) {
      Process& own = process(rank);
      own.member = std::make_unique<Member>(own.group, rank);
      own.in.assign(count_, 0);
      own.out.assign(count_ * at(size), -1);
      if (path != Path::direct) continue;
      own.group->map_region(1, symmetric, part, 1);
      own.region = own.group->claim_region(1);
    }
    close(control);
    close(symmetric);
  }
  ~Job() {
    for (Process& one : processes_) one.close_sockets();
  }

  // One call, behind which the first two to complete it end the communicator.
  void run(End end, bool ahead) {
    for (int rank = 0; rank < size_; ++rank) start_first(rank);
    const int last = complete_but_one();
    const int ender = (last + 1) % size_;
    std::shared_ptr<Work> behind;
    if (ahead) behind = start(last, count_);
    finish(ender, end);
    for (int other = 0; other < size_; ++other)
      if (other != last && other != ender) notice(other, start(other, count_));
    check(process(last).group->culprit_word() != 0, "the communicator lives");
    settle(last, *process(last).work);
    check(process(last).work->state.load() == State::done, "a call that all had begun has failed");
    check_output(last);
    if (!behind) behind = start(last, count_);
    settle(last, *behind);
    check(behind->state.load() == State::failed, "a call on a dead communicator has completed");
  }

  // As run(), but in the middle of the call: then it fails on all.
  void stop(End end) {
    for (int rank = 0; rank < size_; ++rank) start_first(rank);
    const int ender = static_cast<int>(random_() % at(size_));
    for (int step = 0; step < 3; ++step)
      for (int rank = 0; rank < size_; ++rank)
        if (rank != ender) process(rank).member->advance();
    if (end == End::give_up)
      process(ender).member->give_up(*process(ender).work, (ender + 1) % size_, "1");
    else
      finish(ender, end);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == ender) continue;
      notice(rank, process(rank).work);
      check(process(rank).work->state.load() == State::failed, "a call without a member completed");
    }
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  Process& process(int rank) { return processes_[at(rank)]; }

  void link(int low, int high) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
    process(low).sockets.push_back(ends[0]);
    process(high).sockets.push_back(ends[1]);
    process(low).group->add_peer(ends[0], getpid(), {high});
    process(high).group->add_peer(ends[1], getpid(), {low});
  }

  std::shared_ptr<Work> start(int rank, std::size_t count) {
    Process& own = process(rank);
    return own.member->start(call_on(path_, count), reinterpret_cast<std::byte*>(own.input(count_)),
                             reinterpret_cast<std::byte*>(own.output(count_)));
  }

  void start_first(int rank) {
    std::fill_n(process(rank).input(count_), count_, static_cast<float>(rank + 1));
    process(rank).work = start(rank, count_);
    check(process(rank).work->call.path == path_, "the call goes another way");
  }

  bool pending(int rank) { return process(rank).work->state.load() == State::pending; }

  // Advances members at random until all but one have completed their call; returns that one.
  int complete_but_one() {
    for (int left = size_; left > 1;) {
      const int rank = static_cast<int>(random_() % at(size_));
      if (!pending(rank)) continue;
      process(rank).member->advance();
      left -= !pending(rank);
    }
    for (int rank = 0; rank < size_; ++rank)
      if (pending(rank)) return rank;
    fail("all have completed the call");
  }

  void finish(int rank, End end) {
    Process& own = process(rank);
    switch (end) {
      case End::mismatch:
        process(rank).work = start(rank, count_ - 1);
        if (size_ == 2) own.group->blame({Fault::mismatch, 1 - rank, rank, 1});
        break;
      case End::abort:
        own.member->abort("enough");
        break;
      case End::leave:
        own.member->leave();
        own.close_sockets();
        if (size_ == 2) own.group->blame({Fault::left, rank, rank, 1});
        break;
      case End::die:
        own.close_sockets();
        if (size_ == 2) own.group->blame({Fault::lost, rank, rank, 1});
        break;
      case End::give_up:
        own.member->give_up(*start(rank, count_), (rank + 1) % size_, "1");
        break;
    }
  }

  // Waits until a work has failed, and looks around as a wait does.
  void notice(int rank, const std::shared_ptr<Work>& work) {
    settle(rank, *work);
    check(work->state.load() == State::failed, "a call without a member has completed");
  }

  void settle(int rank, Work& work) {
    const auto limit = Member::Clock::now() + std::chrono::seconds(20);
    for (;;) {
      const bool moved = process(rank).member->advance() != Progress::blocked;
      if (work.state.load() != State::pending) return;
      if (moved) continue;
      const auto now = Member::Clock::now();
      check(now < limit, "a call neither completes nor fails");
      process(rank).member->check_peers(now);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void check_output(int rank) {
    const auto n = static_cast<float>(size_);
    const float* out = process(rank).output(count_);
    const bool gathers = path_ == Path::cross_process;
    for (std::size_t i = 0; i < count_ * (gathers ? at(size_) : 1); ++i)
      check(out[i] == (gathers ? static_cast<float>(i / count_ + 1) : n * (n + 1) / 2),
            "a call that all had begun has another result");
  }

  const int size_;
  const Path path_;
  const std::size_t count_;
  std::mt19937 random_;
  std::vector<Process> processes_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  unsigned seed = 0;
  for (int round = 0; round < rounds; ++round)
    for (Path path : kPaths)
      for (End end : kEnds)
        for (int size : {2, 3}) {
          if (path == Path::pairwise && size != 2) continue;
          ++seed;
          Job(size, path, seed).run(end, size > 2 && seed % 2 == 0);
          // A small call completes as soon as all have begun it, and a mismatch is none of its own.
          if (path != Path::eager && end != End::mismatch) Job(size, path, seed).stop(end);
        }
  std::puts("ok");
  return 0;
}
