// Collectives on a stream's worker: every rank puts chunks into shared memory and reads the
// others'.
//
// A mismatch hangs, as NCCL's does: until the communicator is aborted, or STANDIN_NCCL_TIMEOUT
// seconds have passed, which ends the process. stderr tells who called what.
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "../standin.h"
#include "nccl.h"

namespace standin_nccl {

const char* const kind_names[] = {"AllReduce",     "Broadcast", "Reduce", "AllGather",
                                  "ReduceScatter", "Send",      "Recv"};

namespace {

bool has_ended(int pid) {
  if (kill(pid, 0)) return true;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t after = text.rfind(')');
  return after != std::string::npos && text.compare(after + 2, 1, "Z") == 0;
}

void look_for_dead(Communicator* communicator) {
  for (int r = 0; r < communicator->size; ++r) {
    const int pid = communicator->shared->ranks[r].pid;
    if (pid && has_ended(pid)) communicator->state = kRemoteError;
  }
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double timeout() {
  const char* text = getenv("STANDIN_NCCL_TIMEOUT");
  return text ? atof(text) : 100;
}

// Device memory of a call; a failure is reported by the driver.
struct Memory {
  std::byte* at = nullptr;
  int error = 0;
  Memory(const Communicator* communicator, const void* address, std::size_t bytes) {
    void* found = nullptr;
    if (bytes) error = standin_translate(communicator->device, address, bytes, &found);
    at = static_cast<std::byte*>(found);
  }
};

std::string described(const Signature& s) {
  char text[200];
  snprintf(text, sizeof text, "%s #%lu of %lu elements of type %d, operator %d, root %d",
           kind_names[s.kind], s.sequence, s.count, s.type, s.op, s.root);
  return text;
}

// Compares this call with all ranks'. A mismatch waits for an abort.
bool agree(Communicator* communicator, const Signature& mine) {
  auto* ranks = communicator->shared->ranks;
  ranks[communicator->rank].signature = mine;
  const std::string what = described(mine);
  if (!meet(communicator, what.c_str())) return false;
  for (int r = 0; r < communicator->size; ++r) {
    if (!memcmp(&ranks[r].signature, &mine, sizeof mine)) continue;
    fprintf(stderr, "stand-in NCCL: rank %d calls %s, but rank %d calls %s: they hang\n",
            communicator->rank, what.c_str(), r, described(ranks[r].signature).c_str());
    wait_until(communicator, what.c_str(), [] { return false; });
    return false;
  }
  return meet(communicator, what.c_str());  // all have compared before the next call writes
}

int operator_code(const Call& call) { return call.op < kOperators ? call.op : kOperators; }

// Fills `to` with elements of this rank, scaled if the operator says so.
int put(Communicator* communicator, const Call& call, std::byte* to, const std::byte* from,
        std::size_t elements) {
  if (call.op < kOperators) {
    memcpy(to, from, elements * size_of(call.type));
    return 0;
  }
  const auto& op = communicator->operators[static_cast<std::size_t>(call.op - kOperators)];
  double factor = op.scalar;
  if (op.is_on_device) {
    const Memory scalar(communicator, op.device_scalar, size_of(op.type));
    if (scalar.error) return scalar.error;
    factor = read_scalar(scalar.at, op.type);
  }
  scale(to, from, elements, call.type, factor);
  return 0;
}

void get(Communicator* communicator, const Call& call, std::byte* to, std::size_t elements) {
  const std::byte* inputs[kRanks];
  for (int r = 0; r < communicator->size; ++r) inputs[r] = communicator->shared->data[r];
  reduce(to, inputs, communicator->size, elements, call.type,
         call.op < kOperators ? call.op : kSum);
}

struct Buffers {
  std::byte *send, *receive;
};

// Reduces `count` elements at an offset into `target`'s memory; -1: into everyone's.
int reduce_part(Communicator* communicator, const Call& call, Buffers at, std::size_t offset,
                std::byte* out, int target) {
  const std::size_t width = size_of(call.type), most = kRoom / width;
  for (std::size_t done = 0; done < call.count; done += most) {
    const std::size_t part = std::min(most, call.count - done);
    if (int wrong = put(communicator, call, communicator->shared->data[communicator->rank],
                        at.send + (offset + done) * width, part))
      return wrong;
    if (!meet(communicator, kind_names[call.kind])) return 0;
    if (target < 0 || target == communicator->rank)
      get(communicator, call, out + done * width, part);
    if (!meet(communicator, kind_names[call.kind])) return 0;
  }
  return 0;
}

int gather_parts(Communicator* communicator, const Call& call, Buffers at) {
  const std::size_t width = size_of(call.type), most = kRoom / width;
  auto& data = communicator->shared->data;
  const int rank = communicator->rank;
  const bool is_broadcast = call.kind == kBroadcast;
  for (std::size_t done = 0; done < call.count; done += most) {
    const std::size_t part = std::min(most, call.count - done) * width;
    if (!is_broadcast || rank == call.root) memcpy(data[rank], at.send + done * width, part);
    if (!meet(communicator, kind_names[call.kind])) return 0;
    for (int r = 0; r < communicator->size; ++r) {
      if (is_broadcast && r != call.root) continue;
      const std::size_t start = is_broadcast ? 0 : static_cast<std::size_t>(r) * call.count;
      memcpy(at.receive + (start + done) * width, data[r], part);
    }
    if (!meet(communicator, kind_names[call.kind])) return 0;
  }
  return 0;
}

int run_collective(Communicator* communicator, const Call& call, std::uint64_t sequence) {
  const Signature mine{sequence, call.kind, call.type, operator_code(call), call.root, call.count};
  if (!agree(communicator, mine)) return 0;
  const std::size_t bytes = call.count * size_of(call.type);
  const auto size = static_cast<std::size_t>(communicator->size);
  const bool is_root = communicator->rank == call.root;
  const std::size_t sent = call.kind == kReduceScatter           ? bytes * size
                           : call.kind == kBroadcast && !is_root ? 0
                                                                 : bytes;
  const std::size_t received = call.kind == kAllGather            ? bytes * size
                               : call.kind == kReduce && !is_root ? 0
                                                                  : bytes;
  const Memory send(communicator, call.send, sent), receive(communicator, call.receive, received);
  if (send.error || receive.error) return send.error ? send.error : receive.error;
  const Buffers at{send.at, receive.at};
  switch (call.kind) {
    case kAllReduce:
      return reduce_part(communicator, call, at, 0, at.receive, -1);
    case kReduce:
      return reduce_part(communicator, call, at, 0, at.receive, call.root);
    case kReduceScatter: {
      // In place, the output lies in the input, which later parts still read.
      std::vector<std::byte> out(bytes);
      for (int r = 0; r < communicator->size; ++r)
        if (int wrong = reduce_part(communicator, call, at,
                                    static_cast<std::size_t>(r) * call.count, out.data(), r))
          return wrong;
      if (!communicator->is_aborted) memcpy(at.receive, out.data(), bytes);
      return 0;
    }
    default:
      return gather_parts(communicator, call, at);
  }
}

struct Transfer {
  const Call* call;
  std::byte* at;
  std::size_t done = 0;
  bool is_finished = false;
};

// Moves what can be moved of one transfer; returns whether it is finished.
bool advance(Communicator* communicator, Transfer& transfer) {
  const Call& call = *transfer.call;
  const std::size_t total = call.count * size_of(call.type);
  const bool is_sent = call.kind == kSend;
  Box& box = is_sent ? communicator->shared->boxes[communicator->rank][call.root]
                     : communicator->shared->boxes[call.root][communicator->rank];
  if (box.is_full.load(std::memory_order_acquire) == static_cast<std::uint32_t>(is_sent))
    return false;
  if (is_sent && transfer.done == total) return true;  // received: NCCL promises no buffer
  if (is_sent) {
    box.bytes = std::min(kBox, total - transfer.done);
    box.total = total;
    box.type = call.type;
    memcpy(box.data, transfer.at + transfer.done, box.bytes);
  } else {
    if (box.total != total || box.type != call.type) {
      fprintf(stderr,
              "stand-in NCCL: rank %d receives %zu bytes of type %d from rank %d, which sends %lu "
              "of type %d: they hang\n",
              communicator->rank, total, call.type, call.root, box.total, box.type);
      wait_until(communicator, "Recv", [] { return false; });
      return false;
    }
    memcpy(transfer.at + transfer.done, box.data, box.bytes);
  }
  transfer.done += box.bytes;
  box.is_full.store(is_sent, std::memory_order_release);
  return !is_sent && transfer.done == total;
}

int run_transfers(Communicator* communicator, const std::vector<const Call*>& calls) {
  std::vector<Transfer> transfers;
  for (const Call* call : calls) {
    const std::size_t bytes = call->count * size_of(call->type);
    const Memory memory(communicator, call->kind == kSend ? call->send : call->receive, bytes);
    if (memory.error) return memory.error;
    if (bytes) transfers.push_back({call, memory.at});
  }
  wait_until(communicator, kind_names[calls[0]->kind], [&] {
    bool is_all = true, is_moving = true;
    while (is_moving && !communicator->is_aborted) {
      is_all = true;
      is_moving = false;
      std::vector<std::pair<int, int>> busy;  // one transfer at a time for each kind and peer
      for (Transfer& transfer : transfers) {
        if (transfer.is_finished) continue;
        const std::pair<int, int> key{transfer.call->kind, transfer.call->root};
        if (std::find(busy.begin(), busy.end(), key) == busy.end()) {
          const std::size_t before = transfer.done;
          transfer.is_finished = advance(communicator, transfer);
          is_moving |= transfer.done != before;
        }
        if (!transfer.is_finished) busy.push_back(key);
        is_all &= transfer.is_finished;
      }
    }
    return is_all;
  });
  return 0;
}

}  // namespace

bool wait_until(Communicator* communicator, const char* what, bool (*is_done)(void*), void* data) {
  const double start = seconds();
  double next_look = start + 0.02;
  for (int round = 0; !is_done(data); ++round) {
    if (communicator->is_aborted) return false;
    if (round > 20) usleep(round < 200 ? 20 : 200);
    const double now = seconds();
    if (now > next_look) {
      look_for_dead(communicator);
      next_look = now + 0.05;
    }
    if (now - start > timeout()) {
      fprintf(stderr, "stand-in NCCL: rank %d of %d hung for %.0f s in %s\n", communicator->rank,
              communicator->size, now - start, what);
      _exit(86);
    }
  }
  return !communicator->is_aborted;
}

bool meet(Communicator* communicator, const char* what) {
  auto* ranks = communicator->shared->ranks;
  const std::uint64_t phase = ++communicator->phase;
  ranks[communicator->rank].phase.store(phase);
  return wait_until(communicator, what, [=] {
    for (int r = 0; r < communicator->size; ++r)
      if (ranks[r].phase.load() < phase) return false;
    return true;
  });
}

int run_calls(Communicator* communicator, const std::vector<Call>& calls, std::uint64_t first) {
  const std::string holder = communicator->name + "#" + std::to_string(first);
  auto is_given_up = [](void* data) -> int { return *static_cast<std::atomic<bool>*>(data); };
  if (!standin_hold_device(communicator->device, holder.c_str(), is_given_up,
                           &communicator->is_aborted))
    return 0;
  int wrong = 0;
  std::vector<const Call*> transfers;
  for (std::size_t i = 0; i < calls.size() && !wrong && !communicator->is_aborted; ++i) {
    if (calls[i].kind == kSend || calls[i].kind == kReceive)
      transfers.push_back(&calls[i]);
    else
      wrong = run_collective(communicator, calls[i], first++);
  }
  if (!transfers.empty() && !wrong && !communicator->is_aborted)
    wrong = run_transfers(communicator, transfers);
  standin_release_device(communicator->device);
  return wrong;
}

}  // namespace standin_nccl
