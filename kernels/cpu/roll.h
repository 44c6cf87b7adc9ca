// Which of a launcher's ranks on this host are late where all of them meet, and a watch over a wait
// for them that holds Python's lock, as MPI's first and last calls do.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace allreduce {

// A rank that has come holds an abstract Unix socket, named after the meeting and its number.
class Roll {
 public:
  // `launcher` is the process that has started the ranks, 0 where that is not known, and `variable`
  // holds a rank's number in the environment that it has given it. `states` says in words what the
  // kernel's letters mean (proc(5)) for processes that cannot go on.
  Roll(std::string meeting, int launcher, std::string variable, int rank, int size,
       std::map<std::string, std::string> states);

  // Who of this host has not come, or cannot go on; "" for nobody. They end with their processes,
  // so that who has none is not late.
  std::string late() const;
  // The same for all hosts, as far as it is known here: for people, once. "" too where a lower rank
  // has come, which is to say it.
  std::string report() const;

  // Whom this rank waits for in vain.
  std::string wanting() const;
  // Whether no other rank of this host, which still lives, has asked the same.
  bool is_first_to_give_up() const;

 private:
  struct Rank {
    int number;
    int pid;
  };
  std::vector<Rank> ranks() const;
  // The others than these, as nothing more is known of them.
  std::string elsewhere(const std::vector<Rank>& here) const;
  std::string late_of(const std::vector<Rank>& ranks, const std::string& sockets) const;
  bool has_come(int number, const std::string& sockets) const;
  // Which process of a rank's cannot go on, and how; "" for none.
  std::string trouble(int pid) const;

  const std::string meeting_, variable_;
  const int launcher_, rank_, size_;
  const std::map<std::string, std::string> states_;
};

// What is written to stderr after some seconds: `before`, who is late, `after`.
struct Notice {
  double seconds;
  std::string before, after;
};

// What is to be done before a process ends that has waited in vain.
struct Remains {
  std::vector<std::string> prefixes;  // of files that it maps: they are removed
  int line;  // to hydra, which is told to end the job (cluster/pmi.py); -1 for none
};

// A thread that needs nothing of Python's.
class Vigil {
 public:
  // Writes `late` if the wait lasts that long; after `over`, if there is one (`seconds` above 0),
  // it ends the process, and the job if it can.
  Vigil(const Roll& roll, Notice late, Notice over, Remains remains);
  ~Vigil() { end(); }
  Vigil(const Vigil&) = delete;
  Vigil& operator=(const Vigil&) = delete;

  void end();

 private:
  void run();
  void remove_files() const;
  // Whether the wait goes on so many seconds after its beginning. Those in which this process was
  // stopped do not count, as the others may have been, too: as when all of a job is.
  bool lasts(double seconds);

  const Roll roll_;
  const Notice late_, over_;
  const Remains remains_;
  double waited_ = 0.0;  // seconds
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace allreduce
