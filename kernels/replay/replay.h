// A replay: consecutive instructions of a step, executed in one call.
//
// It is bound to arrays once. The arrays that a step is given may have another address each time;
// views of them move with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace allreduce {

// An address: an offset from a base. Base 0 is address 0, for arrays that do not move.
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
  // Returns whether it succeeded; if not, Python executes the instruction and raises its error.
  virtual bool run(const std::vector<std::uintptr_t>& bases) const = 0;

  const std::size_t work;  // approximate number of operations
};

class Replay {
 public:
  explicit Replay(std::size_t bases) : bases_(bases + 1, 0) {}

  void add(std::unique_ptr<Task> task) { tasks_.push_back(std::move(task)); }
  std::size_t size() const { return tasks_.size(); }
  // Sets the address of the array with this number, from 0.
  void move(std::size_t array, const void* address) {
    bases_[array + 1] = reinterpret_cast<std::uintptr_t>(address);
  }

  // Runs the tasks [first, last); returns how many were done. `interrupted` is polled between tasks
  // and stops the run.
  std::size_t run(std::size_t first, std::size_t last,
                  const std::function<bool()>& interrupted) const;

 private:
  std::vector<std::uintptr_t> bases_;
  std::vector<std::unique_ptr<Task>> tasks_;
};

}  // namespace allreduce
