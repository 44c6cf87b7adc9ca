// What a chain becomes for certain shapes and strides: axes, tiles, and the steps of each tile.
#include "cpu/elementwise/chain.h"

#include <algorithm>
#include <utility>

#include "core/slices.h"

namespace allreduce {
namespace {

// Elements of a tile. Of floats, a handful of them and what is fetched for the next tile take a
// part of a level-1 cache of 32 KiB only, and stores past the caches are never far apart.
constexpr std::size_t kTile = 384;
// Of a chain that is one spine, which keeps nothing in tiles: to begin one takes 50 ns or more, as
// long as half of 384 floats.
constexpr std::size_t kLongTile = 2048;

std::size_t padded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Whether nothing but the link behind it reads a link's value, and that once.
bool is_passed_on(const Chain& chain, std::size_t index) {
  int readers = 0, next = 0;
  for (std::size_t at = index + 1; at < chain.links.size(); ++at)
    for (int i = 0; i < chain.links[at].count; ++i)
      if (chain.links[at].reads[i] == -1 - static_cast<int>(index)) {
        ++readers;
        next += at == index + 1;
      }
  return readers == 1 && next == 1;
}

// How many links behind this one are carried out with it, in registers.
std::size_t followers(const Chain& chain, const LinkKernels& kernels, std::size_t first) {
  const auto fits = [&](std::size_t index) {
    return kernels.find_spine(chain.links[index].op, chain.links[index].in) != nullptr;
  };
  std::size_t last = first;
  while (fits(first) && last + 1 < chain.links.size() && last + 1 - first < kLongest &&
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

BoundChain::BoundChain(const Chain& chain, const LinkKernels& kernels,
                       std::vector<std::size_t> shape,
                       std::vector<std::vector<std::ptrdiff_t>> strides)
    : kernels_(&kernels), shape_(std::move(shape)), out_size_(size_of(chain.links.back().out)) {
  for (std::size_t each : shape_) elements_ *= each;
  for (std::size_t i = 0; i < chain.inputs.size(); ++i)
    sources_.push_back({size_of(chain.inputs[i]), std::move(strides[i]), Way::direct});
  is_spine_ = chain.links.size() > 1 && followers(chain, kernels, 0) + 1 == chain.links.size();
  merge_axes();
  choose_ways();
  add_steps(chain);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const std::size_t bytes = tile_ * sources_[i].size;
    if (sources_[i].way == Way::direct && elements_ > tile_ && !is_spine_)
      fetched_.push_back({i, bytes, padded((bytes + steps_.size() - 1) / steps_.size())});
  }
}

// The number of what a link reads: of an input, or behind them of an earlier link's tile.
std::size_t BoundChain::place_of(int read) const {
  return static_cast<std::size_t>(read >= 0 ? read : static_cast<int>(sources_.size()) - 1 - read);
}

// Adds the links `first` to `last` (inclusive) as one step.
void BoundChain::add_spine(const Chain& chain, std::size_t first, std::size_t last) {
  const Link& begin = chain.links[first];
  Step step{nullptr, {place_of(begin.reads[0]), 0, 0}, 1, tiles_[last]};
  step.spine = kernels_->find_spine(begin.op, begin.in);
  for (std::size_t index = first; index <= last; ++index) {
    const Link& link = chain.links[index];
    const bool is_right = index != first && link.reads[0] != -static_cast<int>(index);
    const std::size_t other = place_of(link.reads[is_right ? 0 : 1]);
    const bool repeats = other < sources_.size() && sources_[other].repeated;
    if (!repeats) needs_tile(other);
    step.links.push_back({link.op, is_right, repeats, nullptr});
    step.others.push_back(other);
  }
  needs_tile(step.reads[0]);
  steps_.push_back(std::move(step));
}

// Has an input laid out in tiles, if it is not read directly; of one that is repeated a spine reads
// one element.
void BoundChain::needs_tile(std::size_t read) {
  if (read < sources_.size()) sources_[read].whole = true;
}

void BoundChain::add_steps(const Chain& chain) {
  std::vector<std::size_t> rooms;
  std::vector<bool> used;
  for (const Link& link : chain.links) {
    const auto room = static_cast<std::size_t>(link.room);
    if (rooms.size() <= room) {
      rooms.resize(room + 1, 0);
      used.resize(room + 1, false);
    }
    if (!used[room]) {  // each has values of one type
      used[room] = true;
      rooms[room] = scratch_;
      scratch_ += padded(tile_ * size_of(link.out));
    }
    tiles_.push_back(rooms[room]);
  }
  for (std::size_t index = 0; index < chain.links.size(); ++index) {
    if (const std::size_t more = followers(chain, *kernels_, index)) {
      add_spine(chain, index, index + more);
      index += more;
      continue;
    }
    const Link& link = chain.links[index];
    Step step{kernels_->find(link.op, link.in, link.out), {0, 0, 0}, link.count, tiles_[index]};
    for (int i = 0; i < link.count; ++i) {
      step.reads[i] = place_of(link.reads[i]);
      needs_tile(step.reads[i]);
    }
    steps_.push_back(std::move(step));
  }
}

// Makes one axis of neighbours through which all inputs go in equal steps.
void BoundChain::merge_axes() {
  std::vector<std::size_t> axes;  // those that are left, the last first
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

// Cuts the result into tiles: parts of a row of the last axis or, where rows are short, several.
void BoundChain::choose_ways() {
  row_ = shape_.empty() ? 1 : shape_.back();
  const std::size_t most = is_spine_ ? kLongTile : kTile;
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
