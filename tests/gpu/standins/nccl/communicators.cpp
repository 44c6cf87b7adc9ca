// NCCL's C functions for communicators: how ranks meet, split and end.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "../standin.h"
#include "nccl.h"

using namespace standin_nccl;

struct UniqueId {
  char text[128];
};
struct Config {  // the start of ncclConfig_t
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

namespace {

thread_local std::vector<std::pair<Communicator*, std::function<int()>>> joining;
thread_local std::string last_error;

Shared* open_shared(const std::string& name) {
  const int file = open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return nullptr;
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return at == MAP_FAILED ? nullptr : static_cast<Shared*>(at);
}

std::string device_name(int device) {
  char host[40] = "";
  const char* id = getenv("NCCL_HOSTID");
  if (!id) gethostname(host, sizeof host - 1);
  return std::string(id ? id : host).substr(0, 40) + "/" +
         std::to_string(standin_physical_device(device));
}

// Meets the other ranks; runs on a thread of its own where set-up does not block.
int join(Communicator* communicator) {
  auto* shared = getenv("STANDIN_NCCL_FULL") ? nullptr : open_shared(communicator->name);
  if (!shared) return refuse(communicator, kSystemError, "no shared memory: " + communicator->name);
  communicator->shared = shared;
  auto& mine = shared->ranks[communicator->rank];
  const std::string device = device_name(communicator->device);
  memcpy(mine.device, device.c_str(), device.size() + 1);
  mine.size = communicator->size;
  mine.pid = getpid();
  ++shared->joined;
  if (!wait_until(communicator, "CommInit", [=] { return shared->joined >= communicator->size; }))
    return kInvalidUsage;
  if (communicator->rank == 0) unlink(communicator->name.c_str());
  const bool may_share =
      getenv("NCCL_MULTI_RANK_GPU_ENABLE") && atoi(getenv("NCCL_MULTI_RANK_GPU_ENABLE")) == 1;
  for (int r = 0; r < communicator->size; ++r) {
    if (shared->ranks[r].size != communicator->size)
      return refuse(communicator, kInvalidArgument, "ranks name different sizes of the group");
    if (r != communicator->rank && !may_share && !strcmp(shared->ranks[r].device, mine.device))
      return refuse(communicator, kInvalidUsage,
                    "Duplicate GPU detected: rank " + std::to_string(r) + " and rank " +
                        std::to_string(communicator->rank) + " both on device " + mine.device);
  }
  return kSuccess;
}

// Starts or runs what makes a communicator usable.
int set_up(Communicator* communicator, std::function<int()> work) {
  if (depth) {
    joining.emplace_back(communicator, std::move(work));
    return kSuccess;
  }
  if (communicator->is_blocking) return communicator->state = work();
  ++communicator->outstanding;
  std::thread([communicator, work] {
    communicator->state = work();
    --communicator->outstanding;
  }).detach();
  return kInProgress;
}

bool is_blocking(const Config* config) {
  return !config || config->blocking == INT_MIN || config->blocking;
}

Communicator* make(const std::string& name, int size, int rank, int device, bool blocks) {
  auto* made = new Communicator;
  made->name = name;
  made->size = size;
  made->rank = rank;
  made->device = device;
  made->is_blocking = blocks;
  return made;
}

int init(Communicator** out, int size, const UniqueId& id, int rank, int device, bool blocks) {
  *out = nullptr;
  if (device < 0) return refuse(nullptr, kUnhandledCudaError, "no CUDA context on this thread");
  if (size < 1 || size > kRanks || rank < 0 || rank >= size)
    return refuse(nullptr, kInvalidArgument, "no such rank or size");
  if (strncmp(id.text, "/dev/shm/standin-nccl-", 22))
    return refuse(nullptr, kInvalidArgument, "not a unique id");
  Communicator* made = *out = make(id.text, size, rank, device, blocks);
  return set_up(made, [made] { return join(made); });
}

void await_outstanding(Communicator* communicator) {
  while (communicator->outstanding) usleep(100);
}

// Waits for all ranks, whose last transfers may need this one. An abort ends the wait.
bool meet_to_finalize(Communicator* communicator) {
  auto* shared = communicator->shared;
  if (!shared) return true;  // it was never made
  ++shared->finalized;
  return wait_until(communicator, "CommFinalize",
                    [=] { return shared->finalized >= communicator->size; });
}

// Exchanges colors and keys on the host, then joins the ranks of the same color.
int split(Communicator* parent, Communicator* child, int color, int key, std::uint64_t number) {
  auto* ranks = parent->shared->ranks;
  ranks[parent->rank].color = color;
  ranks[parent->rank].key = key;
  const auto meet_hosts = [&] {
    const std::uint64_t phase = ++parent->host_phase;
    ranks[parent->rank].host_phase = phase;
    return wait_until(parent, "CommSplit", [=] {
      for (int r = 0; r < parent->size; ++r)
        if (ranks[r].host_phase < phase) return false;
      return true;
    });
  };
  if (!meet_hosts()) return kInvalidUsage;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int r = 0; r < parent->size; ++r)
    if (ranks[r].color == color) members.emplace_back(ranks[r].key, r);
  if (!meet_hosts()) return kInvalidUsage;  // all have read before the next split writes
  if (!child) return kSuccess;
  std::sort(members.begin(), members.end());
  child->size = static_cast<int>(members.size());
  for (std::size_t i = 0; i < members.size(); ++i)
    if (members[i].second == parent->rank) child->rank = static_cast<int>(i);
  child->name = parent->name + "-" + std::to_string(number) + "-" + std::to_string(color);
  return join(child);
}

}  // namespace

namespace standin_nccl {

thread_local int depth = 0;

int refuse(Communicator* communicator, int result, const std::string& why) {
  last_error = why;
  if (communicator) communicator->error = why;
  fprintf(stderr, "stand-in NCCL: %s\n", why.c_str());
  return result;
}

// After an abort, only the end of the process is defined.
Communicator* live(Communicator* communicator) {
  if (communicator && communicator->is_aborted) {
    fprintf(stderr, "stand-in NCCL: rank %d uses a communicator after its abort\n",
            communicator->rank);
    abort();
  }
  return communicator;
}

int join_group() {
  auto made = std::move(joining);
  joining.clear();
  std::vector<std::thread> threads;
  int result = kSuccess;
  for (auto& [communicator, work] : made) {
    if (!communicator->is_blocking) {
      set_up(communicator, work);
      result = kInProgress;
    } else {
      threads.emplace_back([&] { communicator->state = work(); });
    }
  }
  for (auto& thread : threads) thread.join();
  for (auto& [communicator, work] : made)
    if (communicator->is_blocking && communicator->state) result = communicator->state;
  return result;
}

}  // namespace standin_nccl

extern "C" {

int ncclGetVersion(int* version) {
  const char* text = getenv("STANDIN_NCCL_VERSION");
  *version = text ? atoi(text) : 23203;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> made{0};
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/dev/shm/standin-nccl-%d-%d-%lx", getpid(), ++made,
           static_cast<unsigned long>(time(nullptr)));
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= kInProgress ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(Communicator* communicator) {
  return communicator ? communicator->error.c_str() : last_error.c_str();
}

int ncclCommInitRankConfig(Communicator** out, int size, UniqueId id, int rank,
                           const Config* config) {
  return init(out, size, id, rank, standin_current_device(), is_blocking(config));
}

int ncclCommInitRank(Communicator** out, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

int ncclCommInitRankScalable(Communicator** out, int size, int rank, int, UniqueId* ids,
                             const Config* config) {
  return ncclCommInitRankConfig(out, size, ids[0], rank, config);
}

int ncclCommInitAll(Communicator** out, int count, const int* devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  ++depth;
  int wrong = kSuccess;
  for (int i = 0; i < count && !wrong; ++i)
    wrong = init(out + i, count, id, i, devices ? devices[i] : i, true);
  --depth;
  return wrong ? wrong : end_group();
}

int ncclCommSplit(Communicator* parent, int color, int key, Communicator** out,
                  const Config* config) {
  live(parent);
  const bool blocks =
      config && config->blocking != INT_MIN ? config->blocking : parent->is_blocking;
  Communicator* child = color < 0 ? nullptr : make("", 0, 0, parent->device, blocks);
  *out = child;
  const std::uint64_t number = parent->splits++;
  auto work = [=] { return split(parent, child, color, key, number); };
  return child ? set_up(child, work) : work();
}

int ncclCommCount(Communicator* communicator, int* count) {
  *count = live(communicator)->size;
  return kSuccess;
}

int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = live(communicator)->rank;
  return kSuccess;
}

int ncclCommCuDevice(Communicator* communicator, int* device) {
  *device = live(communicator)->device;
  return kSuccess;
}

int ncclCommGetAsyncError(Communicator* communicator, int* result) {
  *result = live(communicator)->state;
  return kSuccess;
}

int ncclCommFinalize(Communicator* communicator) {
  live(communicator);
  await_outstanding(communicator);
  if (communicator->is_finalized) return refuse(communicator, kInvalidUsage, "finalized before");
  communicator->is_finalized = true;
  if (communicator->is_blocking) {
    meet_to_finalize(communicator);
    return kSuccess;
  }
  communicator->state = kInProgress;
  ++communicator->outstanding;
  std::thread([communicator] {
    if (meet_to_finalize(communicator)) communicator->state = kSuccess;
    --communicator->outstanding;
  }).detach();
  return kInProgress;
}

int ncclCommDestroy(Communicator* communicator) {
  live(communicator);
  await_outstanding(communicator);
  if (!communicator->is_finalized) meet_to_finalize(communicator);
  if (communicator->shared) munmap(communicator->shared, sizeof(Shared));
  delete communicator;
  return kSuccess;
}

int ncclCommAbort(Communicator* communicator) {
  live(communicator)->is_aborted = true;  // frees what is stuck, on this rank alone
  await_outstanding(communicator);
  if (communicator->rank == 0) unlink(communicator->name.c_str());
  return kSuccess;  // it is never freed, so that a later call is found
}

}  // extern "C"
