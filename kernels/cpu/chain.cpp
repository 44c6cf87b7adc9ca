#include "chain.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace allreduce {
namespace {

// Elements of a tile. Of floats, a handful of them and what is fetched for the next tile take a
// part of a level-1 cache of 32 KiB only, and stores past the caches are never far apart.
constexpr std::size_t kTile = 384;
// Of a chain that is one spine, which keeps nothing in tiles: to begin one takes 50 ns or more, as
// long as half of 384 floats.
constexpr std::size_t kLongTile = 2048;
constexpr std::size_t kLine = 64;

// A result of as many bytes goes past the caches: 4.5 instead of 5.5 ms for eight operations on 10⁷
// floats (Zen 3). What is in them is of more use, and no line has to be read before it is written.
constexpr std::size_t kStreamed = std::size_t{1} << 22;

std::size_t padded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

struct Free {
  void operator()(char* memory) const { ::operator delete(memory, std::align_val_t{kLine}); }
};

// Memory of this thread's that is kept from run to run.
char* scratch_of(std::size_t bytes) {
  thread_local std::unique_ptr<char, Free> memory;
  thread_local std::size_t size = 0;
  if (size < bytes) {
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine})));
    size = bytes;
  }
  return memory.get();
}

template <class Word>
void gather(char* to, const char* from, std::ptrdiff_t stride, std::size_t n) {
  Word* words = reinterpret_cast<Word*>(to);
  if (stride == 0) {
    Word repeated;
    std::memcpy(&repeated, from, sizeof(Word));
    std::fill_n(words, n, repeated);
    return;
  }
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(words + i, from + static_cast<std::ptrdiff_t>(i) * stride, sizeof(Word));
}

// Lays `n` elements one behind the other.
void gather(char* to, const char* from, std::ptrdiff_t stride, std::size_t n, std::size_t size) {
  if (stride == static_cast<std::ptrdiff_t>(size))
    std::memcpy(to, from, n * size);
  else if (size == 1)
    gather<std::uint8_t>(to, from, stride, n);
  else if (size == 4)
    gather<std::uint32_t>(to, from, stride, n);
  else
    gather<std::uint64_t>(to, from, stride, n);
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

namespace {

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

// Lays out the `n` elements of an input that belong to those of the result from `first` on.
void BoundChain::lay_out(char* tile, const Source& source, const char* data, std::size_t first,
                         std::size_t n) const {
  while (n) {
    std::size_t row = first / row_;
    const std::size_t column = first % row_, count = std::min(n, row_ - column);
    const char* from = data + static_cast<std::ptrdiff_t>(column) * source.strides.back();
    for (std::size_t axis = shape_.size() - 1; axis-- > 0; row /= shape_[axis])
      from += static_cast<std::ptrdiff_t>(row % shape_[axis]) * source.strides[axis];
    gather(tile, from, source.strides.back(), count, source.size);
    tile += count * source.size;
    first += count;
    n -= count;
  }
}

// Asks for a part of what the next tile reads, while this one is worked on: a processor does so by
// itself within a page only, and here it is another one in each tile.
void BoundChain::fetch_share(const char* const* operands, std::size_t index) const {
  for (const Fetched& each : fetched_) {
    const char* next = operands[each.source] + each.bytes;
    const std::size_t end = std::min(each.bytes, (index + 1) * each.share);
    for (std::size_t at = index * each.share; at < end; at += kLine) __builtin_prefetch(next + at);
  }
}

void BoundChain::run_spine(char* to, const Step& step, const char* const* operands,
                           const char* scratch, std::size_t n, bool streams) const {
  const auto found = [&](std::size_t read) {
    const std::size_t inputs = sources_.size();
    return read < inputs ? operands[read] : scratch + tiles_[read - inputs];
  };
  SpineLink links[kLongest];
  for (std::size_t i = 0; i < step.links.size(); ++i) {
    links[i] = step.links[i];
    links[i].other = found(step.others[i]);
  }
  step.spine(to, found(step.reads[0]), links, step.links.size(), n, streams);
}

void BoundChain::run_tile(char* out, const char* const* operands, char* scratch, std::size_t n,
                          bool streams) const {
  const std::size_t inputs = sources_.size();
  for (std::size_t index = 0; index < steps_.size(); ++index) {
    const Step& step = steps_[index];
    fetch_share(operands, index);
    const bool is_last = index + 1 == steps_.size();
    char* to = is_last ? out : scratch + step.tile;
    if (step.spine) {
      run_spine(to, step, operands, scratch, n, is_last && streams);
      continue;
    }
    const char* reads[kMostReads] = {nullptr, nullptr, nullptr};
    for (int i = 0; i < step.count; ++i) {
      const std::size_t read = step.reads[i];
      reads[i] = read < inputs ? operands[read] : scratch + tiles_[read - inputs];
    }
    step.kernel(to, reads[0], reads[1], reads[2], n);
  }
}

void BoundChain::run(char* out, const char* const* inputs) const {
  char* scratch = scratch_of(scratch_ + sources_.size() * sizeof(char*) + kLine);
  const char** operands = reinterpret_cast<const char**>(scratch + scratch_);
  bool streams = elements_ * out_size_ >= kStreamed;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    operands[i] = inputs[i];
    streams = streams && inputs[i] != out;  // what is read is in the caches already
    const Source& source = sources_[i];
    if (source.way == Way::once && elements_) {
      lay_out(scratch + source.tile, source, inputs[i], 0,
              source.whole ? std::min(tile_, elements_) : 1);
      operands[i] = scratch + source.tile;
    }
  }
  const bool by_rows = row_ >= tile_;
  for (std::size_t first = 0; first < elements_;) {
    std::size_t n = std::min(tile_, elements_ - first);
    if (by_rows) n = std::min(n, row_ - first % row_);
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const Source& source = sources_[i];
      if (source.way == Way::direct && (shape_.size() < 2 || !by_rows)) {
        operands[i] = inputs[i] + first * source.size;
      } else if (source.way == Way::direct) {
        std::size_t row = first / row_;
        operands[i] = inputs[i] + first % row_ * source.size;
        for (std::size_t axis = shape_.size() - 1; axis-- > 0; row /= shape_[axis])
          operands[i] += static_cast<std::ptrdiff_t>(row % shape_[axis]) * source.strides[axis];
      } else if (source.way == Way::anew) {
        lay_out(scratch + source.tile, source, inputs[i], first, n);
        operands[i] = scratch + source.tile;
      }
    }
    char* place = out + first * out_size_;
    const bool is_on_line = reinterpret_cast<std::uintptr_t>(place) % kLine == 0;
    const bool straight = streams && steps_.back().spine && is_on_line;
    char* made = streams && !straight ? scratch + steps_.back().tile : place;
    run_tile(made, operands, scratch, n, straight);
    if (made != place) kernels_->stream(place, made, n * out_size_);
    first += n;
  }
  if (streams) kernels_->fence();
}

}  // namespace allreduce
