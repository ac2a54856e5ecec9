// lmlaunch-cpu of build/warm/bin: asks the server at $LM_WARM_WORKER for a rank like this process
// (server.cpp) and ends as that one ends. Without a server it becomes the real lmlaunch-cpu. Who kills this
// process kills the rank, a moment later: tests of kills and of what a process takes run the real one.
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tests/support/warm/request.h"

namespace {

using namespace lm::warm;

int connect_to(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path == nullptr || std::strlen(path) >= sizeof address.sun_path) return -1;
  std::strcpy(address.sun_path, path);
  const int out = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(out, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return out;
  close(out);
  return -1;
}

std::vector<int32_t> open_descriptors(int but) {
  std::vector<int32_t> out;
  DIR* const directory = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(directory)) {
    const int number = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && number != dirfd(directory) && number != but) out.push_back(number);
  }
  closedir(directory);
  return out;
}

uint64_t ignored_signals() {
  uint64_t out = 0;
  for (int number = 1; number < 32; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN)
      out |= uint64_t{1} << (number - 1);
  }
  return out;
}

uint64_t blocked_signals() {
  sigset_t blocked;
  sigprocmask(SIG_SETMASK, nullptr, &blocked);
  uint64_t out = 0;
  for (int number = 1; number < 32; ++number) {
    if (sigismember(&blocked, number) == 1) out |= uint64_t{1} << (number - 1);
  }
  return out;
}

[[noreturn]] void end_as(int status) {
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  const rlimit none{};
  setrlimit(RLIMIT_CORE, &none);
  signal(WTERMSIG(status), SIG_DFL);
  raise(WTERMSIG(status));
  _exit(128 + WTERMSIG(status));
}

}  // namespace

int main(int argc, char** argv) {
  const int server = connect_to(std::getenv("LM_WARM_WORKER"));
  if (server >= 0) {
    Request request;
    request.arguments.assign(argv, argv + argc);
    for (char** entry = environ; *entry != nullptr; ++entry) request.environment.emplace_back(*entry);
    request.directory = std::filesystem::current_path();
    request.ignored_signals = ignored_signals();
    request.blocked_signals = blocked_signals();
    request.umask = umask(0);
    umask(request.umask);
    request.numbers = open_descriptors(server);
    request.descriptors.assign(request.numbers.begin(), request.numbers.end());
    Ended ended;
    if (request.numbers.size() <= kMostDescriptors && send_request(server, request)) {
      // Nobody else may think that this process holds the run's lock.
      for (const int number : request.numbers) {
        if (number > 2) close(number);
      }
      if (move_all(server, &ended, sizeof ended, false)) end_as(ended.status);
      std::fprintf(stderr, "warm rank: the server has ended\n");
      return 70;
    }
  }
  const std::string real =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "../../bin/lmlaunch-cpu";
  execv(real.c_str(), argv);
  std::perror(real.c_str());
  return 127;
}
