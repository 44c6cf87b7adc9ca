// One member of a tcp communicator: its connections, its started calls, and its peers' frames.
//
// All of it lives on the engine's thread; other threads hand it functions to run (Engine::run).
//
// Every call is posted to all members with its signature; data is sent only after all posts have
// arrived and agree. Received data therefore belongs to a call that all members made alike, and
// goes straight into the output.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tcp/calls/execution.h"
#include "tcp/io/connection.h"
#include "tcp/io/protocol.h"
#include "tcp/member/work.h"

namespace allreduce::tcp {

using Clock = std::chrono::steady_clock;

class Member final : public Owner, public Wires, public std::enable_shared_from_this<Member> {
 public:
  // `fds`: for each member, its sockets: for control frames, for probes, then those for data. Taken
  // over.
  Member(int index, const std::vector<std::vector<int>>& fds);
  ~Member() override;

  // --- any thread ---
  int index() const { return me_; }
  int members() const { return n_; }
  bool inherited() const;
  // In a child made by fork: closes its copies of the sockets.
  void close_inherited();
  // Starts a call in the engine; a call without other members is carried out here.
  void submit(const std::shared_ptr<Work>& work);

  // --- the engine's thread ---
  // Throws std::system_error where the system cannot watch the connections.
  void attach();
  void start(const std::shared_ptr<Work>& work);
  // Ends a member that lacks memory or a system resource.
  void collapse(const char* why) noexcept;
  // Kills the communicator, for all members.
  void die(Culprit culprit);
  // Says goodbye, or the fault, and lets go of everything when it is out; at the deadline anyhow.
  // `farewell` is settled then.
  void leave(Clock::time_point deadline, std::shared_ptr<Work> farewell);
  bool dead() const { return culprit_.fault != Fault::none; }
  const Culprit& culprit() const { return culprit_; }
  std::vector<int> missing(std::uint64_t key) const;
  // The ones whose own posts or messages are missing: not members that have posted and sent their
  // part.
  std::vector<int> absent(std::uint64_t key) const;
  // Reports to all others the member that this one waits for, or kNobody; and in which call: of
  // messages the kind, in Python's numbering.
  void tell_waits(std::uint64_t in, int member);
  // Reports to all others, once, the member that this one waits for in the current collective.
  // Every living member answers with its own, whatever its threads do.
  void tell_under_way();
  // The member that another one reported to wait for, in the collective that `key` waits for here.
  int awaited_in_call(int member, std::uint64_t key) const;
  // The member that another one reported to wait for, and in which message.
  int awaited(int member) const { return peer(member).awaited; }
  std::uint64_t awaited_in(int member) const { return peer(member).awaited_in; }
  // Bytes of calls' data, by peer, that were handed to its connections.
  std::vector<std::uint64_t> payload_bytes() const;
  // Bytes of memory that it has for staged chunks.
  std::size_t staging_bytes() const { return staging_->bytes(); }
  // The signature of a member's call, if it is known.
  std::optional<std::string> posted(int member, std::uint64_t key) const;
  std::optional<std::pair<std::uint64_t, std::string>> last_call(int member) const;

  // The system's events for a connection. After a hang-up nothing can be sent.
  struct Ready {
    bool readable;
    bool hung_up;
  };
  void on_ready(Connection& connection, Ready ready);
  // Sends the frames queued since.
  void flush();
  // When to call `tick` next, if ever.
  std::optional<Clock::time_point> deadline() const;
  void tick(Clock::time_point now);

  // Owner, Wires
  Landing land(Connection& from, const Header& header) override;
  bool arrived(Connection& from, const Header& header, Landing landing) override;
  void sent(const Outgoing& frame) override;
  void send_data(int peer, Outgoing frame) override;
  void send_credit(int peer, std::uint64_t key, std::uint32_t stage,
                   std::uint64_t allowed) override;
  Block take(std::size_t bytes) override { return staging_->take(bytes); }

 private:
  struct Post {
    std::string signature;
    std::vector<std::byte> payload;
  };
  struct Peer {
    std::vector<std::unique_ptr<Connection>> connections;
    std::map<std::uint64_t, Post> posts;  // of calls that are not complete here
    std::optional<std::pair<std::uint64_t, std::string>> last;
    std::uint64_t payload = 0;  // bytes of data for it
    bool left = false;
    bool told_fault = false;                   // why it ends: it is not lost
    std::uint64_t completed = 0;               // calls it had completed when it left
    std::optional<Clock::time_point> suspect;  // a connection ended without a goodbye
    int unaccepted = 0;                        // small messages to it
    int unreceived = 0;                        // small messages from it, without a receiver
    int awaited = kNobody;                     // by it
    std::uint64_t awaited_in = 0;
    std::optional<std::pair<std::uint64_t, int>> under_way;  // call, awaited member
  };
  struct Pending {  // a collective
    std::shared_ptr<Work> work;
    std::shared_ptr<Execution> execution;
    bool posted = false;
    bool begun = false;
    bool complete = false;
    int agreed = 0;  // peers whose posts are there, and equal
  };
  struct Arrival {  // a message without a receiver
    int source;
    std::uint64_t key;
    std::int64_t tag;
    Type type;
    std::uint64_t count;
    std::string signature;
    std::vector<std::byte> payload;
    bool offered;               // its bytes are still with the sender
    std::shared_ptr<Work> own;  // sent by this member to itself
  };
  struct Suspicion {  // posts differ: the culprit is found when all have arrived
    std::uint64_t key;
    int member;  // whose post differs from another
    Clock::time_point until;
  };

  Peer& peer(int member) { return peers_[static_cast<std::size_t>(member)]; }
  const Peer& peer(int member) const { return peers_[static_cast<std::size_t>(member)]; }

  // member.cpp: collectives
  bool admit(const std::shared_ptr<Work>& work);
  void begin(const std::shared_ptr<Work>& work);
  void post_ready();
  void post(Pending& pending);
  void take_post(int from, std::uint64_t key, Post post);
  void complete(std::uint64_t key);
  void finish(std::uint64_t key);
  void grant_staging();
  std::uint64_t first_pending() const {
    return pending_.empty() ? started_ : pending_.begin()->first;
  }

  // agreement.cpp: whether all members made the same call
  void compare(Pending& pending, int member);
  void suspect(std::uint64_t key, int member);
  void judge(bool late);
  void agree(std::uint64_t key);

  // control_frames.cpp
  void touch(Connection& connection);
  void send_control(int peer, Header header, std::vector<std::byte> payload = {});
  bool take_control(Connection& from, const Header& header);

  // shutdown.cpp: faults, ends of connections, leaving
  void send_fault(int to);
  bool take_fault(const Header& header, const std::vector<std::byte>& payload);
  void ended(Connection& connection);
  void check_left(int member);
  void blame(Fault fault, int member, std::uint64_t key, std::string reason = "");
  void condemn(Culprit culprit);
  bool condemned(Clock::time_point now);
  bool calls_begun() const;
  bool calls_before(std::uint64_t key) const;
  bool can_complete(std::uint64_t key) const;
  bool gone(int member) const;
  void drop_data();
  void drop_all();
  void fail_all();
  void drop(Connection& connection);
  void close_all();

  // diagnostics.cpp
  std::shared_ptr<Work> started(std::uint64_t key) const;
  void take_waits(int from, const Header& header);

  // messages.cpp: send and recv
  void start_send(const std::shared_ptr<Work>& work);
  void start_receive(const std::shared_ptr<Work>& work);
  bool take_message(int from, const Header& header, const std::vector<std::byte>& payload);
  std::shared_ptr<Work> take_receiver(const Arrival& arrival);
  bool keep(Arrival arrival);
  bool take_accept(int from, const Header& header);
  void match(const std::shared_ptr<Work>& work, Arrival arrival);
  void forget_offers(int member);
  void finish_message(std::uint64_t key);
  std::shared_ptr<Work> message_needing(int member) const;

  const int me_;
  const int n_;
  const int process_;
  std::vector<Peer> peers_;
  std::vector<std::atomic<int>> fds_;  // for a child made by fork
  std::vector<Connection*> dirty_;
  const std::shared_ptr<Staging> staging_ = std::make_shared<Staging>();

  std::map<std::uint64_t, Pending> pending_;
  std::map<std::uint64_t, Pending>::const_iterator first_to(std::uint64_t key) const;
  std::uint64_t started_ = 0;
  std::uint64_t posted_ = 0;
  std::optional<std::pair<std::uint64_t, std::string>> last_;  // of this member
  std::optional<std::uint64_t> told_under_way_;
  std::optional<std::string> stopped_;  // signature of the call that a fault stopped
  std::optional<Suspicion> suspicion_;

  std::uint64_t messages_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Work>> offers_;          // sends that wait for accept
  std::deque<std::shared_ptr<Work>> receives_;                     // recvs that wait for a message
  std::map<std::uint64_t, std::shared_ptr<Execution>> exchanges_;  // messages on their way
  std::deque<Arrival> arrivals_;

  struct Verdict {
    Culprit culprit;
    Clock::time_point until;
  };
  std::optional<Verdict> verdict_;
  Culprit culprit_;
  bool leaving_ = false;
  bool closed_ = false;
  Clock::time_point leave_by_{};
  std::vector<std::shared_ptr<Work>> farewells_;
  std::vector<std::unique_ptr<Connection>> gone_;  // until no callback can be inside them
};

// eager.cpp
// The contribution of `me` to the output of `reader`, for calls whose data travels with the posts.
std::pair<const std::byte*, std::size_t> contribution(const Request& request, int me, int reader);
// Computes the output of `me` from all contributions; `parts` of `me` itself is unused.
void finish_eager(const Request& request, int me, int members,
                  const std::vector<const std::byte*>& parts);

}  // namespace allreduce::tcp
