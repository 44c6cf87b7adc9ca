// send and recv: small messages go at once, large ones are offered and go when a receiver asks.
//
// Messages of one sender are received in the order in which it sent them; a receiver takes the
// first that fits it, and a message the first receiver that takes it, as in MPI.
#include <algorithm>
#include <cstring>

#include "tcp/member/member.h"

namespace allreduce::tcp {
namespace {

bool fits(const Request& receiver, int source, std::int64_t tag) {
  return (receiver.call.root == kAny || receiver.call.root == source) &&
         (receiver.tag == kAny || receiver.tag == tag);
}

std::size_t bytes_of(const Request& request) { return request.call.count * request.element(); }

void append(std::vector<std::byte>& payload, const void* from, std::size_t bytes) {
  const auto* data = static_cast<const std::byte*>(from);
  if (bytes != 0) payload.insert(payload.end(), data, data + bytes);
}

}  // namespace

void Member::start_send(const std::shared_ptr<Work>& work) {
  const Request& request = work->request;
  const int to = request.call.root;
  if (to == me_) {
    Arrival arrival{
        me_, work->key, request.tag, request.call.type, request.call.count, request.signature,
        {},  true,      work};
    if (const auto receiver = take_receiver(arrival)) return match(receiver, std::move(arrival));
    return arrivals_.push_back(std::move(arrival));
  }
  if (peer(to).left) {
    offers_[work->key] = work;  // so that it fails with the rest
    return blame(Fault::left, to, work->key);
  }
  const bool small = request.call.path == Path::eager && peer(to).unaccepted < kUnaccepted;
  const Header header{.kind = small ? Kind::message : Kind::offer,
                      .signature = static_cast<std::uint16_t>(request.signature.size()),
                      .key = work->key,
                      .offset = static_cast<std::uint64_t>(request.tag),
                      .stage = static_cast<std::uint32_t>(request.call.type)};
  std::vector<std::byte> payload;
  append(payload, request.signature.data(), request.signature.size());
  append(payload, &request.call.count, sizeof(request.call.count));
  if (small) append(payload, request.in, bytes_of(request));
  send_control(to, header, std::move(payload));
  if (!small) {
    offers_[work->key] = work;
    return;
  }
  ++peer(to).unaccepted;
  work->settle(State::done);
}

void Member::start_receive(const std::shared_ptr<Work>& work) {
  const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& one) {
    return fits(work->request, one.source, one.tag);
  });
  if (arrival != arrivals_.end()) {
    Arrival taken = std::move(*arrival);
    arrivals_.erase(arrival);
    if (!taken.offered) --peer(taken.source).unreceived;
    return match(work, std::move(taken));
  }
  receives_.push_back(work);
  for (int member = 0; member < n_; ++member)
    if (member != me_ && peer(member).left && message_needing(member))
      return blame(Fault::left, member, work->key);
}

// A message that cannot be had because a member has left, or null.
std::shared_ptr<Work> Member::message_needing(int member) const {
  for (const auto& [key, work] : offers_)
    if (work->request.call.root == member) return work;
  // Data sent before it left still arrives, as long as the connection delivers it.
  for (const auto& [key, execution] : exchanges_) {
    const Request& request = execution->work()->request;
    if (request.call.root == member &&
        (request.call.collective == Collective::send || gone(member)))
      return execution->work();
  }
  const bool all_left = std::all_of(peers_.begin(), peers_.end(), [this](const Peer& one) {
    return one.left || &one == &peer(me_);
  });
  for (const auto& work : receives_)
    if (work->request.call.root == member || (work->request.call.root == kAny && all_left))
      return work;
  return nullptr;
}

// A message that a member offered before it left cannot be received any more.
void Member::forget_offers(int member) {
  std::erase_if(arrivals_, [&](const Arrival& one) { return one.offered && one.source == member; });
}

bool Member::take_message(int from, const Header& header, const std::vector<std::byte>& payload) {
  Arrival arrival;
  arrival.source = from;
  arrival.key = header.key;
  arrival.tag = static_cast<std::int64_t>(header.offset);
  arrival.offered = header.kind == Kind::offer;
  std::size_t at = header.signature;
  if (header.stage >= static_cast<std::uint32_t>(kTypes) ||
      payload.size() < at + sizeof(arrival.count))
    return false;
  arrival.type = static_cast<Type>(header.stage);
  arrival.signature.assign(reinterpret_cast<const char*>(payload.data()), at);
  std::memcpy(&arrival.count, payload.data() + at, sizeof(arrival.count));
  at += sizeof(arrival.count);
  arrival.payload.assign(payload.begin() + static_cast<std::ptrdiff_t>(at), payload.end());
  const std::size_t element = size_of(arrival.type), bytes = arrival.payload.size();
  // Divided, not multiplied: the count may be anything.
  if (arrival.offered ? bytes != 0 : bytes % element != 0 || bytes / element != arrival.count)
    return false;
  const auto receiver = take_receiver(arrival);
  if (!receiver) return keep(std::move(arrival));
  match(receiver, std::move(arrival));
  return true;
}

// The first recv that takes a message, which waits no more; null if none does.
std::shared_ptr<Work> Member::take_receiver(const Arrival& arrival) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& one) {
    return fits(one->request, arrival.source, arrival.tag);
  });
  if (found == receives_.end()) return nullptr;
  const auto receiver = *found;
  receives_.erase(found);
  return receiver;
}

// Keeps a message until it has a receiver. False: its sender has more of them here than it may.
bool Member::keep(Arrival arrival) {
  if (!arrival.offered && ++peer(arrival.source).unreceived > kUnaccepted) {
    blame(Fault::lost, arrival.source, first_pending(),
          "it sent more than " + std::to_string(kUnaccepted) +
              " small messages that nobody had received yet");
    return false;
  }
  arrivals_.push_back(std::move(arrival));
  return true;
}

// A message has met its receiver.
void Member::match(const std::shared_ptr<Work>& work, Arrival arrival) {
  Request& request = work->request;
  if (arrival.type != request.call.type || arrival.count != request.call.count) {
    receives_.push_back(work);  // so that it fails with the rest
    if (arrival.own) offers_[arrival.key] = arrival.own;
    return die({Fault::mismatch, me_, arrival.source, work->key, request.signature,
                arrival.signature, ""});
  }
  request.call.root = arrival.source;
  request.tag = arrival.tag;
  work->met.store(true, std::memory_order_release);
  if (arrival.own) {
    if (bytes_of(request) != 0)
      std::memmove(request.out, arrival.own->request.in, bytes_of(request));
    arrival.own->settle(State::done);
    return work->settle(State::done);
  }
  Header header{.kind = Kind::accept, .key = arrival.key};
  if (!arrival.offered) {
    if (!arrival.payload.empty())
      std::memcpy(request.out, arrival.payload.data(), arrival.payload.size());
    send_control(arrival.source, header);
    return work->settle(State::done);
  }
  const auto execution = std::make_shared<Execution>(work, *this, me_, n_);
  exchanges_[work->key] = execution;
  header.offset = work->key;
  send_control(arrival.source, header);
  if (execution->finished()) finish_message(work->key);
}

bool Member::take_accept(int from, const Header& header) {
  if (header.offset == 0) return --peer(from).unaccepted >= 0;  // of a small message
  const auto found = offers_.find(header.key);
  if (found == offers_.end() || found->second->request.call.root != from) return false;
  const auto work = found->second;
  offers_.erase(found);
  const auto execution = std::make_shared<Execution>(work, *this, me_, n_);
  exchanges_[work->key] = execution;
  execution->address(header.offset);
  execution->begin();
  if (execution->finished()) finish_message(work->key);
  return true;
}

void Member::finish_message(std::uint64_t key) {
  const auto found = exchanges_.find(key);
  if (found == exchanges_.end()) return;
  const auto work = found->second->work();
  exchanges_.erase(found);
  work->settle(State::done);
}

}  // namespace allreduce::tcp
