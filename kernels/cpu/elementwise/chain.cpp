// Binds a chain to shapes and strides: chooses axes, tiles, and the steps of each tile.
#include "cpu/elementwise/chain.h"

#include <algorithm>
#include <utility>

#include "core/slices.h"

namespace allreduce {
namespace {

// Elements of a tile. A handful of float tiles fill only a part of a level-1 cache of 32 KiB, and
// stores past the caches stay close together.
constexpr std::size_t kTile = 384;
// Elements of a tile of a fully fused chain, which keeps nothing in tiles: starting a fused kernel
// takes 50 ns or more, as long as half of 384 floats.
constexpr std::size_t kLongTile = 2048;

std::size_t padded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Whether only the next operation reads this operation's value, exactly once.
bool is_passed_on(const Chain& chain, std::size_t index) {
  int readers = 0, next = 0;
  for (std::size_t at = index + 1; at < chain.ops.size(); ++at)
    for (int i = 0; i < chain.ops[at].count; ++i)
      if (chain.ops[at].reads[i] == -1 - static_cast<int>(index)) {
        ++readers;
        next += at == index + 1;
      }
  return readers == 1 && next == 1;
}

// How many operations after this one are fused with it, in registers.
std::size_t followers(const Chain& chain, const ElementwiseKernels& kernels, std::size_t first) {
  const auto fits = [&](std::size_t index) {
    return kernels.find_fused(chain.ops[index].op, chain.ops[index].in) != nullptr;
  };
  std::size_t last = first;
  while (fits(first) && last + 1 < chain.ops.size() && last + 1 - first < kMaxFusedOps &&
         is_passed_on(chain, last) && fits(last + 1))
    ++last;
  return last - first;
}

}  // namespace

std::size_t size_of(Scalar type) {
  switch (type) {
    case Scalar::boolean:
      return 1;
    case Scalar::int32:
    case Scalar::float32:
      return 4;
    default:
      return 8;
  }
}

BoundChain::BoundChain(const Chain& chain, const ElementwiseKernels& kernels,
                       std::vector<std::size_t> shape,
                       std::vector<std::vector<std::ptrdiff_t>> strides)
    : kernels_(&kernels), shape_(std::move(shape)), out_size_(size_of(chain.ops.back().out)) {
  for (std::size_t each : shape_) elements_ *= each;
  for (std::size_t i = 0; i < chain.inputs.size(); ++i)
    sources_.push_back({size_of(chain.inputs[i]), std::move(strides[i]), Way::direct});
  is_fused_ = chain.ops.size() > 1 && followers(chain, kernels, 0) + 1 == chain.ops.size();
  merge_axes();
  choose_ways();
  add_steps(chain);
}

// The index of an operand: an input, or after the inputs an earlier operation's tile.
std::size_t BoundChain::place_of(int read) const {
  return static_cast<std::size_t>(read >= 0 ? read : static_cast<int>(sources_.size()) - 1 - read);
}

// Adds the operations `first` to `last` (inclusive) as one fused step.
void BoundChain::add_fused(const Chain& chain, std::size_t first, std::size_t last) {
  const ChainOp& begin = chain.ops[first];
  Step step{nullptr, {place_of(begin.reads[0]), 0, 0}, 1, tiles_[last]};
  step.fused = kernels_->find_fused(begin.op, begin.in);
  for (std::size_t index = first; index <= last; ++index) {
    const ChainOp& entry = chain.ops[index];
    const bool is_right = index != first && entry.reads[0] != -static_cast<int>(index);
    const std::size_t other = place_of(entry.reads[is_right ? 0 : 1]);
    const bool repeats = other < sources_.size() && sources_[other].repeated;
    if (!repeats) needs_tile(other);
    step.ops.push_back({entry.op, is_right, repeats, nullptr});
    step.others.push_back(other);
  }
  needs_tile(step.reads[0]);
  steps_.push_back(std::move(step));
}

// Requires a whole tile of an input that is not read directly; a fused step reads one element of a
// repeated input instead.
void BoundChain::needs_tile(std::size_t read) {
  if (read < sources_.size()) sources_[read].whole = true;
}

void BoundChain::add_steps(const Chain& chain) {
  std::vector<std::size_t> offsets;
  std::vector<bool> used;
  for (const ChainOp& entry : chain.ops) {
    const auto slot = static_cast<std::size_t>(entry.slot);
    if (offsets.size() <= slot) {
      offsets.resize(slot + 1, 0);
      used.resize(slot + 1, false);
    }
    if (!used[slot]) {  // all values of a slot have one type
      used[slot] = true;
      offsets[slot] = scratch_;
      scratch_ += padded(tile_ * size_of(entry.out));
    }
    tiles_.push_back(offsets[slot]);
  }
  for (std::size_t index = 0; index < chain.ops.size(); ++index) {
    if (const std::size_t more = followers(chain, *kernels_, index)) {
      add_fused(chain, index, index + more);
      index += more;
      continue;
    }
    const ChainOp& entry = chain.ops[index];
    Step step{kernels_->find(entry.op, entry.in, entry.out), {0, 0, 0}, entry.count, tiles_[index]};
    for (int i = 0; i < entry.count; ++i) {
      step.reads[i] = place_of(entry.reads[i]);
      needs_tile(step.reads[i]);
    }
    steps_.push_back(std::move(step));
  }
}

// Merges neighbouring axes that all inputs traverse with equal strides.
void BoundChain::merge_axes() {
  std::vector<std::size_t> axes;  // the remaining ones, innermost first
  std::vector<std::vector<std::ptrdiff_t>> left(sources_.size());
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    if (shape_[axis] == 1) continue;
    bool joins = !axes.empty();
    for (std::size_t i = 0; joins && i < sources_.size(); ++i)
      joins =
          sources_[i].strides[axis] == left[i].back() * static_cast<std::ptrdiff_t>(axes.back());
    if (joins) {
      axes.back() *= shape_[axis];
      continue;
    }
    axes.push_back(shape_[axis]);
    for (std::size_t i = 0; i < sources_.size(); ++i) left[i].push_back(sources_[i].strides[axis]);
  }
  shape_.assign(axes.rbegin(), axes.rend());
  for (std::size_t i = 0; i < sources_.size(); ++i)
    sources_[i].strides.assign(left[i].rbegin(), left[i].rend());
}

// Cuts the result into tiles: parts of a row of the last axis, or several short rows.
void BoundChain::choose_ways() {
  row_ = shape_.empty() ? 1 : shape_.back();
  const std::size_t most = is_fused_ ? kLongTile : kTile;
  const bool rows_are_long = shape_.size() < 2 || row_ > most / 2;
  tile_ = rows_are_long ? std::min(row_, most) : most / std::max<std::size_t>(1, row_) * row_;
  for (Source& source : sources_) {
    auto contiguous = static_cast<std::ptrdiff_t>(source.size);
    bool direct = true, repeated = true, same = true;
    for (std::size_t axis = shape_.size(); axis-- > 0;) {
      const bool inner = axis + 1 == shape_.size();
      direct = direct && (source.strides[axis] == contiguous || (rows_are_long && !inner));
      repeated = repeated && source.strides[axis] == 0;
      same = same && (inner || source.strides[axis] == 0);
      contiguous *= static_cast<std::ptrdiff_t>(shape_[axis]);
    }
    source.repeated = repeated && !shape_.empty();
    const bool once = rows_are_long ? repeated : same;
    source.way = direct ? Way::direct : once ? Way::once : Way::anew;
    if (shape_.empty()) source.way = Way::direct;
    if (source.way == Way::direct) continue;
    source.tile = scratch_;
    scratch_ += padded(tile_ * source.size);
  }
}

}  // namespace allreduce
