// Ranks that have loaded LibTorch already: loading it takes half a second of a core, and the end-to-end tests
// start some hundred ranks whose subject is not the process. The server has loaded it and forks a child for
// each that rank.cpp asks for, with that process's arguments, environment, directory, descriptors and
// signals.
//
// Usage: warm_worker_server SOCKET   until it is killed, or its parent ends
//
// It has computed nothing when it forks: a child of a process with ATen's threads would wait for them for
// ever.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <string>

#include "tests/support/warm/request.h"

int worker_main(int argc, char** argv);  // launcher/worker/worker_main.cpp

// In place of libc's: a sync writes out what every other entry has written, too, and the suite waits for
// disks longer than it computes. What a run has synced matters to tests of kills and of power cuts, and those
// start the program itself.
extern "C" int fsync(int) {
  return 0;
}
extern "C" int fdatasync(int) {
  return 0;
}

namespace {

using namespace lm::warm;

struct Child {
  pid_t pid = 0;
  int ended = -1;  // pidfd
  int asker = -1;  // its socket: readable when it is gone
};

// Each descriptor under its number, and no other.
void take_descriptors(const Request& request) {
  int above = 2;
  for (const int32_t number : request.numbers) above = std::max(above, number);
  std::vector<int> parked;
  for (const int descriptor : request.descriptors)
    parked.push_back(fcntl(descriptor, F_DUPFD_CLOEXEC, above + 1));
  for (size_t i = 0; i < parked.size(); ++i) dup2(parked[i], request.numbers[i]);
  std::vector<int32_t> numbers = request.numbers;
  std::sort(numbers.begin(), numbers.end());
  unsigned from = 0;
  for (const int32_t number : numbers) {
    if (static_cast<unsigned>(number) > from) close_range(from, static_cast<unsigned>(number) - 1, 0);
    from = static_cast<unsigned>(number) + 1;
  }
  close_range(from, ~0U, 0);
}

void take_signals(const Request& request) {
  for (int number = 1; number < 32; ++number) {
    if (number != SIGKILL && number != SIGSTOP)
      signal(number, (request.ignored_signals >> (number - 1) & 1) != 0 ? SIG_IGN : SIG_DFL);
  }
  sigset_t blocked;
  sigemptyset(&blocked);
  for (int number = 1; number < 32; ++number) {
    if ((request.blocked_signals >> (number - 1) & 1) != 0) sigaddset(&blocked, number);
  }
  sigprocmask(SIG_SETMASK, &blocked, nullptr);
}

// What a rank here measures of its memory is no measure for a real one, so their caches are apart.
std::string own_cache;

[[noreturn]] void run_child(Request& request) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setsid();
  take_descriptors(request);
  take_signals(request);
  umask(request.umask);
  clearenv();
  for (std::string& entry : request.environment) putenv(entry.data());
  setenv("XDG_CACHE_HOME", own_cache.c_str(), 0);
  if (chdir(request.directory.c_str()) != 0) std::perror(request.directory.c_str());
  std::vector<char*> argv;
  for (std::string& argument : request.arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  _exit(worker_main(static_cast<int>(request.arguments.size()), argv.data()));
}

void accept_one(int listener, std::list<Child>& children) {
  const int asker = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (asker < 0) return;
  Request request;
  const bool whole = receive_request(asker, request);
  const pid_t pid = whole ? fork() : -1;
  if (pid == 0) run_child(request);
  for (const int descriptor : request.descriptors) close(descriptor);
  if (pid < 0) {
    close(asker);
    return;
  }
  children.push_back({pid, static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), asker});
}

void end(const Child& child) {
  Ended ended;
  waitpid(child.pid, &ended.status, 0);
  move_all(child.asker, &ended, sizeof ended, true);
  close(child.ended);
  close(child.asker);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener, 64) != 0) {
    std::perror(argv[1]);
    return 1;
  }
  own_cache = std::string(argv[1]) + ".cache";
  std::list<Child> children;
  while (true) {
    std::vector<pollfd> watched = {{listener, POLLIN, 0}};
    for (const Child& child : children) {
      watched.push_back({child.ended, POLLIN, 0});
      watched.push_back({child.asker, POLLIN, 0});
    }
    if (poll(watched.data(), watched.size(), -1) < 0) continue;
    size_t at = 1;
    for (auto child = children.begin(); child != children.end(); at += 2) {
      if (watched[at].revents == 0 && watched[at + 1].revents != 0)
        kill(child->pid, SIGKILL);  // nobody waits for it
      if (watched[at].revents == 0 && watched[at + 1].revents == 0) {
        ++child;
        continue;
      }
      end(*child);
      child = children.erase(child);
    }
    if (watched[0].revents != 0) accept_one(listener, children);
  }
}
