// What a member finds in shared memory may come from a program with other code: it must not make
// this one read or write outside the arrays, the regions and the tables of a call.
//
// One member is real; what the other one writes is made up here. Prints "ok" and exits 0, or says
// what is wrong and exits 1.
#include <cstring>

#include "members.h"

using namespace allreduce;

namespace {

constexpr std::size_t kElements = 5000;       // float64: an offer, which moves in chunks
constexpr std::uint64_t kReceive = kMessage;  // the number of the only recv

struct Strangers {
  std::shared_ptr<Group> group;
  std::unique_ptr<Member> member;

  Strangers() {
    Choices made;
    const Band band{UINT64_MAX, {64 << 10, false, UINT64_MAX}, {}, {64 << 10, false, UINT64_MAX}};
    for (std::uint64_t i = 0; i < kCollectives; ++i)
      check(made.set(static_cast<Collective>(i), {kSmall, {band}}, 2) == "", "rules");
    group = std::make_shared<Group>(-1, 2, 2, made);
    group->map_region(1, -1, kElements * sizeof(double), 1);
    member = std::make_unique<Member>(group, 0);
  }
  const Control& control() const { return group->control(); }
  // Writes a letter into the member's empty box.
  void write(const Letter& letter) {
    LetterBox& box = control().mailbox(0).letters[0];
    box.letter = letter;
    box.turn.store(1);
  }
  // Posts a call as the other member, with these bytes beside it.
  void post(const Call& call, std::uint64_t detail, const void* payload, std::size_t bytes) {
    Slot& slot = control().slot(1, 0);
    slot.signature = call.pack();
    slot.detail = detail;
    std::memcpy(slot.payload, payload, bytes);
    slot.flag.store(1);
  }
};

void refuses(const char* what, const Letter& letter) {
  Strangers strangers;
  std::vector<double> out(kElements, 7);
  const Call call{
      .collective = Collective::recv, .type = Type::float64, .root = kAny, .count = out.size()};
  auto* to = reinterpret_cast<std::byte*>(out.data());
  auto work = strangers.member->start_message(call, kAny, nullptr, to);
  const auto region = strangers.group->claim_region(1);
  strangers.write(letter);
  for (int i = 0; i < 20; ++i) strangers.member->advance();
  check(work->state.load() == State::failed, what);
  check(strangers.group->culprit().fault == Fault::aborted, what);
  for (double got : out) check(got == 7, what);
}

void test_letters() {
  const Letter good{.kind = LetterKind::message, .type = Type::float64, .from = 1, .count = 10};
  const auto with = [&](auto change) {
    Letter letter = good;
    change(letter);
    return letter;
  };
  refuses("a letter of nobody", with([](Letter& one) { one.from = 4000; }));
  refuses("a letter of no kind", with([](Letter& one) { one.kind = static_cast<LetterKind>(99); }));
  refuses("a letter of no type", with([](Letter& one) { one.type = static_cast<Type>(200); }));
  refuses("a small message that is large", with([](Letter& one) { one.count = kElements; }));
  refuses("a message of too much", with([](Letter& one) {
            one.count = UINT64_MAX / 8 + 2;  // 8 bytes, by what is left of the product
          }));
  refuses("an offer outside the region", with([](Letter& one) {
            one.kind = LetterKind::offer;
            one.count = kElements;
            one.where = 1;
            one.offset = 8;
          }));
  refuses("what accepts a recv", with([](Letter& one) {
            one.kind = LetterKind::accept;
            one.send = kReceive;
          }));
  refuses("what has fetched a recv", with([](Letter& one) {
            one.kind = LetterKind::fetched;
            one.send = kReceive;
          }));
  const auto chunk = [&](std::uint32_t window, std::uint64_t count, std::uint64_t offset) {
    return Letter{.kind = LetterKind::chunk,
                  .from = 1,
                  .where = window,
                  .count = count,
                  .recv = kReceive,
                  .offset = offset};
  };
  refuses("a chunk in no window", chunk(kWindows, 8, 0));
  refuses("a chunk that is longer than its window", chunk(0, kWindow + 1, 0));
  refuses("a chunk behind the array", chunk(0, 16, kElements * sizeof(double) - 8));
  refuses("a chunk before the array", chunk(0, 16, UINT64_MAX - 7));
}

void test_placement() {
  for (const bool out : {false, true}) {
    Strangers strangers;
    const auto region = strangers.group->claim_region(1);
    const Call call{.collective = Collective::all_reduce,
                    .op = Op::sum,
                    .type = Type::float64,
                    .path = Path::direct,
                    .count = kElements};
    std::byte* own = region->part(0);
    auto work = strangers.member->start(call, own, own);
    Placement place{.in_region = 1, .out_region = 1};
    (out ? place.out_offset : place.in_offset) = 1ull << 40;
    strangers.post(work->call, 0, &place, sizeof(place));
    for (int i = 0; i < 20; ++i) strangers.member->advance();
    check(work->state.load() == State::failed, "an array outside of its region is used");
  }
}

void test_spare_page() {
  Strangers strangers;
  std::vector<double> in(100, 1), out(100, 7);
  const Call call{.collective = Collective::all_reduce,
                  .op = Op::sum,
                  .type = Type::float64,
                  .count = in.size()};
  auto work = strangers.member->start(call, reinterpret_cast<std::byte*>(in.data()),
                                      reinterpret_cast<std::byte*>(out.data()));
  const unsigned char spare = 255;
  strangers.post(work->call, 0, &spare, sizeof(spare));
  for (int i = 0; i < 20; ++i) strangers.member->advance();
  check(work->state.load() == State::done, "a page that there is not");
}

void test_texts() {
  Strangers strangers;
  Remark& remark = strangers.control().note(1, 0).remark;
  remark.length = UINT16_MAX;
  check(remark.get().size() == Remark::kText, "a remark is longer than its place");
  strangers.group->blame({Fault::lost, kMaxMembers - 1, kMaxMembers - 1, 1});
  const Culprit culprit = strangers.group->culprit();
  check(culprit.member == 1 && culprit.observer == 1, "there is no such member");
}

}  // namespace

int main() {
  test_letters();
  test_placement();
  test_spare_page();
  test_texts();
  std::puts("ok");
  return 0;
}
