#include "tcp/calls/execution.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace allreduce::tcp {
namespace {

// Chunks of one flow that wait in a connection's line: enough to keep the socket full.
constexpr std::uint64_t kInLine = 8;

}  // namespace

Execution::Execution(std::shared_ptr<Work> work, Wires& wires, int me, int members)
    : work_(std::move(work)),
      plan_(make_plan(work_->request, me, members)),
      windowed_(plan_.windowed()),
      wires_(wires),
      me_(me),
      members_(members),
      remote_key_(work_->key) {
  for (std::size_t i = 0; i < plan_.stages.size(); ++i) {
    const Stage& stage = plan_.stages[i];
    indices_[stage.id] = i;
    Progress progress;
    progress.chunks = (stage.elements + plan_.chunk - 1) / plan_.chunk;
    for (const Link& link : stage.to)
      progress.windows.push_back({link.windowed ? 0 : progress.chunks, {}});
    progress.got.assign(stage.from.size(), std::vector<bool>(progress.chunks));
    remaining_ += progress.chunks * (std::max<std::size_t>(1, stage.from.size()) + stage.to.size());
    progress_.push_back(std::move(progress));
  }
}

std::uint64_t Execution::elements_of(const Stage& stage, std::uint64_t chunk) const {
  return std::min(plan_.chunk, stage.elements - chunk * plan_.chunk);
}

// Bytes that hold any chunk of a stage. Few sizes, so that other calls' blocks fit.
std::size_t Execution::block_of(const Stage& stage) const {
  const std::size_t element = work_->request.element();
  return std::min(std::bit_ceil(stage.elements * element), plan_.chunk * element);
}

std::byte* Execution::out_at(const Stage& stage, std::uint64_t chunk) const {
  if (stage.out == kNowhere) return nullptr;
  return work_->request.out +
         (static_cast<std::uint64_t>(stage.out) + chunk * plan_.chunk) * work_->request.element();
}

const std::byte* Execution::in_at(const Stage& stage, std::uint64_t chunk) const {
  return work_->request.in +
         (static_cast<std::uint64_t>(stage.in) + chunk * plan_.chunk) * work_->request.element();
}

std::size_t Execution::index_of(std::uint32_t id) const {
  const auto found = indices_.find(id);
  return found == indices_.end() ? plan_.stages.size() : found->second;
}

int Execution::source_of(const Stage& stage, int peer) const {
  const auto found = std::find(stage.from.begin(), stage.from.end(), peer);
  return found == stage.from.end() ? -1 : static_cast<int>(found - stage.from.begin());
}

void Execution::begin() {
  begun_ = true;
  for (std::size_t i = 0; i < plan_.stages.size(); ++i) pump(i);
}

void Execution::grant() {
  if (granted_) return;
  granted_ = true;
  for (const Stage& stage : plan_.stages)
    if (stage.windowed)
      for (const int peer : stage.from)
        wires_.send_credit(peer, remote_key_, stage.id, plan_.window);
}

// Sends off chunks of a flow that begins here.
void Execution::pump(std::size_t index) {
  const Stage& stage = plan_.stages[index];
  Progress& progress = progress_[index];
  if (!begun_ || !stage.from.empty()) return;
  while (progress.next < progress.chunks && progress.in_flight < kInLine) {
    for (const Window& window : progress.windows)
      if (progress.next >= window.allowed) return;
    const std::uint64_t chunk = progress.next++;
    const std::byte* data = in_at(stage, chunk);
    std::byte* out = out_at(stage, chunk);
    if (out != nullptr && out != data)
      std::memcpy(out, data, elements_of(stage, chunk) * work_->request.element());
    progress.in_flight += stage.to.size();
    --remaining_;
    pass_on(index, {chunk, data, nullptr});
  }
}

Landing Execution::land(int peer, const Header& header) {
  const std::size_t index = index_of(header.stage);
  if (index == plan_.stages.size()) return {};
  const Stage& stage = plan_.stages[index];
  Progress& progress = progress_[index];
  const int source = source_of(stage, peer);
  if (source < 0 || header.offset >= progress.chunks) return {};
  auto slot = progress.got[static_cast<std::size_t>(source)][header.offset];
  const std::size_t bytes = elements_of(stage, header.offset) * work_->request.element();
  if (slot || header.length != bytes) return {};
  if (stage.windowed && (!granted_ || header.offset >= progress.released + plan_.window)) return {};
  slot = true;
  if (!stage.reduce) return {out_at(stage, header.offset), nullptr, nullptr};
  Block block = wires_.take(block_of(stage));
  std::byte* at = block.get();
  return {at, std::move(block), nullptr};
}

void Execution::arrived(int peer, const Header& header, Landing landing) {
  const std::size_t index = index_of(header.stage);
  const Stage& stage = plan_.stages[index];
  --remaining_;
  if (!stage.reduce)
    pass_on(index, {header.offset, out_at(stage, header.offset), nullptr});
  else if (stage.from.size() > 1)
    meet(index, header.offset, peer, std::move(landing.block));
  else
    fold_one(index, header.offset, std::move(landing.block));
}

// Reduces `n` arrays to a chunk; a mean is divided where it is final.
void Execution::fold(std::size_t index, std::uint64_t chunk, const void* const* in, int n,
                     void* out) const {
  const Call& call = work_->request.call;
  const Stage& stage = plan_.stages[index];
  const Op op = call.op == Op::mean && !stage.last ? Op::sum : call.op;
  kernels().reduce[static_cast<int>(op)][static_cast<int>(call.type)](
      in, n, &out, 1, elements_of(stage, chunk), members_);
}

// Reduces one chunk that came along a chain with the own contribution.
void Execution::fold_one(std::size_t index, std::uint64_t chunk, Block block) {
  const Stage& stage = plan_.stages[index];
  std::byte* out = out_at(stage, chunk);
  std::byte* target = out != nullptr ? out : block.get();
  const void* in[] = {block.get(), in_at(stage, chunk)};
  fold(index, chunk, in, 2, target);
  if (out != nullptr) block = nullptr;
  pass_on(index, {chunk, target, std::move(block)});
}

// Keeps a chunk until those of all sources are there; reduces them in member order.
void Execution::meet(std::size_t index, std::uint64_t chunk, int peer, Block block) {
  const Stage& stage = plan_.stages[index];
  auto& blocks = progress_[index].meeting[chunk];
  blocks.resize(static_cast<std::size_t>(members_));
  blocks[static_cast<std::size_t>(peer)] = std::move(block);
  const auto here = std::count_if(blocks.begin(), blocks.end(), [](const Block& b) { return !!b; });
  if (static_cast<std::size_t>(here) < stage.from.size()) return;
  std::vector<const void*> in;
  for (int member = 0; member < members_; ++member)
    in.push_back(member == me_ ? in_at(stage, chunk)
                               : blocks[static_cast<std::size_t>(member)].get());
  std::byte* out = out_at(stage, chunk);
  Block kept;
  if (out == nullptr) {
    kept = blocks[static_cast<std::size_t>(stage.from[0])];
    out = kept.get();
  }
  fold(index, chunk, in.data(), members_, out);
  progress_[index].meeting.erase(chunk);
  pass_on(index, {chunk, out, std::move(kept)});
}

// Sends a chunk on all links of its stage, at once or when the peer allows it.
void Execution::pass_on(std::size_t index, Ready ready) {
  const Stage& stage = plan_.stages[index];
  Progress& progress = progress_[index];
  if (ready.hold && !stage.to.empty())
    progress.going[ready.hold.get()] = static_cast<int>(stage.to.size());
  else if (stage.windowed)
    release(index);
  for (std::size_t link = 0; link < stage.to.size(); ++link) {
    Window& window = progress.windows[link];
    if (ready.chunk < window.allowed)
      transmit(index, link, ready);
    else
      window.held.push_back(ready);
  }
}

void Execution::transmit(std::size_t index, std::size_t link, const Ready& ready) {
  const Stage& stage = plan_.stages[index];
  const std::size_t bytes = elements_of(stage, ready.chunk) * work_->request.element();
  Outgoing frame;
  frame.header = {.kind = Kind::data,
                  .key = remote_key_,
                  .offset = ready.chunk,
                  .stage = stage.to[link].stage,
                  .length = static_cast<std::uint32_t>(bytes)};
  frame.data = ready.data;
  frame.hold = ready.hold;
  frame.execution = shared_from_this();
  frame.stage = index;
  wires_.send_data(stage.to[link].peer, std::move(frame));
}

void Execution::sent(std::size_t index, const Block& hold) {
  Progress& progress = progress_[index];
  --remaining_;
  if (plan_.stages[index].from.empty()) {
    --progress.in_flight;
    pump(index);
  }
  if (!hold) return;
  const auto going = progress.going.find(hold.get());
  if (--going->second != 0) return;
  progress.going.erase(going);
  release(index);
}

// A staged chunk has gone on: each source may send one more.
void Execution::release(std::size_t index) {
  const Stage& stage = plan_.stages[index];
  if (!stage.windowed) return;
  Progress& progress = progress_[index];
  const std::uint64_t allowed = ++progress.released + plan_.window;
  if (allowed > progress.chunks) return;
  for (const int peer : stage.from) wires_.send_credit(peer, remote_key_, stage.id, allowed);
}

bool Execution::credited(int peer, std::uint32_t id, std::uint64_t allowed) {
  bool found = false;
  for (std::size_t index = 0; index < plan_.stages.size(); ++index) {
    const Stage& stage = plan_.stages[index];
    for (std::size_t link = 0; link < stage.to.size(); ++link) {
      if (stage.to[link].peer != peer || stage.to[link].stage != id) continue;
      found = true;
      Window& window = progress_[index].windows[link];
      window.allowed = std::max(window.allowed, allowed);
      std::deque<Ready> held = std::move(window.held);
      window.held.clear();
      for (const Ready& ready : held) {
        if (ready.chunk < window.allowed)
          transmit(index, link, ready);
        else
          window.held.push_back(ready);
      }
      pump(index);
    }
  }
  return found;
}

}  // namespace allreduce::tcp
