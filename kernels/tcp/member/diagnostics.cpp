// A member's report on its calls: the awaited members, and the others' last calls.
#include <algorithm>

#include "tcp/member/member.h"

namespace allreduce::tcp {

std::vector<std::uint64_t> Member::payload_bytes() const {
  std::vector<std::uint64_t> found;
  for (const Peer& one : peers_) found.push_back(one.payload);
  return found;
}

// The collective that one waits for, or none: a complete call waits for the first that is not.
std::map<std::uint64_t, Member::Pending>::const_iterator Member::first_to(std::uint64_t key) const {
  auto pending = pending_.begin();
  while (pending != pending_.end() && pending->second.complete) ++pending;
  return pending == pending_.end() || pending->first > key ? pending_.end() : pending;
}

std::vector<int> Member::absent(std::uint64_t key) const {
  if ((key & kMessage) != 0) return missing(key);
  std::vector<int> found;
  const auto pending = first_to(key);
  for (int member = 0; member < n_ && pending != pending_.end(); ++member)
    if (member != me_ && peer(member).posts.count(pending->first) == 0) found.push_back(member);
  return found;
}

std::vector<int> Member::missing(std::uint64_t key) const {
  std::vector<int> found;
  if ((key & kMessage) == 0) {
    found = absent(key);
    const auto pending = first_to(key);
    const bool under_way = found.empty() && pending != pending_.end() && pending->second.execution;
    return under_way ? pending->second.execution->waits_for() : found;
  }
  const auto exchange = exchanges_.find(key);
  if (exchange != exchanges_.end()) return exchange->second->waits_for();
  const auto work = started(key);
  if (!work) return found;
  if (work->request.call.root != kAny) return {work->request.call.root};
  for (int member = 0; member < n_; ++member)
    if (member != me_) found.push_back(member);
  return found;
}

void Member::tell_waits(std::uint64_t in, int member) {
  const Header header{.kind = Kind::waits, .key = in, .stage = static_cast<std::uint32_t>(member)};
  for (int to = 0; to < n_ && !dead() && !leaving_; ++to)
    if (to != me_) send_control(to, header);
}

void Member::take_waits(int from, const Header& header) {
  Peer& sender = peer(from);
  const int member =
      header.stage < static_cast<std::uint32_t>(n_) ? static_cast<int>(header.stage) : kNobody;
  if (header.key >= kUnderWay) {
    sender.under_way = {header.key - kUnderWay, member};
    return tell_under_way();
  }
  sender.awaited_in = header.key;
  sender.awaited = member;
}

void Member::tell_under_way() {
  const auto pending = first_to(started_);
  if (pending == pending_.end() || !pending->second.begun || !pending->second.execution) return;
  const auto waits = pending->second.execution->waits_for();
  if (waits.empty() || told_under_way_ == pending->first) return;
  told_under_way_ = pending->first;
  tell_waits(kUnderWay + pending->first, waits.front());
}

int Member::awaited_in_call(int member, std::uint64_t key) const {
  const auto pending = (key & kMessage) == 0 ? first_to(key) : pending_.end();
  const auto& latest = peer(member).under_way;
  return pending != pending_.end() && latest && latest->first == pending->first ? latest->second
                                                                                : kNobody;
}

std::optional<std::string> Member::posted(int member, std::uint64_t key) const {
  if (dead() && ((culprit_.key ^ key) & ~kMessage) == 0) {
    if (member == culprit_.member && !culprit_.of_member.empty()) return culprit_.of_member;
    if (member == culprit_.observer && !culprit_.of_observer.empty()) return culprit_.of_observer;
  }
  if (member != me_) return std::nullopt;
  if (dead()) return stopped_;
  const auto work = started(key);
  return work ? std::optional(work->request.signature) : std::nullopt;
}

// The call of a key that is not complete; a message's also without its bit.
std::shared_ptr<Work> Member::started(std::uint64_t key) const {
  const auto pending = pending_.find(key);
  if (pending != pending_.end()) return pending->second.work;
  const auto exchange = exchanges_.find(key | kMessage);
  if (exchange != exchanges_.end()) return exchange->second->work();
  const auto offer = offers_.find(key | kMessage);
  if (offer != offers_.end()) return offer->second;
  for (const auto& work : receives_)
    if (work->key == (key | kMessage)) return work;
  return nullptr;
}

std::optional<std::pair<std::uint64_t, std::string>> Member::last_call(int member) const {
  return member == me_ ? last_ : peer(member).last;
}

// The peers whose data is still missing.
std::vector<int> Execution::waits_for() const {
  std::vector<int> found;
  for (std::size_t index = 0; index < plan_.stages.size(); ++index) {
    const Stage& stage = plan_.stages[index];
    for (std::size_t s = 0; s < stage.from.size(); ++s) {
      const auto& got = progress_[index].got[s];
      if (std::find(got.begin(), got.end(), false) != got.end()) found.push_back(stage.from[s]);
    }
    const Progress& progress = progress_[index];
    for (std::size_t link = 0; link < stage.to.size(); ++link) {
      const Window& window = progress.windows[link];
      const bool stuck =
          stage.from.empty() && progress.next < progress.chunks && progress.next >= window.allowed;
      if (stuck || !window.held.empty()) found.push_back(stage.to[link].peer);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace allreduce::tcp
