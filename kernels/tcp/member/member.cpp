#include "tcp/member/member.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tcp/io/engine.h"

namespace allreduce::tcp {

Member::Member(int index, const std::vector<std::vector<int>>& fds)
    : me_(index), n_(static_cast<int>(fds.size())), process_(getpid()), peers_(fds.size()) {
  std::vector<int> all;
  for (int member = 0; member < n_; ++member) {
    int channel = 0;
    for (const int fd : fds[static_cast<std::size_t>(member)]) {
      peer(member).connections.push_back(std::make_unique<Connection>(fd, member, channel++));
      all.push_back(fd);
    }
  }
  fds_ = std::vector<std::atomic<int>>(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) fds_[i].store(all[i]);
  gone_.reserve(all.size());  // letting go must not need memory
}

Member::~Member() {
  if (!inherited()) return;
  for (Peer& one : peers_)
    for (auto& connection : one.connections) static_cast<void>(connection.release());
}

bool Member::inherited() const { return getpid() != process_; }

void Member::close_inherited() {
  for (auto& fd : fds_) {
    const int mine = fd.exchange(-1);
    if (mine >= 0) close(mine);
  }
}

void Member::attach() {
  Engine& engine = Engine::instance();
  engine.add(shared_from_this());
  try {
    for (Peer& one : peers_)
      for (auto& connection : one.connections) engine.watch(*connection, *this);
  } catch (const std::exception&) {
    drop_all();
    engine.remove(*this);
    throw;
  }
}

void Member::submit(const std::shared_ptr<Work>& work) {
  Engine& engine = Engine::instance();
  if (n_ > 1 || is_message(work->request.call.collective))
    return engine.post(shared_from_this(), [this, work] { start(work); });
  bool admitted = false;
  engine.run([&] { admitted = admit(work); });
  if (!admitted) return;
  finish_eager(work->request, me_, n_, {nullptr});
  work->settle(State::done);
}

void Member::start(const std::shared_ptr<Work>& work) {
  try {
    begin(work);
  } catch (const std::exception& error) {
    collapse(error.what());
    if (!work->settled()) work->settle(State::failed);  // it was not kept yet
  }
}

// Numbers a call, or lets it fail: with a number if a death has ended all calls, because the error
// names it.
bool Member::admit(const std::shared_ptr<Work>& work) {
  const bool message = is_message(work->request.call.collective);
  if (dead() || !leaving_) work->key = message ? kMessage | messages_++ : started_++;
  if (dead() || leaving_) {
    work->settle(State::failed);
    return false;
  }
  if (!message) last_ = {work->key, work->request.signature};
  return true;
}

void Member::begin(const std::shared_ptr<Work>& work) {
  if (!admit(work)) return;
  const Request& request = work->request;
  if (request.call.collective == Collective::send) return start_send(work);
  if (request.call.collective == Collective::recv) return start_receive(work);
  Pending pending{work, nullptr};
  if (request.call.path != Path::eager)
    pending.execution = std::make_shared<Execution>(work, *this, me_, n_);
  const std::uint64_t key = work->key;
  pending_.emplace(key, std::move(pending));
  for (int member = 0; member < n_ && !dead(); ++member) {
    if (peer(member).left && key >= peer(member).completed) return blame(Fault::left, member, key);
    if (peer(member).posts.count(key) != 0) compare(pending_.at(key), member);
  }
  post_ready();
}

void Member::post_ready() {
  while (!dead() && posted_ < started_ && posted_ < first_pending() + kAhead)
    post(pending_.at(posted_++));
}

// Posts a call to all others, together with each one's data if it is small.
void Member::post(Pending& pending) {
  const Request& request = pending.work->request;
  const std::uint64_t key = pending.work->key;
  for (int member = 0; member < n_; ++member) {
    if (member == me_) continue;
    const auto* text = reinterpret_cast<const std::byte*>(request.signature.data());
    std::vector<std::byte> payload(text, text + request.signature.size());
    if (request.call.path == Path::eager) {
      const auto [from, bytes] = contribution(request, me_, member);
      payload.insert(payload.end(), from, from + bytes);
    }
    const auto signature = static_cast<std::uint16_t>(request.signature.size());
    send_control(member, {.kind = Kind::post, .signature = signature, .key = key},
                 std::move(payload));
  }
  pending.posted = true;
  agree(key);
}

void Member::take_post(int from, std::uint64_t key, Post post) {
  Peer& sender = peer(from);
  if (!sender.last || sender.last->first <= key) sender.last = {key, post.signature};
  const auto found = pending_.find(key);
  const bool known = found != pending_.end();
  if (known ? found->second.complete : key < started_) return;  // others had agreed before
  sender.posts[key] = std::move(post);
  if (!known) return;
  compare(found->second, from);
  agree(key);
}

void Member::grant_staging() {
  std::size_t active = 0;
  for (auto& [key, pending] : pending_) {
    if (!pending.execution || !pending.execution->windowed()) continue;
    if (!pending.begun || active++ == kActive) return;
    pending.execution->grant();
  }
}

// A call is settled after all that were started before it: after waiting for one call, the earlier
// ones are complete, too.
void Member::complete(std::uint64_t key) {
  const auto found = pending_.find(key);
  if (found == pending_.end() || found->second.complete) return;
  found->second.complete = true;
  found->second.execution.reset();
  for (Peer& one : peers_) one.posts.erase(key);
  while (!pending_.empty() && pending_.begin()->second.complete) {
    const auto work = pending_.begin()->second.work;
    pending_.erase(pending_.begin());
    work->settle(State::done);
  }
  grant_staging();
  post_ready();
}

Landing Member::land(Connection& from, const Header& header) {
  if (dead() || leaving_) return {};
  std::shared_ptr<Execution> execution;
  if ((header.key & kMessage) != 0) {
    const auto found = exchanges_.find(header.key);
    if (found != exchanges_.end()) execution = found->second;
  } else {
    const auto found = pending_.find(header.key);
    if (found != pending_.end()) execution = found->second.execution;
  }
  if (!execution) return {};
  Landing landing = execution->land(from.peer(), header);
  landing.execution = std::move(execution);
  return landing;
}

bool Member::arrived(Connection& from, const Header& header, Landing landing) {
  if (dead() || leaving_) return false;
  if (from.channel() == kControl) return take_control(from, header) && !dead();
  const std::shared_ptr<Execution> execution = landing.execution;
  execution->arrived(from.peer(), header, std::move(landing));
  if (execution->finished()) finish(execution->work()->key);
  return true;
}

void Member::sent(const Outgoing& frame) {
  if (!frame.execution || dead()) return;
  frame.execution->sent(frame.stage, frame.hold);
  if (frame.execution->finished()) finish(frame.execution->work()->key);
}

void Member::finish(std::uint64_t key) {
  if ((key & kMessage) != 0)
    finish_message(key);
  else
    complete(key);
}

void Member::send_data(int to, Outgoing frame) {
  auto& connections = peer(to).connections;
  const std::size_t channel = kData + frame.header.offset % (connections.size() - kData);
  Connection* connection = connections[channel].get();
  if (connection == nullptr) return;  // it ended; the culprit is not yet known
  peer(to).payload += frame.header.length;
  connection->queue(std::move(frame));
  touch(*connection);
}

void Member::send_credit(int to, std::uint64_t key, std::uint32_t stage, std::uint64_t allowed) {
  send_control(to, {.kind = Kind::credit, .key = key, .offset = allowed, .stage = stage});
}

}  // namespace allreduce::tcp
