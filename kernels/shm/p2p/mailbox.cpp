// Sends and recvs: the letters that members write to each other, and the bytes of large messages.
#include <algorithm>
#include <cstring>

#include "shm/p2p/p2p.h"

namespace allreduce {
namespace {

// Bytes that a step reads out of symmetric memory: some tens of microseconds.
constexpr std::uint64_t kStep = 256 << 10;
// Messages of this many bytes or more are read past the caches, so that no line of the output is
// read before it is written: 4 MiB 0.47 instead of 0.92 ms, 16 MiB 2.0 instead of 2.7, 64 MiB 6.3
// instead of 8.8 (2 ranks, fastest tenth, Zen 4); memmove took 1.25, 3.7 and 12.7.
constexpr std::uint64_t kPast = 4 << 20;

std::uint64_t lap_turn(std::uint64_t position) { return position / kLetters * 2; }

}  // namespace

bool Messages::busy() const {
  if (ended_.load(std::memory_order_acquire)) return false;
  if (waiting_.load(std::memory_order_acquire) != 0) return true;
  if (share_.members == 1) return false;
  const std::uint64_t position = read_.load(std::memory_order_acquire);
  const LetterBox& box = own().letters[position % kLetters];
  return box.turn.load(std::memory_order_seq_cst) == lap_turn(position) + 1;
}

// --- letters -------------------------------------------------------------------------------------

// Writes a letter as soon as there is room for it, after those that wait.
void Messages::write(int to, const Outgoing& outgoing) {
  if (!unsent_.contains(to) && try_write(to, outgoing)) {
    if (outgoing.settles) settle(outgoing.work);
  } else {
    unsent_[to].push_back(outgoing);
  }
}

bool Messages::try_write(int to, const Outgoing& outgoing) {
  const auto& [letter, work, settles] = outgoing;
  Mailbox& mailbox = share_.control().mailbox(to);
  std::uint64_t position = mailbox.next.load(std::memory_order_seq_cst);
  for (;;) {
    LetterBox& box = mailbox.letters[position % kLetters];
    const std::uint64_t turn = box.turn.load(std::memory_order_seq_cst);
    const std::uint64_t free = lap_turn(position);
    if (turn < free) return false;  // not read yet: the box is full
    if (turn > free) {              // another member was faster
      position = mailbox.next.load(std::memory_order_seq_cst);
    } else if (mailbox.next.compare_exchange_weak(position, position + 1,
                                                  std::memory_order_seq_cst)) {
      box.letter = letter;
      if (letter.kind == LetterKind::message || letter.kind == LetterKind::offer)
        mailbox.remarks[position % kLetters].set(work->details.note);
      if (letter.kind == LetterKind::message && letter.count != 0)
        std::memcpy(mailbox.payloads[position % kLetters], work->in, bytes_of(*work));
      // Pairs with the loads of `turn` in read_letter() and busy().
      share_.group.publish(box.turn, free + 1);
      return true;
    }
  }
}

bool Messages::write_unsent() {
  bool moved = false;
  for (auto entry = unsent_.begin(); entry != unsent_.end();) {
    auto& [to, letters] = *entry;
    while (!letters.empty()) {
      const Outgoing& first = letters.front();
      // A member that left needs no answer; check_left() finds messages that it did not send.
      const bool dropped = !first.settles && left(to);
      if (!dropped && !try_write(to, first)) break;
      if (first.settles) settle(first.work);
      letters.pop_front();
      moved = true;
    }
    entry = letters.empty() ? unsent_.erase(entry) : std::next(entry);
  }
  return moved;
}

// Whether a letter is valid: its writer may run other code.
bool Messages::sound(const Letter& letter) const {
  if (letter.from >= share_.members || static_cast<int>(letter.type) >= kTypes) return false;
  const std::uint64_t unit = size_of(letter.type);
  if (letter.count > UINT64_MAX / unit) return false;
  const std::uint64_t bytes = letter.count * unit;
  const auto fits = [&](std::uint64_t size, std::uint64_t needed) {
    return needed <= size && letter.offset <= size - needed;
  };
  switch (letter.kind) {
    case LetterKind::message:
      return bytes <= kEager;
    case LetterKind::offer: {
      const auto region = letter.where == 0 ? nullptr : share_.group.find_region(letter.where);
      return !region || fits(region->part_bytes, bytes);
    }
    case LetterKind::accept:
    case LetterKind::fetched: {
      const auto own = find(letter.send);
      return !own || own->call.collective == Collective::send;
    }
    case LetterKind::chunk: {
      const auto own = find(letter.recv);
      const bool fit =
          !own || (own->call.collective == Collective::recv && fits(bytes_of(*own), letter.count));
      return fit && letter.where < kWindows && letter.count <= kWindow;
    }
    case LetterKind::taken:
      return true;
  }
  return false;
}

bool Messages::read_letter() {
  if (share_.members == 1) return false;
  const std::uint64_t position = read_.load(std::memory_order_relaxed);
  const std::size_t i = position % kLetters;
  LetterBox& box = own().letters[i];
  if (box.turn.load(std::memory_order_seq_cst) != lap_turn(position) + 1) return false;
  if (!sound(box.letter)) {
    explain(share_,
            "another rank has written what is no part of a message; install the same "
            "version of allreduce on all ranks");
    share_.group.blame({Fault::aborted, share_.me, share_.me, 0});
    return false;
  }
  take({box.letter, own().payloads[i], own().remarks[i].get(), nullptr});
  read_.store(position + 1, std::memory_order_release);
  // Pairs with the load of `turn` in try_write(), whose member may sleep until there is room.
  share_.group.publish(box.turn, lap_turn(position) + 2);
  return true;
}

void Messages::take(const Incoming& incoming) {
  const Letter& letter = incoming.letter;
  switch (letter.kind) {
    case LetterKind::message:
    case LetterKind::offer:
      return arrive(incoming);
    case LetterKind::accept:
      if (const auto send = find(letter.send)) sending_.push_back({send, letter, nullptr});
      return;
    case LetterKind::chunk:
      return take_chunk(letter);
    case LetterKind::fetched:
      if (const auto send = find(letter.send)) settle(send);
      return;
    case LetterKind::taken:
      untaken_[letter.from] -= static_cast<int>(letter.count);
      return;
  }
}

// --- bytes ---------------------------------------------------------------------------------------

// Copies a chunk out of its sender's window, and overwrites it there: the lines then move between
// the two caches instead of being shared (see staged.cpp for the gain).
void Messages::take_chunk(const Letter& letter) {
  Mailbox& theirs = share_.control().mailbox(letter.from);
  const auto recv = find(letter.recv);
  if (recv) {
    kernels().swap(recv->out + letter.offset, theirs.windows[letter.where], nullptr, letter.count);
    recv->cursor += letter.count;
  }
  // Pairs with the load in free_window().
  share_.group.publish(theirs.filled[letter.where].value, 0);
  if (recv && recv->cursor == bytes_of(*recv)) settle(recv);
}

int Messages::free_window(int receiver) const {
  int free = -1, held = 0;
  for (std::size_t i = 0; i < kWindows; ++i) {
    // A receiver that has left will read no more, and has stored its last word.
    if (own().filled[i].value.load(std::memory_order_seq_cst) == 0 || left(receivers_[i]))
      free = static_cast<int>(i);
    else if (receivers_[i] == receiver)
      ++held;
  }
  return held < kWindowsPerReceiver ? free : -1;
}

// Puts one chunk of one message into a window; the messages take turns.
bool Messages::stage_chunk() {
  for (std::size_t tried = 0; tried < sending_.size(); ++tried) {
    const Move move = std::move(sending_.front());
    sending_.pop_front();
    const int to = move.work->call.root;
    const int window = unsent_.contains(to) ? -1 : free_window(to);
    if (window < 0) {
      sending_.push_back(move);
      continue;
    }
    Work& work = *move.work;
    const std::uint64_t bytes = std::min<std::uint64_t>(kWindow, bytes_of(work) - work.cursor);
    kernels().copy(own().windows[window], work.in + work.cursor, bytes);
    receivers_[window] = to;
    own().filled[window].value.store(1, std::memory_order_seq_cst);
    const Letter letter{.kind = LetterKind::chunk,
                        .from = static_cast<std::uint16_t>(share_.me),
                        .where = static_cast<std::uint32_t>(window),
                        .count = bytes,
                        .recv = move.letter.recv,
                        .offset = work.cursor};
    work.cursor += bytes;
    const bool last = work.cursor == bytes_of(work);
    if (!last) sending_.push_back(move);
    write(to, {letter, move.work, last});
    return true;
  }
  return false;
}

// Reads a part of one message out of symmetric memory; the messages take turns.
bool Messages::fetch() {
  if (fetching_.empty()) return false;
  Move move = std::move(fetching_.front());
  fetching_.pop_front();
  Work& recv = *move.work;
  const std::uint64_t bytes = std::min(kStep, bytes_of(recv) - recv.cursor);
  const Copy copy = bytes_of(recv) >= kPast ? kernels().stream_copy : kernels().copy;
  copy(recv.out + recv.cursor,
       move.region->part(move.letter.from) + move.letter.offset + recv.cursor, bytes);
  recv.cursor += bytes;
  // Orders the copy before the checks for failed and left members, as `finished` in
  // step_cross_process().
  fetched_.store(fetched_.load(std::memory_order_relaxed) + bytes, std::memory_order_seq_cst);
  // A sender that fails or leaves does not wait for this: it may have overwritten the data that was
  // read.
  if (share_.group.culprit_word() != 0) return false;  // the recv fails with all others
  if (left(move.letter.from)) {
    blame(Fault::left, move.letter.from, recv);
  } else if (recv.cursor < bytes_of(recv)) {
    fetching_.push_back(std::move(move));
  } else {
    // Done when that is written: a member may leave after it.
    const Letter letter{.kind = LetterKind::fetched,
                        .from = static_cast<std::uint16_t>(share_.me),
                        .send = move.letter.send};
    write(move.letter.from, {letter, move.work, true});
  }
  return true;
}

}  // namespace allreduce
