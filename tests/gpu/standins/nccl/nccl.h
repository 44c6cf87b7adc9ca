// The stand-in NCCL's types: what ranks share, communicators and calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace standin_nccl {

enum Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
enum Type {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kTypes
};
enum Operator { kSum, kProduct, kMax, kMin, kMean, kOperators };
enum Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };
extern const char* const kind_names[];
std::size_t size_of(int type);

constexpr int kRanks = 16;
constexpr std::size_t kRoom = 256 << 10, kBox = 64 << 10;  // bytes of one chunk

// What has to be equal on all ranks, in one order.
struct Signature {
  std::uint64_t sequence;
  std::int32_t kind, type, op, root;
  std::uint64_t count;
};

struct Box {  // from one rank to another
  std::atomic<std::uint32_t> is_full;
  std::int32_t type;
  std::uint64_t bytes, total;
  std::byte data[kBox];
};

struct Shared {  // a file that all ranks map; it starts as zeros
  std::atomic<int> joined, finalized;
  struct Rank {
    std::atomic<int> pid;
    char device[64];  // host and number
    int size;         // of the group, as this rank was told
    std::atomic<std::uint64_t> phase, host_phase;
    Signature signature;
    int color, key;
  } ranks[kRanks];
  alignas(64) std::byte data[kRanks][kRoom];
  Box boxes[kRanks][kRanks];
};

struct PreMultiply {  // an operator: a sum of scaled values
  int type;
  bool is_on_device;
  const void* device_scalar;
  double scalar;
};

struct Communicator {
  std::string name;
  Shared* shared = nullptr;
  int rank = 0, size = 0, device = 0;
  bool is_blocking = true, is_finalized = false;
  std::uint64_t sequence = 0, launches = 0, phase = 0, host_phase = 0, splits = 0;
  std::atomic<int> state{kInProgress};  // the asynchronous error
  std::atomic<bool> is_aborted{false};
  std::atomic<int> outstanding{0};  // enqueued calls, and threads that join
  std::vector<PreMultiply> operators;
  std::string error;
};

struct Call {
  Kind kind;
  Communicator* communicator;
  const void* send;
  void* receive;
  std::size_t count;
  int type, op, root;  // root: the peer, for send and receive
  void* stream;
};

// communicators.cpp
extern thread_local int depth;  // of groups
int refuse(Communicator* communicator, int result, const std::string& why);
Communicator* live(Communicator* communicator);  // ends the process after an abort
int join_group();                                // starts the communicators that a group has made
// calls.cpp
int end_group();
// collectives.cpp
int run_calls(Communicator* communicator, const std::vector<Call>& calls, std::uint64_t first);
bool wait_until(Communicator* communicator, const char* what, bool (*is_done)(void*), void* data);
template <class Done>
bool wait_until(Communicator* communicator, const char* what, Done is_done) {
  return wait_until(
      communicator, what, [](void* data) { return (*static_cast<Done*>(data))(); }, &is_done);
}
bool meet(Communicator* communicator, const char* what);  // false: aborted
// reduce.cpp
void reduce(std::byte* out, const std::byte* const* inputs, int count, std::size_t elements,
            int type, int op);
void scale(std::byte* out, const std::byte* in, std::size_t elements, int type, double factor);
double read_scalar(const void* at, int type);

}  // namespace standin_nccl
