// Runs a kernel's threads as fibers, one at a time, in an order drawn from a seed.
//
// A fiber runs one CUDA thread after the other until one has to wait; what never waits is a plain
// loop. Shared memory is NaN at the start of each block, so a missing barrier shows under any seed.
// Divergent barriers and shuffles are refused, and named with their threads and lines.
#include "host_cuda.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
// Between these, accesses are the engine's and not the kernel's.
#define ENGINE() (AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0))
#define KERNEL() (AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0))
#define RELEASE(at) __tsan_release(at)
#define ACQUIRE(at) __tsan_acquire(at)
#else
#define ENGINE()
#define KERNEL()
#define RELEASE(at)
#define ACQUIRE(at)
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

namespace host_cuda {

char* dynamic = nullptr;

namespace {

constexpr std::size_t kStack = 64 << 10;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;  // swapcontext makes two system calls
#endif

struct Thread {  // a CUDA thread
  uint3 index{};
  int flat = 0;
  unsigned warp_meetings = 0, block_meetings = 0;
  bool has_ended = false;
  const char* file = "";  // where it waits
  unsigned line = 0;
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool was_entered = false;
  Thread* thread = nullptr;
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* tsan = nullptr;
  void* fake_stack = nullptr;
};

struct Warp {
  unsigned arrivals = 0, generation = 0;
  std::uint64_t slots[2][32];
};

struct Block {  // the one that runs
  std::vector<Thread> threads;
  std::vector<Thread*> order;
  std::size_t next = 0;  // of `order`, to start
  std::vector<Warp> warps;
  unsigned arrivals = 0, generation = 0;
  std::vector<Fiber*> idle, ready, spent;
  Fiber* running = nullptr;
  bool has_progress = false;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  std::string failure;
  ucontext_t home;
  jmp_buf home_jump;
  void *home_tsan = nullptr, *home_fake_stack = nullptr;
  int barrier = 0, fence[2] = {};  // what ThreadSanitizer synchronises on
  std::size_t turn = 0;
};
Block now;

void fail(const std::string& why) {
  if (now.failure.empty()) now.failure = why;
}

std::string place(const Thread& thread) {
  std::string text = "thread " + std::to_string(thread.flat);
  if (thread.has_ended) return text + " has ended";
  if (!*thread.file) return text + " runs";
  return text + " waits at " + thread.file + ":" + std::to_string(thread.line);
}

void leave() {  // from a fiber to the scheduler
  Fiber* fiber = now.running;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(now.home_tsan, 1);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber->fake_stack, nullptr, 0);
#endif
  if (kJumps) {
    if (!_setjmp(fiber->jump)) _longjmp(now.home_jump, 1);
  } else {
    swapcontext(&fiber->context, &now.home);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber->fake_stack, nullptr, nullptr);
#endif
  if (fiber->thread) threadIdx = fiber->thread->index;
}

void live() {  // a fiber's life
  ENGINE();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  for (;;) {
    Fiber* fiber = now.running;
    while (now.next < now.order.size() && now.failure.empty()) {
      Thread* thread = fiber->thread = now.order[now.next++];
      threadIdx = thread->index;
      ACQUIRE(&now.fence[(now.turn + 1) & 1]);
      KERNEL();
      now.body(now.arguments);
      ENGINE();
      RELEASE(&now.fence[now.turn & 1]);  // one block after the other: their shared memory is one
      thread->has_ended = true;
      now.has_progress = true;
#if defined(__SANITIZE_THREAD__)
      break;  // a fiber is a thread to it: one each
#endif
    }
    fiber->thread = nullptr;
    now.spent.push_back(fiber);
    leave();
  }
}

void enter(Fiber* fiber) {
  now.running = fiber;
  if (fiber->thread) threadIdx = fiber->thread->index;
#if defined(__SANITIZE_THREAD__)
  if (!fiber->tsan) fiber->tsan = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(fiber->tsan, 1);  // 1: this does not order them
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&now.home_fake_stack, fiber->stack.get(), kStack);
#endif
  if (kJumps && _setjmp(now.home_jump)) return;
  if (fiber->was_entered && kJumps) _longjmp(fiber->jump, 1);
  if (!fiber->was_entered) {
    fiber->was_entered = true;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, live, 0);
  }
  swapcontext(&now.home, &fiber->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(now.home_fake_stack, nullptr, nullptr);
#endif
}

template <class Arrived>
void wait_until(Thread* thread, Arrived has_arrived) {
  now.has_progress = true;
  while (!has_arrived()) {
    now.ready.push_back(now.running);
    leave();
  }
  thread->file = "";
}

__attribute__((no_sanitize("address"), noinline)) void poison_shared() {  // red zones too
  for (volatile char* at = __start_cuda_shared; at < __stop_cuda_shared; ++at) *at = char(0xff);
}

void reuse_fibers() {
  now.idle.insert(now.idle.end(), now.spent.begin(), now.spent.end());
  now.spent.clear();
}

std::vector<std::unique_ptr<Fiber>>& pool() {
  static auto& made = *new std::vector<std::unique_ptr<Fiber>>;
  return made;
}

void start_all() {  // each as far as it comes without waiting
  while (now.next < now.order.size() && now.failure.empty()) {
    if (now.idle.empty()) {
      pool().emplace_back(new Fiber);
      now.idle.push_back(pool().back().get());
    }
    Fiber* fiber = now.idle.back();
    now.idle.pop_back();
    enter(fiber);
    if (kJumps) reuse_fibers();
  }
}

void report_deadlock(std::size_t block) {
  std::string all = "deadlock: block " + std::to_string(block);
  int shown = 0;
  for (const auto& thread : now.threads)
    if (shown++ < 2 || (thread.has_ended && shown < 40)) all += "; " + place(thread);
  fail(all);
}

void run_block(std::size_t block, std::uint64_t seed, std::mt19937_64& random) {
  const std::size_t count = now.threads.size();
  for (std::size_t i = 0; i < count; ++i) {
    now.threads[i] = Thread();
    now.threads[i].flat = static_cast<int>(i);
    now.threads[i].index = {static_cast<unsigned>(i % blockDim.x),
                            static_cast<unsigned>(i / blockDim.x % blockDim.y),
                            static_cast<unsigned>(i / blockDim.x / blockDim.y)};
    now.order[i] = &now.threads[i];
  }
  if (seed) std::shuffle(now.order.begin(), now.order.end(), random);
  ++now.turn;
  now.next = 0;
  now.ready.clear();
  now.arrivals = now.generation = 0;
  now.warps.assign((count + 31) / 32, {});
  for (;;) {
    start_all();
    if (now.ready.empty() || !now.failure.empty()) break;
    std::vector<Fiber*> round;
    round.swap(now.ready);
    now.has_progress = false;
    if (seed) std::shuffle(round.begin(), round.end(), random);
    for (Fiber* fiber : round) {
      enter(fiber);
      if (now.ready.empty() || now.ready.back() != fiber) now.has_progress = true;
    }
    if (!now.has_progress) report_deadlock(block);
  }
  reuse_fibers();
}

void run(std::size_t shared, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::size_t count = std::size_t{blockDim.x} * blockDim.y * blockDim.z;
  const std::size_t blocks = std::size_t{gridDim.x} * gridDim.y * gridDim.z;
  now.threads.resize(count);
  now.order.resize(count);
  std::unique_ptr<char[]> memory(new char[shared]);  // of this size: AddressSanitizer sees its end
  dynamic = memory.get();
  std::vector<std::size_t> turns(blocks);
  std::iota(turns.begin(), turns.end(), 0);
  if (seed) std::shuffle(turns.begin(), turns.end(), random);
#if defined(__SANITIZE_THREAD__)
  now.home_tsan = __tsan_get_current_fiber();
  ENGINE();
  RELEASE(now.fence);
  RELEASE(now.fence + 1);
#endif
  for (std::size_t block : turns) {
    blockIdx = {static_cast<unsigned>(block % gridDim.x),
                static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    memset(dynamic, 0xff, shared);
    poison_shared();
    run_block(block, seed, random);
    if (!now.failure.empty()) {  // fibers that wait are lost: their frames must not run again
      for (auto& fiber : pool())
        if (fiber->thread) (void)fiber.release();
      std::erase_if(pool(), [](auto& fiber) { return !fiber; });
      break;
    }
  }
#if defined(__SANITIZE_THREAD__)
  ACQUIRE(now.fence);
  ACQUIRE(now.fence + 1);
  KERNEL();
#endif
}

}  // namespace

void meet_block(Where where) {
  ENGINE();
  Thread* thread = now.running->thread;
  thread->file = where.file_name();
  thread->line = where.line();
  const unsigned mine = ++thread->block_meetings;
  RELEASE(&now.barrier);
  if (++now.arrivals == now.threads.size()) {
    now.arrivals = 0;
    ++now.generation;
  }
  wait_until(thread, [mine] { return now.generation >= mine; });
  ACQUIRE(&now.barrier);
  KERNEL();
}

std::uint64_t exchange(unsigned mask, std::uint64_t value, int from, Where where) {
  ENGINE();
  Thread* thread = now.running->thread;
  const auto index = static_cast<std::size_t>(thread->flat) / 32;
  Warp& warp = now.warps[index];
  const unsigned mine = ++thread->warp_meetings;
  warp.slots[mine & 1][thread->flat % 32] = value;
  thread->file = where.file_name();
  thread->line = where.line();
  if (mask != 0xffffffffu) fail(place(*thread) + ": only masks of all lanes are supported");
  if (index * 32 + 32 > now.threads.size())
    fail(place(*thread) + ": the last warp of the block is not whole");
  RELEASE(&warp);
  if (++warp.arrivals == 32) {
    warp.arrivals = 0;
    ++warp.generation;
  }
  wait_until(thread, [&] { return !now.failure.empty() || warp.generation >= mine; });
  ACQUIRE(&warp);
  value = warp.slots[mine & 1][from & 31];
  KERNEL();
  return value;
}

int lane() { return now.running->thread->flat % 32; }

const char* launch(void (*body)(void*), void* arguments, const unsigned* grid,
                   const unsigned* block, std::size_t shared, std::uint64_t seed) {
  static std::string failure;
  now.failure.clear();
  now.body = body;
  now.arguments = arguments;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  run(shared, seed);
  failure = now.failure;
  return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace host_cuda
