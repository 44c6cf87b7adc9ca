// What an optimizer makes of sums of gradients that every member has a slice of: an all_reduce that
// has one updates values with the sums, and gives the values to all instead of the sums.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// The arrays are the caller's to keep alive, and its settings to leave alone, while a call has it.
class Update {
 public:
  virtual ~Update() = default;
  virtual Type type() const = 0;
  virtual std::uint64_t count() const = 0;
  // Whether to go on: the members are to do the same, by what they have summed up, and the samples
  // are a number. Sums are equal on all members, so that all of them go on, or none.
  virtual bool admitted() const = 0;
  // Changes `count` values by their sums; they are those from number `low` on.
  virtual void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
                     std::uint64_t count) const = 0;
  // What is kept of each value besides, an array as long as the values: apply() changes it.
  virtual std::vector<const std::byte*> slots() const { return {}; }

  std::size_t header_bytes = 0;
  // What the header has to be behind its first element, if it matters; at most as long as that.
  std::string expected;
  // Whether the sums are kept where this member's own gradients were.
  bool keeps = false;
};

// An update of values of one type. The first element of the header is the number of samples.
template <class T>
class TypedUpdate : public Update {
 public:
  Type type() const override { return sizeof(T) == 4 ? Type::float32 : Type::float64; }
  std::uint64_t count() const override { return count_; }
  bool admitted() const override {
    const T samples = *header_;
    if (!(samples >= 0 && std::isfinite(samples))) return false;
    return expected.empty() || std::memcmp(header_ + 1, expected.data(), expected.size()) == 0;
  }

 protected:
  const T* header_ = nullptr;
  std::uint64_t count_ = 0;
};

}  // namespace allreduce
