#include "tcp/io/connection.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace allreduce::tcp {
namespace {

// Frames that one system call may take.
constexpr std::size_t kBatch = 16;
// Bytes after which the other connections get their turn.
constexpr std::size_t kTurn = 2 << 20;
// The kernel finds an unreachable host after 25 s: it probes an idle connection after 10 s, then 3
// times every 5 s. A stopped process's kernel answers. Connections with unsent data are not probed,
// and TCP_USER_TIMEOUT would end them where a stopped process does not read, so that its window
// stays closed. Hence the connection of probes alone, which is always idle.
constexpr int kProbeAfter = 10, kProbeEvery = 5, kProbeCount = 3;

void set(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

bool again(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

}  // namespace

Connection::Connection(int fd, int peer, int channel) : fd_(fd), peer_(peer), channel_(channel) {
  int on = 1;
  ioctl(fd, FIONBIO, &on);
  // Each fails harmlessly on sockets of another family.
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfter);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeEvery);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbeCount);
}

Connection::~Connection() { close(fd_); }

void Connection::forget() {
  waiting_.clear();
  sent_ = 0;
}

bool Connection::delivered() const {
  int left = 0;
  return ioctl(fd_, SIOCOUTQ, &left) != 0 || left == 0;
}

Flow Connection::send(Owner& owner) {
  while (!waiting_.empty()) {
    std::array<iovec, 2 * kBatch> parts;
    std::size_t used = 0, skip = sent_;
    const auto add = [&](const void* from, std::size_t bytes) {
      const std::size_t skipped = std::min(skip, bytes);
      skip -= skipped;
      if (bytes > skipped)
        parts[used++] = {static_cast<char*>(const_cast<void*>(from)) + skipped, bytes - skipped};
    };
    for (std::size_t i = 0; i < std::min(kBatch, waiting_.size()); ++i) {
      const Outgoing& frame = waiting_[i];
      add(&frame.header, sizeof(Header));
      add(frame.payload(), frame.header.length);
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = used;
    const ssize_t count = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      return again(errno) ? Flow::open : Flow::broken;
    }
    sent_ += static_cast<std::size_t>(count);
    while (!waiting_.empty() && sent_ >= waiting_.front().bytes()) {
      const Outgoing frame = std::move(waiting_.front());
      waiting_.pop_front();
      sent_ -= frame.bytes();
      owner.sent(frame);
    }
  }
  return Flow::open;
}

// Looks a complete header over; finds the place of its payload.
bool Connection::accept_header(Owner& owner) {
  const bool data = header_.kind == Kind::data;
  if (header_.magic != kMagic || channel_ == kProbes || data != (channel_ != kControl))
    return false;
  if (data) {
    landing_ = owner.land(*this, header_);
    return landing_.at != nullptr;
  }
  // Room for a post's or a fault's signatures, and a small contribution.
  if (header_.length > kEager + 2 * kMaxSignature + 1024) return false;
  control.resize(header_.length);
  landing_ = {control.data(), nullptr, nullptr};
  return true;
}

Flow Connection::receive(Owner& owner) {
  for (std::size_t total = 0; total < kTurn;) {
    Header next;
    const ssize_t count = read_some(next);
    if (count == 0) return Flow::ended;
    if (count < 0) {
      if (errno == EINTR) continue;
      return again(errno) ? Flow::open : Flow::broken;
    }
    const auto got = static_cast<std::size_t>(count);
    total += got;
    if (!advance(owner, got, next)) return Flow::broken;
  }
  return Flow::open;
}

// Reads the payload's rest and the next header in one system call, or the header's rest.
ssize_t Connection::read_some(Header& next) {
  if (header_got_ < sizeof(Header)) {
    char* at = reinterpret_cast<char*>(&header_) + header_got_;
    return read(fd_, at, sizeof(Header) - header_got_);
  }
  const iovec parts[] = {{landing_.at + payload_got_, header_.length - payload_got_},
                         {&next, sizeof(Header)}};
  return readv(fd_, parts, 2);
}

// Handles the bytes read. False if they are invalid, or the connection is no longer wanted.
bool Connection::advance(Owner& owner, std::size_t got, const Header& next) {
  if (header_got_ == sizeof(Header)) {
    const std::size_t rest = header_.length - payload_got_;
    if (got < rest) {
      payload_got_ += got;
      return true;
    }
    if (!hand_over(owner)) return false;
    header_ = next;
    header_got_ = got - rest;
  } else {
    header_got_ += got;
  }
  if (header_got_ < sizeof(Header)) return true;
  payload_got_ = 0;
  if (!accept_header(owner)) return false;
  if (header_.length != 0) return true;
  header_got_ = 0;
  return hand_over(owner);
}

bool Connection::hand_over(Owner& owner) {
  return owner.arrived(*this, header_, std::exchange(landing_, {}));
}

}  // namespace allreduce::tcp
