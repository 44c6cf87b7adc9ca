// NCCL's C functions for calls, which are enqueued on streams, and for groups of them.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "../standin.h"
#include "nccl.h"

using namespace standin_nccl;

namespace {

thread_local std::vector<Call> grouped;

constexpr std::uint64_t kLateCalls = 7;  // one in so many is enqueued in the background
constexpr unsigned kLateMicroseconds = 2000;

struct Launch {
  Communicator* communicator;
  std::vector<Call> calls;
  std::uint64_t first;
};

int put_on_stream(Launch* made) {
  Communicator* communicator = made->communicator;
  const int wrong = standin_enqueue(
      made->calls[0].stream,
      [](void* data) {
        auto* launch = static_cast<Launch*>(data);
        const int result = run_calls(launch->communicator, launch->calls, launch->first);
        --launch->communicator->outstanding;
        delete launch;
        return result;
      },
      made);
  if (!wrong) return kSuccess;
  --communicator->outstanding;
  delete made;
  return kUnhandledCudaError;
}

// Whether a variable names the number of this launch, from 0.
bool is_asked(const char* variable, std::uint64_t number) {
  const char* text = getenv(variable);
  return text && strtoull(text, nullptr, 10) == number;
}

int launch(Communicator* communicator, std::vector<Call> calls) {
  if (communicator->state != kSuccess || communicator->is_finalized)
    return refuse(communicator, kInvalidUsage, "the communicator is not ready, or has failed");
  const std::uint64_t number = communicator->launches++;
  if (is_asked("STANDIN_NCCL_REFUSES", number))
    return refuse(communicator, kSystemError, "it was told to refuse this call");
  if (is_asked("STANDIN_NCCL_STALLS", number)) return communicator->state = kInProgress;
  const bool fails = is_asked("STANDIN_NCCL_FAILS", number);
  auto* made = new Launch{communicator, std::move(calls), communicator->sequence};
  // A root's group has more transfers than the others': only collectives count.
  const auto collectives = std::count_if(made->calls.begin(), made->calls.end(), [](const Call& c) {
    return c.kind != kSend && c.kind != kReceive;
  });
  // NCCL connects ranks in the background at first calls. The stream has the call only afterwards.
  const bool is_late = fails || (!communicator->is_blocking && number % kLateCalls == 0);
  communicator->sequence += static_cast<std::uint64_t>(collectives);
  ++communicator->outstanding;
  if (!is_late) return put_on_stream(made);
  communicator->state = kInProgress;
  ++communicator->outstanding;
  std::thread([made, communicator, fails] {
    usleep(kLateMicroseconds);
    standin_enter(communicator->device);
    if (fails) {
      --communicator->outstanding;
      delete made;
      communicator->state = kSystemError;
    } else {
      communicator->state = put_on_stream(made);
    }
    --communicator->outstanding;
  }).detach();
  return kInProgress;
}

int check(const Call& call) {
  Communicator* communicator = call.communicator;
  const bool has_root = call.kind == kBroadcast || call.kind == kReduce || call.kind == kSend ||
                        call.kind == kReceive;
  if (!size_of(call.type)) return refuse(communicator, kInvalidArgument, "no such type");
  if (has_root && (call.root < 0 || call.root >= communicator->size))
    return refuse(communicator, kInvalidArgument, "no such root or peer");
  if (call.op < 0 || call.op >= kOperators + static_cast<int>(communicator->operators.size()))
    return refuse(communicator, kInvalidArgument, "no such operator");
  if (standin_stream_device(call.stream) != communicator->device)
    return refuse(communicator, kInvalidArgument,
                  "the stream is not of the communicator's device, or its context is not current");
  return kSuccess;
}

int start(const Call& call) {
  live(call.communicator);
  if (!call.communicator) return refuse(nullptr, kInvalidArgument, "no communicator");
  if (int wrong = check(call)) return wrong;
  if (depth) {
    grouped.push_back(call);
    return kSuccess;
  }
  return launch(call.communicator, {call});
}

}  // namespace

namespace standin_nccl {

int end_group() {
  int result = join_group();
  auto calls = std::move(grouped);
  grouped.clear();
  std::vector<Communicator*> order;
  for (const Call& call : calls)
    if (std::find(order.begin(), order.end(), call.communicator) == order.end())
      order.push_back(call.communicator);
  for (Communicator* communicator : order) {
    std::vector<Call> own;
    for (const Call& call : calls)
      if (call.communicator == communicator) own.push_back(call);
    for (const Call& call : own)
      if (call.stream != own[0].stream)
        return refuse(communicator, kInvalidUsage, "a group uses one communicator on two streams");
    if (int wrong = launch(communicator, own)) result = wrong;
  }
  return result;
}

}  // namespace standin_nccl

extern "C" {

int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (!depth) return refuse(nullptr, kInvalidUsage, "a group ends that has not started");
  return --depth ? int{kSuccess} : end_group();
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence,
                             Communicator* communicator) {
  live(communicator);
  if (!size_of(type)) return refuse(communicator, kInvalidArgument, "no such type");
  const bool is_on_device = residence == 0;
  communicator->operators.push_back(
      {type, is_on_device, scalar, is_on_device ? 0 : read_scalar(scalar, type)});
  *op = kOperators + static_cast<int>(communicator->operators.size()) - 1;
  return kSuccess;
}

int ncclRedOpDestroy(int op, Communicator* communicator) {
  live(communicator);
  const bool is_known =
      op >= kOperators && op < kOperators + static_cast<int>(communicator->operators.size());
  return is_known ? int{kSuccess} : refuse(communicator, kInvalidArgument, "no such operator");
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op,
                  Communicator* communicator, void* stream) {
  return start({kAllReduce, communicator, send, receive, count, type, op, 0, stream});
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root,
                  Communicator* communicator, void* stream) {
  return start({kBroadcast, communicator, send, receive, count, type, 0, root, stream});
}

int ncclBcast(void* buffer, size_t count, int type, int root, Communicator* communicator,
              void* stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root,
               Communicator* communicator, void* stream) {
  return start({kReduce, communicator, send, receive, count, type, op, root, stream});
}

int ncclAllGather(const void* send, void* receive, size_t count, int type,
                  Communicator* communicator, void* stream) {
  return start({kAllGather, communicator, send, receive, count, type, 0, 0, stream});
}

int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op,
                      Communicator* communicator, void* stream) {
  return start({kReduceScatter, communicator, send, receive, count, type, op, 0, stream});
}

int ncclSend(const void* send, size_t count, int type, int peer, Communicator* communicator,
             void* stream) {
  return start({kSend, communicator, send, nullptr, count, type, 0, peer, stream});
}

int ncclRecv(void* receive, size_t count, int type, int peer, Communicator* communicator,
             void* stream) {
  return start({kReceive, communicator, nullptr, receive, count, type, 0, peer, stream});
}

int ncclAlltoAll(const void* send, void* receive, size_t count, int type,
                 Communicator* communicator, void* stream) {
  const std::size_t bytes = count * size_of(type);
  ncclGroupStart();
  int wrong = kSuccess;
  for (int r = 0; r < live(communicator)->size && !wrong; ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * bytes;
    wrong = ncclSend(static_cast<const char*>(send) + at, count, type, r, communicator, stream);
    if (!wrong)
      wrong = ncclRecv(static_cast<char*>(receive) + at, count, type, r, communicator, stream);
  }
  const int ended = ncclGroupEnd();
  return wrong ? wrong : ended;
}

}  // extern "C"
