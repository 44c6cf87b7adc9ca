// Checks that all members made the same call, and finds the culprit if not.
#include <cstring>
#include <string_view>

#include "tcp/member/member.h"

namespace allreduce::tcp {
namespace {

// How long a mismatch waits for the calls of others, so that all members blame the same pair.
constexpr auto kJudgeAfter = std::chrono::milliseconds(100);

// A signature without its note; nothing if it has not even that.
std::string_view without_note(std::string_view signature) {
  if (signature.empty()) return {};
  const std::size_t note = 1 + static_cast<unsigned char>(signature.back());
  return note > signature.size() ? std::string_view()
                                 : signature.substr(0, signature.size() - note);
}

std::uint64_t word(std::string_view text, std::size_t index) {
  std::uint64_t value;
  std::memcpy(&value, text.data() + index * sizeof(value), sizeof(value));
  return value;
}

bool one_hop_counts(const Request& request) {
  return request.call.collective == Collective::all_to_all && !request.details.offsets.empty();
}

}  // namespace

bool well_formed(const std::string& signature) {
  const std::string_view body = without_note(signature);
  std::uint16_t agreed = 0;
  if (body.size() >= sizeof(agreed)) std::memcpy(&agreed, body.data(), sizeof(agreed));
  return agreed >= sizeof(agreed) && agreed <= body.size();
}

bool differ(int a, const std::string& told_a, int b, const std::string& told_b, int members) {
  const std::string_view of_a = without_note(told_a), of_b = without_note(told_b);
  if (of_a.size() != of_b.size() || !well_formed(told_a)) return true;
  std::uint16_t agreed;
  std::memcpy(&agreed, of_a.data(), sizeof(agreed));
  // With its own length: where they are equal, it is also the other's.
  if (of_a.compare(0, agreed, of_b, 0, agreed) != 0) return true;
  const auto n = static_cast<std::size_t>(members);
  if (of_a.size() - agreed != 2 * n * sizeof(std::uint64_t)) return of_a != of_b;
  const std::string_view tail_a = of_a.substr(agreed), tail_b = of_b.substr(agreed);
  const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
  return word(tail_a, j) != word(tail_b, n + i) || word(tail_b, i) != word(tail_a, n + j);
}

void Member::compare(Pending& pending, int member) {
  const Request& request = pending.work->request;
  const std::uint64_t key = pending.work->key;
  const Post& post = peer(member).posts.at(key);
  if (differ(me_, request.signature, member, post.signature, n_)) return suspect(key, member);
  const std::size_t expected =
      request.call.path == Path::eager ? contribution(request, member, me_).second : 0;
  if (post.payload.size() != expected) return blame(Fault::lost, member, key);
  ++pending.agreed;
}

void Member::suspect(std::uint64_t key, int member) {
  if (!suspicion_) suspicion_ = {key, member, Clock::now() + kJudgeAfter};
  judge(false);
}

// Names the first pair of members whose calls differ, when all calls are known or it is late.
void Member::judge(bool late) {
  if (!suspicion_ || dead()) return;
  const std::uint64_t key = suspicion_->key;
  std::vector<std::pair<int, const std::string*>> calls;
  for (int member = 0; member < n_; ++member) {
    const auto& posts = peer(member).posts;
    const auto post = posts.find(key);
    if (member == me_)
      calls.emplace_back(member, &pending_.at(key).work->request.signature);
    else if (post != posts.end())
      calls.emplace_back(member, &post->second.signature);
  }
  if (!late && calls.size() < static_cast<std::size_t>(n_)) return;
  const int suspected = std::exchange(suspicion_, std::nullopt)->member;
  for (std::size_t i = 0; i < calls.size(); ++i)
    for (std::size_t j = i + 1; j < calls.size(); ++j) {
      const auto& [a, of_a] = calls[i];
      const auto& [b, of_b] = calls[j];
      if (differ(a, *of_a, b, *of_b, n_))
        return condemn({Fault::mismatch, b, a, key, *of_b, *of_a, ""});
    }
  // The suspected member has sent different posts.
  blame(Fault::lost, suspected, key);
}

// Begins a call when all members have posted it.
void Member::agree(std::uint64_t key) {
  const auto found = pending_.find(key);
  if (dead() || found == pending_.end()) return;
  Pending& pending = found->second;
  if (suspicion_ && suspicion_->key == key) return judge(false);
  if (verdict_ && verdict_->culprit.fault == Fault::mismatch && key >= verdict_->culprit.key)
    return;  // nothing behind a mismatch begins
  if (pending.complete || pending.begun || !pending.posted || pending.agreed < n_ - 1) return;
  const Request& request = pending.work->request;
  if (one_hop_counts(request)) {  // each knows its own pairs only: all are checked by all
    for (int a = 0; a < n_; ++a)
      for (int b = a + 1; b < n_; ++b)
        if (a != me_ && b != me_ &&
            differ(a, peer(a).posts.at(key).signature, b, peer(b).posts.at(key).signature, n_))
          return suspect(key, a);
  }
  pending.begun = true;
  if (request.call.path == Path::eager) {
    std::vector<const std::byte*> parts(static_cast<std::size_t>(n_));
    for (int member = 0; member < n_; ++member)
      if (member != me_)
        parts[static_cast<std::size_t>(member)] = peer(member).posts.at(key).payload.data();
    finish_eager(request, me_, n_, parts);
    // The waiting thread is woken before `flush` sends the own post, so that it wakes meanwhile.
    // With the post sent first, or awaited by the woken thread, small calls took some 10 % longer.
    return complete(key);
  }
  const auto execution = pending.execution;
  grant_staging();
  execution->begin();
  if (execution->finished()) complete(key);
}

}  // namespace allreduce::tcp
