// A replay: consecutive instructions of a step, executed in one call.
//
// It is bound to arrays once. The arrays that a step is given may have another address each time;
// views of them move with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace allreduce {

using Bases = std::vector<std::uintptr_t>;

// An address: an offset from a base. Base 0 is address 0, for arrays that do not move.
struct Place {
  std::size_t base;
  std::uintptr_t offset;

  template <class T = char>
  T* in(const Bases& bases) const {
    return reinterpret_cast<T*>(bases[base] + offset);
  }
};

// One instruction. Returns whether it succeeded; if not, Python executes it and raises its error.
using Task = std::function<bool(const Bases&)>;

class Replay {
 public:
  explicit Replay(std::size_t bases) : bases_(bases + 1, 0) {}

  // `work` is the approximate number of operations.
  void add(std::size_t work, Task task) { tasks_.emplace_back(work, std::move(task)); }
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
  Bases bases_;
  std::vector<std::pair<std::size_t, Task>> tasks_;
};

}  // namespace allreduce
