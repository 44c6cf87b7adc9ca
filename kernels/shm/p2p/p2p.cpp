// Sends and recvs: how they start, meet and end.
#include "shm/p2p/p2p.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "shm/paths.h"

namespace allreduce {
namespace {

bool fits(const Work& recv, const Letter& letter) {
  return (recv.call.root == kAny || recv.call.root == letter.from) &&
         (recv.tag == kAny || recv.tag == letter.tag);
}

void record(MessageRecord& to, const Work& work) {
  to = {work.call.collective, work.call.type, work.call.root, work.tag, work.call.count, {}};
  to.remark.set(work.details.note);
}

}  // namespace

Messages::Messages(Share& share)
    : share_(share),
      untaken_(static_cast<std::size_t>(share.members)),
      taken_(static_cast<std::size_t>(share.members)) {}

// --- starting, and meeting -----------------------------------------------------------------------

void Messages::start(const std::shared_ptr<Work>& work) {
  work->seq = kMessage | started_++;
  if (work->call.collective == Collective::send)
    start_send(work);
  else
    start_recv(work);
  count();
}

void Messages::start_send(const std::shared_ptr<Work>& work) {
  const int to = work->call.root;
  Letter letter{.type = work->call.type,
                .from = static_cast<std::uint16_t>(share_.me),
                .tag = work->tag,
                .count = work->call.count,
                .send = work->seq};
  const bool small = fits_letter(work->call) && untaken_[static_cast<std::size_t>(to)] < kUntaken;
  if (to == share_.me) {
    wait_for(work);
    if (small) ++untaken_[static_cast<std::size_t>(to)];
    return arrive({letter, work->in, work->details.note, small ? nullptr : work});
  }
  if (small) {
    ++untaken_[static_cast<std::size_t>(to)];
  } else {
    letter.kind = LetterKind::offer;
    work->in_region = share_.group.find_region(share_.me, work->in, bytes_of(*work));
    if (work->in_region) {
      letter.where = work->in_region->id;
      letter.offset = static_cast<std::uint64_t>(work->in - work->in_region->part(share_.me));
    }
  }
  wait_for(work);
  if (left(to)) {
    blame(Fault::left, to, *work);
    return;
  }
  write(to, {letter, work, small});
}

void Messages::start_recv(const std::shared_ptr<Work>& work) {
  wait_for(work);
  const auto first = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& arrival) {
    return fits(*work, arrival.message.letter);
  });
  if (first == arrivals_.end()) return looking_.push_back(work);
  Arrival arrival = std::move(*first);
  arrivals_.erase(first);
  arrival.message.payload = arrival.payload.data();
  arrival.message.remark = arrival.remark;
  meet(work, arrival.message);
}

// A message finds the first recv that takes it, or is kept.
void Messages::arrive(const Incoming& message) {
  const Letter& letter = message.letter;
  const auto first = std::find_if(looking_.begin(), looking_.end(),
                                  [&](const auto& recv) { return fits(*recv, letter); });
  if (first != looking_.end()) {
    const auto recv = *first;
    looking_.erase(first);
    meet(recv, message);
  } else {
    Arrival arrival{message, {}, std::string(message.remark)};
    if (!message.own && letter.kind == LetterKind::message)
      arrival.payload.assign(message.payload,
                             message.payload + letter.count * size_of(letter.type));
    arrivals_.push_back(std::move(arrival));
  }
  // A small one to oneself is done, as to any other.
  if (letter.from == share_.me && !message.own)
    if (const auto send = find(letter.send)) settle(send);
}

void Messages::meet(const std::shared_ptr<Work>& recv, const Incoming& message) {
  const Letter& letter = message.letter;
  if (letter.type != recv->call.type || letter.count != recv->call.count) {
    MessageRecord sent{Collective::send, letter.type, share_.me, letter.tag, letter.count, {}};
    sent.remark.set(message.remark);
    blame(Fault::mismatch, letter.from, *recv, &sent);
    return;
  }
  recv->call.root = letter.from;
  recv->tag = letter.tag;
  recv->met.store(true, std::memory_order_release);
  if (letter.kind == LetterKind::offer) return meet_offer(recv, letter);
  const std::byte* source = message.own ? message.own->in : message.payload;
  if (bytes_of(*recv) != 0) std::memmove(recv->out, source, bytes_of(*recv));
  settle(recv);
  if (message.own) return settle(message.own);
  const auto from = static_cast<std::size_t>(letter.from);
  if (letter.from == share_.me) {
    --untaken_[from];
  } else if (++taken_[from] == kUntaken / 2) {
    write(letter.from, Letter{.kind = LetterKind::taken,
                              .from = static_cast<std::uint16_t>(share_.me),
                              .count = static_cast<std::uint64_t>(std::exchange(taken_[from], 0))});
  }
}

void Messages::meet_offer(const std::shared_ptr<Work>& recv, const Letter& letter) {
  // Its own memory of the region may be gone here: then the message moves as any other.
  auto region = letter.where == 0 ? nullptr : share_.group.find_region(letter.where);
  if (region) return fetching_.push_back({recv, letter, std::move(region)});
  Letter answer = letter;
  answer.kind = LetterKind::accept;
  answer.from = static_cast<std::uint16_t>(share_.me);
  answer.recv = recv->seq;
  write(letter.from, answer);
}

Progress Messages::advance() {
  if (!busy()) return Progress::blocked;
  bool moved = write_unsent();
  moved |= read_letter();
  moved |= stage_chunk();
  moved |= fetch();
  count();
  return moved ? Progress::moved : Progress::blocked;
}

// --- the end -------------------------------------------------------------------------------------

std::shared_ptr<Work> Messages::find(std::uint64_t number) const {
  const auto found = pending_.find(number);
  return found == pending_.end() ? nullptr : found->second;
}

void Messages::wait_for(const std::shared_ptr<Work>& work) { pending_.emplace(work->seq, work); }

void Messages::settle(const std::shared_ptr<Work>& work) {
  pending_.erase(work->seq);
  work->state.store(State::done, std::memory_order_seq_cst);
  // Another thread may sleep in a wait for it. Pairs with the re-check in Group::sleep().
  if (share_.control().header().sleepers.load(std::memory_order_seq_cst) != 0) share_.group.wake();
}

void Messages::count() {
  waiting_.store(pending_.size() + unsent_.size(), std::memory_order_release);
}

void Messages::fail_all() {
  ended_.store(true, std::memory_order_release);
  for (const auto& [number, work] : pending_)
    work->state.store(State::failed, std::memory_order_release);
  pending_.clear();
  looking_.clear();
  arrivals_.clear();
  sending_.clear();
  fetching_.clear();
  unsent_.clear();
  count();
}

void Messages::end() {
  while (!pending_.empty() && read_letter()) {
  }
  fail_all();
}

bool Messages::left(int member) const {
  return share_.control().state(member).left.load(std::memory_order_seq_cst) != 0;
}

// Whether a message waits for one of these.
bool Messages::needs(const Work& work, const std::vector<bool>& gone) const {
  const int peer = work.call.root;
  if (peer != kAny) return gone[static_cast<std::size_t>(peer)];
  for (int member = 0; member < share_.members; ++member)
    if (member != share_.me && !gone[static_cast<std::size_t>(member)]) return false;
  return share_.members > 1;
}

void Messages::check_left() {
  if (pending_.empty()) return;
  std::vector<bool> gone(static_cast<std::size_t>(share_.members));
  for (int member = 0; member < share_.members; ++member)
    gone[static_cast<std::size_t>(member)] = member != share_.me && left(member);
  if (std::find(gone.begin(), gone.end(), true) == gone.end()) return;
  // `left` is a member's last store: it writes no letters after it.
  while (write_unsent() || read_letter()) {
  }
  for (const auto& [number, work] : pending_) {
    if (!needs(*work, gone)) continue;
    const int peer = work->call.root;
    const auto first = std::find(gone.begin(), gone.end(), true) - gone.begin();
    blame(Fault::left, peer == kAny ? static_cast<int>(first) : peer, *work);
    return;
  }
  count();
}

// Whether the word is ours: then our report belongs to it.
bool Messages::blame(Fault fault, int member, const Work& work, const MessageRecord* other) {
  if (share_.group.culprit_word() != 0) return false;
  record(share_.own().mismatch[0], work);
  share_.own().mismatch[1] = other == nullptr ? MessageRecord{} : *other;
  share_.group.blame({fault, member, share_.me, work.seq});
  return true;
}

bool Messages::tell_first(std::uint64_t& number) {
  if (pending_.empty() || share_.group.culprit_word() != 0) return false;
  const Work& work = *pending_.begin()->second;
  record(share_.own().mismatch[0], work);
  number = work.seq;
  return true;
}

void Messages::give_up(const Work& work) {
  blame(Fault::timeout, work.call.root == kAny ? share_.me : work.call.root, work);
}

}  // namespace allreduce
