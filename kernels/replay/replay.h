// A replay: what consecutive instructions of a step do, carried out in one call.
//
// It is bound to arrays once. Those that a step is given may lie elsewhere each time; what lies
// within one of them moves with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace allreduce {

// An address: bytes behind a base. Base 0 is no memory: what lies there does not move.
struct Place {
  std::size_t base;
  std::uintptr_t offset;

  char* in(const std::vector<std::uintptr_t>& bases) const {
    return reinterpret_cast<char*>(bases[base] + offset);
  }
};

class Task {
 public:
  explicit Task(std::size_t work) : work(work) {}
  virtual ~Task() = default;
  // Returns whether it could be done; else the same as a step of Python's says why not.
  virtual bool run(const std::vector<std::uintptr_t>& bases) const = 0;

  const std::size_t work;  // operations, roughly
};

class Replay {
 public:
  explicit Replay(std::size_t bases) : bases_(bases + 1, 0) {}

  void add(std::unique_ptr<Task> task) { tasks_.push_back(std::move(task)); }
  std::size_t size() const { return tasks_.size(); }
  // From here on the array of this number, from 0, is there.
  void move(std::size_t array, const void* address) {
    bases_[array + 1] = reinterpret_cast<std::uintptr_t>(address);
  }

  // Runs some tasks; returns how many of them were done. `interrupted` is asked now and then, and
  // ends it.
  std::size_t run(std::size_t first, std::size_t last,
                  const std::function<bool()>& interrupted) const;

 private:
  std::vector<std::uintptr_t> bases_;
  std::vector<std::unique_ptr<Task>> tasks_;
};

}  // namespace allreduce
