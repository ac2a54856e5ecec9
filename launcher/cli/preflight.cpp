#include "launcher/cli/preflight.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

// A run has some 30 files open (libraries, logs, data workers, disks), a GPU's driver as many again.
constexpr rlim_t kLeastDescriptors = 64, kEnoughDescriptors = 4096;

[[noreturn]] void refuse(const char* call, int error, const std::string& path) {
  throw Error(Exit::kDoesNotFit,
              {.area = "RUN-33",
               .what = std::string("run.dir cannot be used: ") + call + " is refused: " + errno_text(error),
               .place = path,
               .next = "set run.dir to a directory in which files can be written, renamed "
                       "and removed",
               .kept = "nothing was loaded or trained"});
}

}  // namespace

void try_run_directory(const std::string& directory) {
  const std::string first = directory + "/.preflight.tmp", second = directory + "/.preflight";
  const int fd = open(first.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) refuse("open", errno, first);
  constexpr std::array<char, 4096> kPage{};
  const char* call = nullptr;
  errno = ENOSPC;  // for a short write
  if (write(fd, kPage.data(), kPage.size()) != std::ssize(kPage)) {
    call = "write";
  } else if (fsync(fd) != 0) {
    call = "fsync";
  } else if (rename(first.c_str(), second.c_str()) != 0) {
    call = "rename";
  }
  int error = errno;
  close(fd);
  const std::string& left = call == nullptr ? second : first;
  if (unlink(left.c_str()) != 0 && call == nullptr) {
    call = "unlink";
    error = errno;
  }
  if (call != nullptr) refuse(call, error, left);
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min(limit.rlim_max, kEnoughDescriptors);
  if (limit.rlim_cur < wanted) {
    const rlimit raised{wanted, limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit.rlim_cur = wanted;
  }
  if (limit.rlim_cur >= kLeastDescriptors) return;
  throw Error(Exit::kDoesNotFit,
              {.area = "RUN-33",
               .what = fmt::format("this process may have {} files open (RLIMIT_NOFILE), a run needs {}",
                                   limit.rlim_cur, kLeastDescriptors),
               .place = "",
               .next = "raise the limit (ulimit -n)",
               .kept = "nothing was started or written"});
}

}  // namespace lm
