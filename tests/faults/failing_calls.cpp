#include "failing_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <mutex>
#include <optional>
#include <utility>

namespace lm::failing_calls {
namespace {

std::mutex mutex;  // guards all below
std::optional<SimFaultAt> planned;
int64_t calls = 0, met = 0;
const char* first_met = "";
std::vector<std::string> made;

int error_of(SimFault fault) {
  switch (fault) {
    case SimFault::kEnospc:
      return ENOSPC;
    case SimFault::kEintr:
      return EINTR;
    case SimFault::kEagain:
      return EAGAIN;
    default:
      return EIO;
  }
}

// The fault that this call meets. `bytes` of what it moves, 0 of calls that move none.
std::optional<SimFault> fault_of(const char* call, size_t bytes = 0) {
  const std::lock_guard lock(mutex);
  if (!planned || (planned->fault == SimFault::kShort && bytes < 2)) return std::nullopt;
  const int64_t n = calls++;
  if (n != planned->operation && !(planned->for_ever && n > planned->operation)) return std::nullopt;
  if (met++ == 0) first_met = call;
  return planned->fault;
}

// Rings wake their thread by a descriptor that is no file.
bool is_file(int descriptor) {
  struct stat info {};
  return ::fstat(descriptor, &info) == 0 && (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode));
}

// A whole number of sectors, if there are more than one.
size_t half(size_t bytes) {
  constexpr size_t kSector = 4096;
  return bytes >= 2 * kSector ? bytes / 2 / kSector * kSector : bytes / 2;
}

void note(const char* name, const std::string& path) {
  const std::lock_guard lock(mutex);
  made.push_back(std::string(name) + " " + path);
}

std::string path_of(int descriptor) {
  char path[4096];
  const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return {path, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

template <class... Arguments>
int call(const char* name, long number, Arguments... arguments) {
  if (const auto fault = fault_of(name)) {
    errno = error_of(*fault);
    return -1;
  }
  return static_cast<int>(::syscall(number, arguments...));
}

template <class... Arguments>
ssize_t move(const char* name, long number, int descriptor, const void* memory, size_t bytes,
             Arguments... at) {
  const auto fault = is_file(descriptor) ? fault_of(name, bytes) : std::nullopt;
  if (fault && *fault != SimFault::kShort) {
    errno = error_of(*fault);
    return -1;
  }
  return ::syscall(number, descriptor, memory, fault ? half(bytes) : bytes, at...);
}

}  // namespace

void plan(SimFaultAt at) {
  const std::lock_guard lock(mutex);
  planned = at;
  calls = met = 0;
  first_met = "";
  made.clear();
}

std::vector<std::string> names_made() {
  const std::lock_guard lock(mutex);
  return std::exchange(made, {});
}

int64_t stop() {
  const std::lock_guard lock(mutex);
  planned.reset();
  return met;
}

std::string first() {
  const std::lock_guard lock(mutex);
  return first_met;
}

}  // namespace lm::failing_calls

using lm::failing_calls::call;
using lm::failing_calls::move;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return call("open", SYS_openat, AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return call("openat", SYS_openat, directory, path, flags, mode);
}
int mkdir(const char* path, mode_t mode) {
  lm::failing_calls::note("mkdir", path);
  return call("mkdir", SYS_mkdir, path, mode);
}
int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  return call("fallocate", SYS_fallocate, descriptor, mode, offset, bytes);
}
int ftruncate(int descriptor, off_t bytes) noexcept {
  return call("ftruncate", SYS_ftruncate, descriptor, bytes);
}
int fsync(int descriptor) {
  lm::failing_calls::note("fsync", lm::failing_calls::path_of(descriptor));
  return call("fsync", SYS_fsync, descriptor);
}
int fdatasync(int descriptor) {
  return call("fdatasync", SYS_fdatasync, descriptor);
}
int rename(const char* from, const char* to) noexcept {
  return call("rename", SYS_rename, from, to);
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  return call("renameat2", SYS_renameat2, from_directory, from, to_directory, to, flags);
}
int unlink(const char* path) noexcept {
  return call("unlink", SYS_unlink, path);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  return call("unlinkat", SYS_unlinkat, directory, path, flags);
}
ssize_t read(int descriptor, void* memory, size_t bytes) {
  return move("read", SYS_read, descriptor, memory, bytes);
}
ssize_t pread(int descriptor, void* memory, size_t bytes, off_t offset) {
  return move("pread", SYS_pread64, descriptor, memory, bytes, offset);
}
ssize_t write(int descriptor, const void* memory, size_t bytes) {
  return move("write", SYS_write, descriptor, memory, bytes);
}
ssize_t pwrite(int descriptor, const void* memory, size_t bytes, off_t offset) {
  return move("pwrite", SYS_pwrite64, descriptor, memory, bytes, offset);
}

}  // extern "C"
