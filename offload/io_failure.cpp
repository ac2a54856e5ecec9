#include "offload/io_failure.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace lm {
namespace {

// The advice of an error: how to repair the disk, and what else to use.
struct Cure {
  const char* next;
  const char* otherwise = "choose other offload.paths";
};

Cure cure_of(int error) {
  if (error == EFBIG) return {"raise the file size limit (ulimit -f)"};
  if (is_no_space(error)) return {"free space there", "name another directory in offload.paths"};
  if (error == EINVAL)
    return {"the disk refused the alignment or the flags: try io.engine = \"threads\"", ""};
  if (error == EAGAIN) return {"the kernel stayed out of resources: lower io.depth", "try again"};
  if (error == EROFS) {
    return {"see in the kernel's log (dmesg) why that file system is read-only and make it writable again"};
  }
  return {"look for errors of that disk in the kernel's log (dmesg)"};
}

}  // namespace

std::string errno_name(int error) {
  const char* name = ::strerrorname_np(error);
  return name != nullptr ? name : fmt::format("errno {}", error);
}

std::string errno_text(int error) {
  return errno_name(error) + ": " + std::system_category().message(error);
}

bool is_no_space(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG;
}

std::string device_of(int descriptor) {
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) return "an unknown device";
  return fmt::format("device {}:{}", major(info.st_dev), minor(info.st_dev));
}

Error disk_error(int error, const std::string& what, const std::string& place) {
  const bool full = is_no_space(error);
  const Cure cure = cure_of(error);
  return Error(full ? Exit::kNoSpace : Exit::kIo, {.area = full ? "IO-02" : "IO-03",
                                                   .what = what + ": " + errno_text(error),
                                                   .place = place,
                                                   .next = cure.next,
                                                   .otherwise = cure.otherwise});
}

}  // namespace lm
