// An optimizer's update of values while gradients are reduced: an all_reduce with an update applies
// it to each member's slice of the sums, and distributes the values instead of the sums.
//
// If an update depends on all sums together, as clipping by their norm does, there are two calls:
// one sums, and a later one updates.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"

namespace allreduce {

// During a call the caller must keep the arrays alive and leave the settings unchanged.
class Update {
 public:
  virtual ~Update() = default;
  virtual Type type() const = 0;
  virtual std::uint64_t count() const = 0;
  // Whether to apply it: all members agree according to the summed header, and the number of
  // samples is finite. Sums are equal on all members, so that all of them go on, or none.
  virtual bool admitted() const = 0;
  // Changes `count` values by their sums; they are those from number `low` on.
  virtual void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
                     std::uint64_t count) const = 0;
  // State per value, an array as long as the values: apply() changes it.
  virtual std::vector<const std::byte*> slots() const { return {}; }

  std::size_t header_bytes = 0;
  // The expected header after its first element, if any; at most as long as the header.
  std::string expected;
  // Whether the sums are kept where this member's own gradients were.
  bool keeps = false;
  // What a call does; between two calls, the sums lie where they are kept.
  enum class Stage : std::uint8_t { both, sums, values } stage = Stage::both;
};

// The first of two calls.
class SumUpdate : public Update {
 public:
  SumUpdate(Type type, std::uint64_t count) : type_(type), count_(count) { stage = Stage::sums; }
  Type type() const override { return type_; }
  std::uint64_t count() const override { return count_; }
  bool admitted() const override { return true; }
  void apply(std::byte*, const std::byte*, std::uint64_t, std::uint64_t) const override {}

 private:
  Type type_;
  std::uint64_t count_;
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
