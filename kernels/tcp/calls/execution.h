// Carries a plan out, chunk by chunk, as frames come and go. Runs on the engine's thread only.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "tcp/calls/plan.h"
#include "tcp/io/connection.h"
#include "tcp/member/work.h"

namespace allreduce::tcp {

// The interface of a member that an execution needs.
class Wires {
 public:
  virtual ~Wires() = default;
  virtual void send_data(int peer, Outgoing frame) = 0;
  virtual void send_credit(int peer, std::uint64_t key, std::uint32_t stage,
                           std::uint64_t allowed) = 0;
  // Room for a chunk.
  virtual Block take(std::size_t bytes) = 0;
};

class Execution : public std::enable_shared_from_this<Execution> {
 public:
  Execution(std::shared_ptr<Work> work, Wires& wires, int me, int members);

  // All members have agreed: sends what begins here.
  void begin();
  // Staging memory is available: lets the others send the chunks that are staged here.
  void grant();
  // The peer's key, where it differs from ours: of a message, when it is accepted.
  void address(std::uint64_t key) { remote_key_ = key; }

  Landing land(int peer, const Header& header);
  void arrived(int peer, const Header& header, Landing landing);
  void sent(std::size_t stage, const Block& hold);
  bool credited(int peer, std::uint32_t stage, std::uint64_t allowed);

  bool finished() const { return remaining_ == 0; }
  bool windowed() const { return windowed_; }
  const std::shared_ptr<Work>& work() const { return work_; }
  // The peers whose data is still missing.
  std::vector<int> waits_for() const;

 private:
  struct Ready {  // a chunk that may go on
    std::uint64_t chunk;
    const std::byte* data;
    Block hold;
  };
  struct Window {  // chunks that a link's peer has allowed so far
    std::uint64_t allowed;
    std::deque<Ready> held;
  };
  struct Progress {
    std::uint64_t chunks = 0;
    std::uint64_t next = 0;              // where a flow begins: chunks that were sent off
    std::uint64_t in_flight = 0;         // of these, the ones not yet written to the socket
    std::vector<Window> windows;         // one per link
    std::vector<std::vector<bool>> got;  // per source, per chunk
    std::map<std::uint64_t, std::vector<Block>> meeting;  // chunks that wait for other sources
    std::map<const std::byte*, int> going;                // staged blocks, and their links to go
    std::uint64_t released = 0;                           // staged chunks that have gone on
  };

  std::uint64_t elements_of(const Stage& stage, std::uint64_t chunk) const;
  std::size_t block_of(const Stage& stage) const;
  std::byte* out_at(const Stage& stage, std::uint64_t chunk) const;
  const std::byte* in_at(const Stage& stage, std::uint64_t chunk) const;
  std::size_t index_of(std::uint32_t id) const;
  void pump(std::size_t index);
  void meet(std::size_t index, std::uint64_t chunk, int peer, Block block);
  void fold(std::size_t index, std::uint64_t chunk, const void* const* in, int n, void* out) const;
  void fold_one(std::size_t index, std::uint64_t chunk, Block block);
  void pass_on(std::size_t index, Ready ready);
  void transmit(std::size_t index, std::size_t link, const Ready& ready);
  void release(std::size_t index);
  int source_of(const Stage& stage, int peer) const;

  const std::shared_ptr<Work> work_;
  const Plan plan_;
  const bool windowed_;
  Wires& wires_;
  const int me_;
  const int members_;
  std::uint64_t remote_key_;
  bool begun_ = false;
  bool granted_ = false;
  std::uint64_t remaining_ = 0;  // arrivals, departures and transmissions to come
  std::map<std::uint32_t, std::size_t> indices_;
  std::vector<Progress> progress_;
};

}  // namespace allreduce::tcp
