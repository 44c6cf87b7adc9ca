// Chooses how a member writes what its peers will read: ordinary or streaming stores.
//
// Which is faster depends on where the peers run, and changes when a virtual machine's processors
// are moved. Nanoseconds per 64-byte line into a chunk that the peer has read, Zen 4, the same two
// processes in one minute: 27 ordinary and 2.2 streaming while the two were on separate cores; 1.7
// and 3.4 while they shared one, where a streamed line also takes the reader 5.0 instead of 1.8.
// So each member measures its own copies as it goes. The choice is local: readers cannot tell.
#pragma once

#include <cstddef>

namespace allreduce {

class Stager {
 public:
  // Copies into shared memory. The caller's next store to an atomic publishes it.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);

 private:
  struct Way {
    double cost = 0;  // nanoseconds per byte, smoothed; 0 before the first measurement
    void learn(double measured, double other);
  };
  void schedule_trial();

  Way plain_, stream_;
  unsigned until_trial_ = 2;  // measured copies before the slower way is tried again
};

}  // namespace allreduce
