// One socket to a peer: frames out, in order; frames in, straight to where they belong.
#pragma once

#include <sys/types.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tcp/calls/staging.h"
#include "tcp/io/protocol.h"

namespace allreduce::tcp {

class Execution;

// A frame to send: its payload is either its own or lies in an array of its call.
struct Outgoing {
  Header header;
  std::vector<std::byte> own;
  const std::byte* data = nullptr;
  Block hold;                            // where `data` lies, if it is staged
  std::shared_ptr<Execution> execution;  // told when the frame is sent
  std::size_t stage = 0;                 // its index in the execution

  std::size_t bytes() const { return sizeof(Header) + header.length; }
  const std::byte* payload() const { return own.empty() ? data : own.data(); }
};

// Where an incoming payload goes.
struct Landing {
  std::byte* at = nullptr;  // null: such a frame must not come
  Block block;              // if it is staged
  std::shared_ptr<Execution> execution;
};

class Connection;
// The owner of connections: provides the places of payloads, and handles frames.
class Owner {
 public:
  virtual ~Owner() = default;
  virtual Landing land(Connection& from, const Header& header) = 0;
  // False: the frame made no sense, or the connection is not wanted any more.
  virtual bool arrived(Connection& from, const Header& header, Landing landing) = 0;
  virtual void sent(const Outgoing& frame) = 0;
};

enum class Flow : std::uint8_t { open, ended, broken };

class Connection {
 public:
  // Takes the socket over. `channel`: kControl, kProbes, or kData and above.
  Connection(int fd, int peer, int channel);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  int peer() const { return peer_; }
  int channel() const { return channel_; }

  void queue(Outgoing frame) { waiting_.push_back(std::move(frame)); }
  bool idle() const { return waiting_.empty(); }
  // Drops unsent frames: no array is read any more.
  void forget();
  // Sends as much as the socket takes.
  Flow send(Owner& owner);
  // Receives what is there, up to a limit, so that others get their turn.
  Flow receive(Owner& owner);
  // Bytes that the kernel has not delivered to the peer.
  bool delivered() const;

  std::uint64_t registration = 0;  // the engine's
  bool wants_send = false;         // whether the engine waits for room

  std::vector<std::byte> control;  // payload of an incoming control frame

 private:
  bool accept_header(Owner& owner);
  ssize_t read_some(Header& next);
  bool advance(Owner& owner, std::size_t got, const Header& next);
  bool hand_over(Owner& owner);

  const int fd_;
  const int peer_;
  const int channel_;

  std::deque<Outgoing> waiting_;  // the first of them is `sent_` bytes on its way
  std::size_t sent_ = 0;

  Header header_;
  std::size_t header_got_ = 0;
  Landing landing_;
  std::size_t payload_got_ = 0;
};

}  // namespace allreduce::tcp
