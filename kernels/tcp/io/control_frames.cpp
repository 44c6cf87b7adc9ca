// A member's control plane: control frames, as they go and come.
#include <algorithm>

#include "tcp/io/engine.h"

namespace allreduce::tcp {
namespace {

std::string text(const std::vector<std::byte>& payload, std::size_t from, std::size_t bytes) {
  return {reinterpret_cast<const char*>(payload.data()) + from, bytes};
}

}  // namespace

void Member::touch(Connection& connection) {
  if (std::find(dirty_.begin(), dirty_.end(), &connection) == dirty_.end())
    dirty_.push_back(&connection);
}

void Member::send_control(int to, Header header, std::vector<std::byte> payload) {
  auto& connections = peer(to).connections;
  if (connections.empty() || !connections[kControl]) return;
  Outgoing frame;
  if (header.kind == Kind::post) peer(to).payload += payload.size() - header.signature;
  if (header.kind == Kind::message)  // with its number of elements before the data
    peer(to).payload += payload.size() - header.signature - sizeof(std::uint64_t);
  header.length = static_cast<std::uint32_t>(payload.size());
  frame.header = header;
  frame.own = std::move(payload);
  connections[kControl]->queue(std::move(frame));
  touch(*connections[kControl]);
}

void Member::flush() {
  while (!dirty_.empty()) {
    const std::vector<Connection*> dirty = std::exchange(dirty_, {});
    for (Connection* connection : dirty) {
      if (connection->registration == 0) continue;  // dropped
      // A failure shows when the connection is read, after the peer's earlier frames.
      const Flow flow = connection->send(*this);
      const bool wants = flow == Flow::open && !connection->idle();
      if (wants == connection->wants_send) continue;
      connection->wants_send = wants;
      Engine::instance().update(*connection, !dead() && !leaving_);
    }
  }
  gone_.clear();
}

void Member::on_ready(Connection& connection, Ready ready) {
  if (dead() || leaving_) {
    // Received frames no longer matter, but queued ones must be sent. It may have become readable
    // before this member failed because of another connection's frame.
    if (ready.hung_up) return drop(connection);
    return touch(connection);
  }
  if (ready.readable) {
    const Flow flow = connection.receive(*this);
    if (connection.registration == 0) return;  // dropped
    // If the frame ended this member, inform its sender, too.
    if (flow != Flow::open && !dead()) return ended(connection);
  }
  if (!connection.idle()) touch(connection);
}

bool Member::take_control(Connection& from, const Header& header) {
  const std::vector<std::byte>& payload = from.control;
  if (header.signature > payload.size() || header.signature > kMaxSignature) return false;
  const int who = from.peer();
  if (peer(who).left) return false;  // it has sent its last frame
  switch (header.kind) {
    case Kind::post: {
      if ((header.key & kMessage) != 0 || header.key >= started_ + kAhead) return false;
      if (peer(who).posts.count(header.key) != 0) return false;
      Post post{text(payload, 0, header.signature),
                {payload.begin() + header.signature, payload.end()}};
      if (!well_formed(post.signature)) return false;
      take_post(who, header.key, std::move(post));
      return true;
    }
    case Kind::message:
    case Kind::offer:
      return take_message(who, header, payload);
    case Kind::accept:
      return take_accept(who, header);
    case Kind::credit: {
      const auto found = pending_.find(header.key);
      if (found == pending_.end()) return header.key < started_;
      if (found->second.complete) return true;
      return found->second.execution &&
             found->second.execution->credited(who, header.stage, header.offset);
    }
    case Kind::fault:
      peer(who).told_fault = take_fault(header, payload);
      return peer(who).told_fault;
    case Kind::goodbye:
      peer(who).left = true;
      peer(who).completed = header.key;
      forget_offers(who);
      check_left(who);
      return true;
    case Kind::waits:
      take_waits(who, header);
      return true;
    case Kind::data:
      return false;
  }
  return false;
}

}  // namespace allreduce::tcp
