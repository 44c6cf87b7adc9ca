// The stand-in driver's parts: contexts, streams, events, memory and modules.
//
// One mutex guards everything; one condition variable tells of every change. Work runs on a thread
// per stream, outside the mutex. Nothing here is ever destroyed: workers outlive main().
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace standin {

using Work = std::function<CUresult()>;
using Lock = std::unique_lock<std::mutex>;

// A point in a stream. Events and waits refer to the mark that was the last when they were called.
struct Mark {
  bool reached = false;
  double time = 0;  // seconds, when it was reached
};
using MarkPointer = std::shared_ptr<Mark>;

struct Task {
  std::vector<MarkPointer> awaited;
  Work work;
  MarkPointer mark;
};

struct Context;
struct Stream {
  Context* context;
  bool is_blocking;  // ordered with the legacy default stream
  int priority;
  std::deque<Task> tasks;
  MarkPointer last;
  bool is_closing = false;
  std::mt19937_64 random;
  int slowness = 0;  // scales the delays before its tasks
};

struct Event {
  Context* context;
  bool has_time;
  MarkPointer mark;
};

// The primary context of a device.
struct Context {
  int device = 0;
  int references = 0;
  std::unique_ptr<Stream> null_stream;
  std::set<Stream*> streams;  // the null stream too
  std::set<int> peers;        // devices whose memory its kernels may access
  CUresult error = CUDA_SUCCESS;
  std::size_t used = 0;
  std::string holder;  // the collective that occupies the device, and how many of its ranks do
  int holders = 0;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_initialized = false;
  bool is_forked = false;    // this is a child of the process that called cuInit
  std::vector<int> visible;  // physical number of each device
  std::vector<std::unique_ptr<Context>> contexts;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::uint64_t seed = 0;
  std::size_t memory = 0;  // bytes on each device
  int max_delay = 0;       // microseconds
};
Driver& driver();
thread_local extern std::vector<Context*> current;  // the stack of this thread; back() is current
long setting(const char* name, long otherwise);     // the environment's number

// streams.cpp
Stream* find_stream(CUstream handle, Context* context);  // nullptr: no such stream
Stream* make_stream(Context* context, bool is_blocking, int priority);
MarkPointer enqueue(Lock&, Stream* stream, Work work, std::vector<MarkPointer> awaited = {});
void await(Lock& lock, const MarkPointer& mark);
void await_stream(Lock& lock, Stream* stream);
void await_device(Lock& lock, Context* context);
std::vector<MarkPointer> pending(Context* context);

// memory.cpp
struct Allocation {
  CUdeviceptr address = 0;
  std::size_t bytes = 0, pages = 0;
  std::byte* host = nullptr;  // the second mapping, which the stand-ins use
  int device = 0;
  std::uint64_t number = 0;
  bool is_live = true;
};
bool is_device_address(std::uint64_t address);
const Allocation* find_allocation(std::uint64_t address, bool with_freed = false);
CUresult allocate(Context* context, std::size_t bytes, CUdeviceptr* address);
CUresult release(CUdeviceptr address);
// Translates a device address for work on `context`; a complaint goes to stderr.
CUresult translate(Context* context, std::uint64_t address, std::size_t bytes, std::byte** out);
bool are_edges_intact(const Allocation& allocation);
bool is_pinned(const void* pointer);
struct Pinned {
  std::size_t bytes;
  bool is_owned;
};
std::map<std::uintptr_t, Pinned>& pinned();
void install_fault_handler();

CUresult complain(CUresult code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// What every call checks first: initialized, not forked, no error of earlier work.
CUresult entry(const char* call, bool needs_context);

}  // namespace standin

#define ENTER_PLAIN \
  if (CUresult wrong = standin::entry(__func__, false); wrong != CUDA_SUCCESS) return wrong
#define ENTER \
  if (CUresult wrong = standin::entry(__func__, true); wrong != CUDA_SUCCESS) return wrong
