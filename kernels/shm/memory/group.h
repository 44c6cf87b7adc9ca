// One process's view of a communicator: the mapped control region, the symmetric regions, and the
// sockets whose end of file tells that another process died.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/choices.h"
#include "shm/memory/region.h"
#include "shm/progress/protocol.h"

namespace allreduce {

class Group {
 public:
  // `fd`: the allocated control file, or negative if all members are threads of this process.
  // `cores`: how many cores the members share. Throws std::system_error if the system has no room.
  Group(int fd, int members, int cores, Choices choices);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int members() const { return members_; }
  bool oversubscribed() const { return oversubscribed_; }
  const Control& control() const { return control_; }
  const Choices& choices() const { return choices_; }

  // Watches the socket to another process, where these members live; the caller closes it, after
  // drop_peers(). Before any member of this process is made.
  void add_peer(int fd, int pid, std::vector<int> members);
  // The process of a member; 0 is this one.
  int process_of(int member) const { return processes_[static_cast<std::size_t>(member)]; }
  bool has_processes() const { return has_processes_; }
  // Guards a read of another member's private array; false if that member has ended and may have
  // freed it.
  bool begin_read(int member);
  void end_read(int member);
  // Ends a member's part in all calls, and waits until no thread reads its arrays: a step at most.
  void end_member(int member);
  // Whether a member has ended before it completed call `seq`.
  bool ended_before(int member, std::uint64_t seq) const;
  // Whether a member died, as far as this process has seen, before it completed call `seq`.
  bool lost_before(int member, std::uint64_t seq) const;
  // Surrounds a step in which a thread of this process stores into the symmetric memory of all
  // members; false if one of this process has ended before it completed the call, and may have
  // taken its arrays back.
  bool begin_store(std::uint64_t seq);
  void end_store();
  // Waits until no thread of this process is in such a step, after end_member(): a step at most.
  void await_stores() const;
  // Blames a member of any process that is gone without having left.
  void check_peers(int observer, std::uint64_t seq);
  // Whether a member of any process has left in good order.
  bool some_left() const;
  // Blames a member that left in good order before it completed call `seq`.
  void check_left(int observer, std::uint64_t seq);
  void drop_peers();
  // Whether this process inherited the group by fork: it is its parent's, and must not be touched.
  bool inherited() const;

  // Maps a symmetric region, which `users` local members will claim; throws as the constructor.
  void map_region(std::uint32_t id, int fd, std::size_t part_bytes, int users);
  // Hands the region to one of its users. From the last claim on it lives as long as its arrays.
  std::shared_ptr<SymmetricRegion> claim_region(std::uint32_t id);
  // The region whose part of `member` holds the bytes, or null.
  std::shared_ptr<SymmetricRegion> find_region(int member, const std::byte* pointer,
                                               std::size_t bytes);
  // The region of this id, or null if nothing here uses it any more.
  std::shared_ptr<SymmetricRegion> find_region(std::uint32_t id);
  // Unmaps a region that another process could not map.
  void release_region(std::uint32_t id);

  // Stores a word that others wait for, and wakes sleepers.
  void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) {
    // Pairs with the re-check in sleep(): either this thread sees the sleeper, or the sleeper sees
    // the word.
    word.store(value, std::memory_order_seq_cst);
    if (control_.header().sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }
  void wake();
  // Sleeps until the next publish, at most `microseconds`, unless `ready()` holds.
  template <class Ready>
  void sleep(int microseconds, Ready&& ready) {
    Header& header = control_.header();
    header.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = header.wakes.load(std::memory_order_seq_cst);
    if (!ready()) wait_for_wake(seen, microseconds);
    header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Sequentially consistent: pairs with the exchange in blame(), after a member has stored that it
  // is done with another member's array (step_cross_process()).
  std::uint64_t culprit_word() const {
    return control_.header().culprit.load(std::memory_order_seq_cst);
  }
  Culprit culprit() const {
    Culprit packed = Culprit::unpack(culprit_word());
    for (int* member : {&packed.member, &packed.observer})
      *member = std::min(*member, members_ - 1);
    return packed.near(control_.state(packed.observer).done.value.load(std::memory_order_acquire));
  }
  // Declares the communicator dead; only the first culprit counts.
  void blame(const Culprit& culprit);

 private:
  struct Peer {
    int fd;
    std::vector<int> members;
  };
  struct Unclaimed {
    std::shared_ptr<SymmetricRegion> region;
    int users;
  };
  void wait_for_wake(std::uint32_t seen, int microseconds);

  const int members_;
  const bool oversubscribed_;
  const Choices choices_;
  const std::uint32_t fork_generation_;
  const Region region_;
  const Control control_;
  std::vector<int> processes_;  // of each member
  bool has_processes_ = false;
  std::vector<std::atomic<int>> readers_;  // threads of this process, of each member's arrays
  std::vector<std::atomic<bool>> lost_;    // members that are known to have died
  std::atomic<int> stores_{0};  // threads of this process in a step that stores everywhere
  std::mutex peers_mutex_;
  std::vector<Peer> peers_;
  std::atomic<int> region_count_{0};
  std::mutex regions_mutex_;
  std::vector<std::weak_ptr<SymmetricRegion>> regions_;
  std::vector<Unclaimed> unclaimed_;
};

}  // namespace allreduce
