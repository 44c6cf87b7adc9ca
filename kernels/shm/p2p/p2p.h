// One member's sends and recvs. They are not collective, and have no place in the order of calls.
//
// Members write letters into each other's boxes. A small message travels with its letter; a large
// one is offered, and moves when a recv has met it: in chunks through the sender's windows, several
// messages by turns, or straight out of symmetric memory. Unmatched messages delay nothing: a
// receiver copies small ones, at most kUntaken from each sender, which offers the next ones.
//
// A recv takes the first message that fits it, and a message the first recv that takes it: letters
// of one member arrive in the order in which it wrote them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shm/progress/collectives.h"

namespace allreduce {

inline std::uint64_t bytes_of(const Work& work) {
  return work.call.count * size_of(work.call.type);
}

// The holder of the member's lock calls all but busy(). Nothing blocks.
class Messages {
 public:
  explicit Messages(Share& share);

  void start(const std::shared_ptr<Work>& work);
  // Advances the messages a little.
  Progress advance();
  // Blames a member that left in good order without its part of a message.
  void check_left();
  // Reports a message of this member that still waits, for readers of the culprit; returns its
  // number, if there is one.
  bool tell_first(std::uint64_t& number);
  // Blames the other side of a message.
  void give_up(const Work& work);
  void fail_all();
  // After the end of the communicator: completes the messages that have arrived, and fails all
  // others.
  void end();

  // Whether there may be something to do.
  bool busy() const;

 private:
  // A message, or the offer of one.
  struct Incoming {
    Letter letter;
    const std::byte* payload;
    std::string_view remark;
    std::shared_ptr<Work> own;  // the send, if it is one to oneself that stays where it is
  };
  // An unmatched message, with a copy of its data.
  struct Arrival {
    Incoming message;
    std::vector<std::byte> payload;
    std::string remark;
  };
  // A letter, the work whose message it carries or that is done when it is written, and the latter.
  struct Outgoing {
    Letter letter;
    std::shared_ptr<Work> work;
    bool settles;
  };
  // A send that a recv has accepted, or a recv that reads symmetric memory.
  struct Move {
    std::shared_ptr<Work> work;
    Letter letter;  // of the other side
    std::shared_ptr<SymmetricRegion> region;
  };

  void start_send(const std::shared_ptr<Work>& work);
  void start_recv(const std::shared_ptr<Work>& work);
  void arrive(const Incoming& message);
  void meet(const std::shared_ptr<Work>& recv, const Incoming& message);
  void meet_offer(const std::shared_ptr<Work>& recv, const Letter& letter);

  void write(int to, const Outgoing& outgoing);
  void write(int to, const Letter& letter) { write(to, {letter, nullptr, false}); }
  bool try_write(int to, const Outgoing& outgoing);
  bool write_unsent();
  bool read_letter();
  bool sound(const Letter& letter) const;
  void take(const Incoming& incoming);
  void take_chunk(const Letter& letter);
  bool stage_chunk();
  int free_window(int receiver) const;
  bool fetch();

  std::shared_ptr<Work> find(std::uint64_t number) const;
  void wait_for(const std::shared_ptr<Work>& work);
  void settle(const std::shared_ptr<Work>& work);
  void count();
  bool left(int member) const;
  bool needs(const Work& work, const std::vector<bool>& gone) const;
  bool blame(Fault fault, int member, const Work& work, const MessageRecord* other = nullptr);
  Mailbox& own() const { return share_.control().mailbox(share_.me); }

  Share& share_;
  std::uint64_t started_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Work>> pending_;  // by number: all that are not done
  std::deque<std::shared_ptr<Work>> looking_;
  std::deque<Arrival> arrivals_;
  std::deque<Move> sending_, fetching_;
  std::map<int, std::deque<Outgoing>> unsent_;  // by receiver
  std::vector<int> untaken_;                    // small messages to each member, as far as known
  std::vector<int> taken_;                      // of each member, not yet reported to it
  int receivers_[kWindows] = {};                // of the chunk in each window
  std::atomic<std::uint64_t> read_{0};          // letters so far
  std::atomic<std::uint64_t> fetched_{0};       // bytes read in symmetric memory so far
  std::atomic<std::size_t> waiting_{0};         // works and letters
  std::atomic<bool> ended_{false};
};

}  // namespace allreduce
