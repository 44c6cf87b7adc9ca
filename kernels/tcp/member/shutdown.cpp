// How a member ends: faults, connections that end, and leaving in good order.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/utf8.h"
#include "tcp/io/engine.h"

namespace allreduce::tcp {
namespace {

// Another connection may end before the goodbye on the one for control frames is read.
constexpr auto kGoodbyePatience = std::chrono::milliseconds(200);
// A death leaves calls alone that the dead had done its part of, for so long.
constexpr auto kLastCalls = std::chrono::milliseconds(100);
// A death that has made another leave shows within so long: the system closes the connections of
// the dead one after the other, and may do other things in between.
constexpr auto kLastDeaths = std::chrono::milliseconds(100);
// What is kept of the reason that an abort gives, for the others' messages.
constexpr std::size_t kReason = 250;
// How often a member that leaves looks whether its last frames have been delivered.
constexpr auto kLeaveInterval = std::chrono::milliseconds(2);

// The fault and both members in one word; the lengths of two signatures and a reason before them.
std::pair<Header, std::vector<std::byte>> fault_frame(const Culprit& culprit) {
  Header header{.kind = Kind::fault,
                .key = culprit.key,
                .offset = static_cast<std::uint64_t>(culprit.fault) |
                          static_cast<std::uint64_t>(culprit.member) << 8 |
                          static_cast<std::uint64_t>(culprit.observer) << 32};
  std::vector<std::byte> payload;
  const std::string* parts[] = {&culprit.of_member, &culprit.of_observer, &culprit.reason};
  for (const std::string* part : parts) {
    const auto size = static_cast<std::uint32_t>(part->size());
    const auto* bytes = reinterpret_cast<const std::byte*>(&size);
    payload.insert(payload.end(), bytes, bytes + sizeof(size));
    const auto* data = reinterpret_cast<const std::byte*>(part->data());
    payload.insert(payload.end(), data, data + size);
  }
  header.length = static_cast<std::uint32_t>(payload.size());
  return {header, std::move(payload)};
}

}  // namespace

std::string abort_frame(int member, const std::string& reason) {
  Culprit culprit{Fault::aborted, member, member, 0, "", "", reason};
  culprit.reason.resize(fitting(culprit.reason, kReason));
  const auto [header, payload] = fault_frame(culprit);
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  return frame.append(reinterpret_cast<const char*>(payload.data()), payload.size());
}

void Member::send_fault(int to) {
  auto [header, payload] = fault_frame(culprit_);
  send_control(to, header, std::move(payload));
}

bool Member::take_fault(const Header& header, const std::vector<std::byte>& payload) {
  Culprit culprit;
  culprit.key = header.key;
  const auto fault = header.offset & 0xff;
  culprit.member = static_cast<int>(header.offset >> 8 & 0xffffff);
  culprit.observer = static_cast<int>(header.offset >> 32);
  if (fault < static_cast<std::uint64_t>(Fault::mismatch) ||
      fault > static_cast<std::uint64_t>(Fault::timeout) || culprit.member >= n_ ||
      culprit.observer < 0 || culprit.observer >= n_)
    return false;
  culprit.fault = static_cast<Fault>(fault);
  std::size_t at = 0;
  for (std::string* part : {&culprit.of_member, &culprit.of_observer, &culprit.reason}) {
    std::uint32_t size;
    if (payload.size() - at < sizeof(size)) return false;
    std::memcpy(&size, payload.data() + at, sizeof(size));
    at += sizeof(size);
    if (payload.size() - at < size) return false;
    part->assign(reinterpret_cast<const char*>(payload.data()) + at, size);
    at += size;
  }
  condemn(std::move(culprit));
  return true;
}

void Member::blame(Fault fault, int member, std::uint64_t key, std::string reason) {
  condemn({fault, member, me_, key, "", "", std::move(reason)});
}

// Kills the communicator, but lets calls complete first that everybody had begun: after a death,
// what the dead has sent of them is still on its way. A mismatch, or one that left, ends no call
// before its own. One that left does not end it at once: a death that has made it leave, as it
// heard elsewhere, is to blame, and may be about to show here. What comes behind a death or a
// mismatch, as other members end for it, is no news; but a timeout or an abort shows that the calls
// before the mismatch do not complete: a member for which the mismatch is final tells neither.
void Member::condemn(Culprit culprit) {
  const Fault known = verdict_ ? verdict_->culprit.fault : Fault::none;
  if (known == Fault::lost && !calls_begun()) return die(verdict_->culprit);
  const bool gave_up = culprit.fault == Fault::timeout || culprit.fault == Fault::aborted;
  if (known == Fault::mismatch && gave_up) return die(verdict_->culprit);
  if (known == Fault::lost || known == Fault::mismatch) return;
  const bool left = culprit.fault == Fault::left;
  if (known == Fault::left && left) return;
  const bool waits = left || (culprit.fault == Fault::lost && calls_begun()) ||
                     (culprit.fault == Fault::mismatch && calls_before(culprit.key));
  if (!waits) return die(std::move(culprit));
  verdict_ = {std::move(culprit), Clock::now() + (left ? kLastDeaths : kLastCalls)};
}

// Whether what was found is final.
bool Member::condemned(Clock::time_point now) {
  if (!verdict_) return false;
  const Culprit& culprit = verdict_->culprit;
  if (culprit.fault == Fault::lost) return now >= verdict_->until || !calls_begun();
  if (culprit.fault == Fault::mismatch && !calls_before(culprit.key)) return true;
  if (now < verdict_->until) return false;
  if (!can_complete(culprit.key)) return true;
  verdict_->until = now + kLastCalls;
  return false;
}

// Whether a collective before a certain one is not complete. Messages have no place in their order.
bool Member::calls_before(std::uint64_t key) const {
  const auto first = first_to(key);
  return (key & kMessage) == 0 && first != pending_.end() && first->first != key;
}

// Whether the first collective that is not complete comes before a certain one and has all it
// needs: everybody has begun it, and who has yet to send something is there.
bool Member::can_complete(std::uint64_t key) const {
  const auto first = first_to(key);
  if (!calls_before(key) || !first->second.begun) return false;
  const auto waits = first->second.execution->waits_for();
  return std::none_of(waits.begin(), waits.end(), [this](int member) { return gone(member); });
}

// Whether no connection brings data of a member any more.
bool Member::gone(int member) const {
  const auto& connections = peer(member).connections;
  return std::all_of(connections.begin() + kData, connections.end(),
                     [](const auto& connection) { return !connection; });
}

bool Member::calls_begun() const {
  return std::any_of(pending_.begin(), pending_.end(), [](const auto& entry) {
    return entry.second.begun && !entry.second.complete;
  });
}

void Member::die(Culprit culprit) {
  if (dead() || leaving_) return;
  auto own = started(culprit.key);
  if (!own && !pending_.empty()) own = pending_.begin()->second.work;
  if (!own && !receives_.empty()) own = receives_.front();
  if (!own && !exchanges_.empty()) own = exchanges_.begin()->second->work();
  if (!own && !offers_.empty()) own = offers_.begin()->second;
  if (own) stopped_ = own->request.signature;
  if (own && culprit.observer == me_ && culprit.of_observer.empty())
    culprit.of_observer = own->request.signature;
  culprit_ = std::move(culprit);
  const std::size_t limit = culprit_.fault == Fault::aborted ? kReason : kMaxSignature;
  culprit_.reason.resize(fitting(culprit_.reason, limit));
  for (int member = 0; member < n_; ++member)
    if (member != me_ && !peer(member).left) send_fault(member);
  drop_data();
  fail_all();
  for (Peer& one : peers_)
    if (!one.connections.empty() && one.connections[kControl])
      Engine::instance().update(*one.connections[kControl], false);
}

void Member::collapse(const char* why) noexcept {
  try {
    if (!dead() && !leaving_) {
      const std::string reason = std::string("it cannot go on: ") + why;
      return die({Fault::aborted, me_, me_, first_pending(), "", "", reason});
    }
  } catch (const std::exception&) {
    // Not even for the frames that say so: the others see the connections end.
    if (!dead()) culprit_.fault = Fault::aborted, culprit_.member = culprit_.observer = me_;
  }
  drop_all();
  fail_all();
}

// No array is touched after this, and the settling of its works.
void Member::drop_data() {
  for (Peer& one : peers_)
    for (std::size_t channel = kControl + 1; channel < one.connections.size(); ++channel)
      if (one.connections[channel]) drop(*one.connections[channel]);
}

void Member::drop_all() {
  drop_data();
  for (Peer& one : peers_)
    if (!one.connections.empty() && one.connections[kControl]) drop(*one.connections[kControl]);
}

// Settles what is not complete, after the last access to its arrays.
void Member::fail_all() {
  const auto fail = [](const std::shared_ptr<Work>& work) { work->settle(State::failed); };
  for (auto& [key, pending] : pending_) fail(pending.work);
  for (auto& [key, work] : offers_) fail(work);
  for (auto& work : receives_) fail(work);
  for (auto& [key, execution] : exchanges_) fail(execution->work());
  for (Arrival& arrival : arrivals_)
    if (arrival.own) fail(arrival.own);
  pending_.clear();
  offers_.clear();
  receives_.clear();
  exchanges_.clear();
  arrivals_.clear();
}

// Lets go of a connection; it is destroyed when no call of it is on the stack.
void Member::drop(Connection& connection) {
  Engine::instance().unwatch(connection);
  connection.registration = 0;
  connection.forget();
  for (auto& fd : fds_) {
    int mine = connection.fd();
    fd.compare_exchange_strong(mine, -1);
  }
  shutdown(connection.fd(), SHUT_RDWR);
  auto& connections = peer(connection.peer()).connections;
  gone_.push_back(std::move(connections[static_cast<std::size_t>(connection.channel())]));
}

void Member::ended(Connection& connection) {
  const int who = connection.peer();
  const bool control = connection.channel() == kControl;
  drop(connection);
  if (dead() || leaving_ || peer(who).told_fault) return;
  if (peer(who).left) return check_left(who);
  if (control) return blame(Fault::lost, who, first_pending());
  if (!peer(who).suspect) peer(who).suspect = Clock::now() + kGoodbyePatience;
}

// A member that left in good order is missed by a call that it has not completed.
void Member::check_left(int member) {
  for (const auto& [key, pending] : pending_)
    if (key >= peer(member).completed) return blame(Fault::left, member, key);
  if (const auto work = message_needing(member)) blame(Fault::left, member, work->key);
}

std::optional<Clock::time_point> Member::deadline() const {
  if (closed_) return std::nullopt;
  if (leaving_) return Clock::now() + kLeaveInterval;
  if (dead()) return std::nullopt;
  std::optional<Clock::time_point> first;
  const auto consider = [&](Clock::time_point one) {
    if (!first || one < *first) first = one;
  };
  if (suspicion_) consider(suspicion_->until);
  if (verdict_) consider(verdict_->until);
  for (const Peer& one : peers_)
    if (one.suspect && !one.left) consider(*one.suspect);
  return first;
}

void Member::tick(Clock::time_point now) {
  if (closed_) return;
  if (!leaving_) {
    if (suspicion_ && now >= suspicion_->until) judge(true);
    if (condemned(now)) die(verdict_->culprit);
    for (int member = 0; member < n_; ++member)
      if (peer(member).suspect && !peer(member).left && now >= *peer(member).suspect) {
        peer(member).suspect.reset();
        blame(Fault::lost, member, first_pending());
      }
    return;
  }
  bool delivered = dirty_.empty();
  for (const Peer& one : peers_)
    for (const auto& connection : one.connections)
      if (connection && !(connection->idle() && connection->delivered())) delivered = false;
  if (delivered || now >= leave_by_) close_all();
}

void Member::leave(Clock::time_point deadline, std::shared_ptr<Work> farewell) {
  if (closed_) return farewell->settle(State::done);
  farewells_.push_back(std::move(farewell));
  leave_by_ = leaving_ ? std::min(leave_by_, deadline) : deadline;
  if (verdict_ && !leaving_ && !dead()) die(verdict_->culprit);  // the others are to hear of it
  if (std::exchange(leaving_, true)) return;
  const std::uint64_t completed = first_pending();
  for (int member = 0; member < n_ && !dead(); ++member)
    if (member != me_) send_control(member, {.kind = Kind::goodbye, .key = completed});
  // What the system has of complete calls may still be on its way: those connections stay open.
  for (Peer& one : peers_)
    for (auto& connection : one.connections) {
      if (!connection) continue;
      if (connection->channel() != kControl) connection->forget();
      Engine::instance().update(*connection, false);
    }
  fail_all();
}

void Member::close_all() {
  drop_all();
  dirty_.clear();
  gone_.clear();  // no call of theirs is on the stack: who waits finds their descriptors closed
  closed_ = true;
  for (const auto& farewell : farewells_) farewell->settle(State::done);
  Engine::instance().remove(*this);
}

}  // namespace allreduce::tcp
