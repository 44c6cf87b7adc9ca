#include "roll.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace allreduce {
namespace {

constexpr int kListed = 8;
constexpr char kSockets[] = "/proc/net/unix";
// Who gives up first tells why, and ends the job: mpirun drops what it has not forwarded by then.
constexpr std::chrono::milliseconds kForwarding{300}, kAfterYou{3000};
constexpr double kSlice = 0.25;  // seconds of a wait: of a longer pause no more is counted

// What a file of the kernel's holds; nothing where its process has ended, or is another user's.
std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<int> children(int pid) {
  std::vector<int> found;
  std::error_code gone;
  const std::filesystem::directory_iterator tasks("/proc/" + std::to_string(pid) + "/task", gone);
  if (gone) return found;
  for (const auto& task : tasks) {
    std::istringstream listed(contents(task.path().string() + "/children"));
    for (int child = 0; listed >> child;) found.push_back(child);
  }
  return found;
}

// The kernel's letter for what a process does; "" if it has ended.
std::string letter(int pid) {
  const std::string stat = contents("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t name_end = stat.rfind(')');
  return name_end + 2 < stat.size() ? stat.substr(name_end + 2, 1) : "";
}

// The value of a variable in the environment that a process was started with; -1 if it has none.
int number_in_environment(int pid, const std::string& variable) {
  const std::string all = '\0' + contents("/proc/" + std::to_string(pid) + "/environ");
  const std::size_t at = all.find('\0' + variable + '=');
  if (at == std::string::npos) return -1;
  const char* from = all.data() + at + variable.size() + 2;
  int number = -1;
  std::from_chars(from, all.data() + all.size(), number);
  return number;
}

}  // namespace

Roll::Roll(std::string meeting, int launcher, std::string variable, int rank, int size,
           std::map<std::string, std::string> states)
    : meeting_(std::move(meeting)),
      variable_(std::move(variable)),
      launcher_(launcher),
      rank_(rank),
      size_(size),
      states_(std::move(states)) {}

std::string Roll::late() const { return late_of(ranks(), contents(kSockets)); }

std::string Roll::report() const {
  const std::string sockets = contents(kSockets);
  const std::vector<Rank> here = ranks();
  const auto stuck = [&](int number) {
    return std::any_of(here.begin(), here.end(), [&](const Rank& rank) {
      return rank.number == number && !trouble(rank.pid).empty();
    });
  };
  // By their signs, which are known where the processes are not.
  for (int number = 0; number < rank_; ++number)
    if (has_come(number, sockets) && !stuck(number)) return "";
  return wanting();
}

std::string Roll::wanting() const {
  const std::vector<Rank> here = ranks();
  const std::string late = late_of(here, contents(kSockets));
  return late.empty() ? elsewhere(here) : late;
}

bool Roll::is_first_to_give_up() const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = meeting_ + ".over";
  std::copy_n(name.data(), std::min(name.size(), sizeof(address.sun_path) - 1),
              address.sun_path + 1);  // an abstract name, which this process has while it lives
  const int sign = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  // For any other reason than that one has, all tell, rather than nobody.
  return bind(sign, reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
         errno != EADDRINUSE;
}

std::string Roll::elsewhere(const std::vector<Rank>& here) const {
  if (here.empty()) return "other ranks";
  const int count = size_ - static_cast<int>(here.size());
  if (count == 0) return "";
  const std::string why = " (elsewhere, or ended)";
  if (count > kListed) return std::to_string(count) + " ranks" + why;
  std::string numbers;
  for (int number = 0; number < size_; ++number)
    if (std::none_of(here.begin(), here.end(),
                     [&](const Rank& rank) { return rank.number == number; }))
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(number);
  return (count == 1 ? "rank " : "ranks ") + numbers + why;
}

std::vector<Roll::Rank> Roll::ranks() const {
  std::vector<Rank> found;
  if (launcher_ == 0) return found;
  for (int pid : children(launcher_)) {
    const int number = number_in_environment(pid, variable_);
    if (number >= 0 && number < size_) found.push_back({number, pid});
  }
  std::sort(found.begin(), found.end(),
            [](const Rank& a, const Rank& b) { return a.number < b.number; });
  return found;
}

std::string Roll::late_of(const std::vector<Rank>& ranks, const std::string& sockets) const {
  std::string text;
  for (const Rank& rank : ranks) {
    std::string state = trouble(rank.pid);
    const bool came = rank.number == rank_ || has_come(rank.number, sockets);
    if (state.empty() && came) continue;
    if (state.empty()) state = "process " + std::to_string(rank.pid) + " is alive";
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank.number) + " (" + state + ")";
  }
  return text;
}

bool Roll::has_come(int number, const std::string& sockets) const {
  const std::string name = "@" + meeting_ + "." + std::to_string(number) + "\n";
  return sockets.find(name) != std::string::npos;
}

std::string Roll::trouble(int pid) const {
  // A shell, or another wrapper, lives while what it has started is stopped.
  std::vector<int> family{pid};
  for (std::size_t i = 0; i < family.size(); ++i) {
    if (const auto found = states_.find(letter(family[i])); found != states_.end())
      return "process " + std::to_string(family[i]) + " " + found->second;
    const std::vector<int> born = children(family[i]);
    family.insert(family.end(), born.begin(), born.end());
  }
  return "";
}

Vigil::Vigil(const Roll& roll, Notice late, Notice over, Remains remains)
    : roll_(roll),
      late_(std::move(late)),
      over_(std::move(over)),
      remains_(std::move(remains)),
      thread_([this] { run(); }) {}

void Vigil::end() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Vigil::lasts(double seconds) {
  std::unique_lock lock(mutex_);
  while (waited_ < seconds && !ended_) {
    const double slice = std::min(kSlice, seconds - waited_);
    changed_.wait_for(lock, std::chrono::duration<double>(slice), [this] { return ended_; });
    waited_ += slice;
  }
  return !ended_;
}

void Vigil::run() {
  const auto say = [this](const Notice& notice, const std::string& who) {
    const std::string line = notice.before + who + notice.after + "\n";
    return write(STDERR_FILENO, line.data(), line.size());
  };
  if (late_.seconds > 0) {
    if (!lasts(late_.seconds)) return;
    if (const std::string who = roll_.report(); !who.empty()) say(late_, who);
  }
  if (over_.seconds <= 0 || !lasts(over_.seconds)) return;
  if (roll_.is_first_to_give_up()) {
    const std::string who = roll_.wanting();
    say(over_, who.empty() ? "some rank" : who);
    std::this_thread::sleep_for(kForwarding);
    remove_files();
    const std::string abort = "cmd=abort exitcode=1\n";
    if (remains_.line >= 0 && write(remains_.line, abort.data(), abort.size()) > 0)
      std::this_thread::sleep_for(kAfterYou);  // to be ended, like the others
  } else {
    std::this_thread::sleep_for(kAfterYou);
  }
  _exit(1);
}

void Vigil::remove_files() const {
  std::istringstream maps(contents("/proc/self/maps"));
  for (std::string line; std::getline(maps, line);) {
    const std::size_t at = line.find('/');
    if (at == std::string::npos) continue;
    const std::string path = line.substr(at);
    for (const std::string& prefix : remains_.prefixes)
      if (path.starts_with(prefix)) unlink(path.c_str());
  }
}

}  // namespace allreduce
