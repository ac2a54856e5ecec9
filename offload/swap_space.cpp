#include "offload/swap_space.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "base/bytes.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

constexpr int64_t kLeastAlignment = 4096;  // a page; sectors are 512 or 4096 bytes
// Below this a piece costs more in requests than a second disk gains.
constexpr int64_t kSmallPiece = 256 * kKiB;

int64_t free_bytes(const std::string& directory) {
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

[[noreturn]] void fail_full(int error, const std::string& directory, int64_t needed) {
  const int64_t free = free_bytes(directory);
  std::string what = fmt::format("offload files need {} ({} bytes), ", format_bytes(needed), needed);
  if (error == EFBIG) {
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    what += "the process's file size limit is " + format_bytes(static_cast<int64_t>(limit.rlim_cur));
  } else {
    what += fmt::format("{} ({} bytes) are free", format_bytes(free), free);
  }
  throw disk_error(error, what, directory);
}

[[noreturn]] void fail_limits(int64_t needed, const std::vector<SwapPath>& paths) {
  std::string limits;
  for (const SwapPath& path : paths)
    limits += (limits.empty() ? "" : ", ") + format_bytes(path.limit) + " in " + path.directory;
  throw Error(Exit::kNoSpace,
              {.area = "IO-02",
               .what = "offload files need " + format_bytes(needed) + ", and may take no more than " + limits,
               .place = "offload.paths",
               .next = "raise offload.disk_limit, free space, or name another directory in offload.paths"});
}

[[noreturn]] void fail_path(int error, const std::string& directory) {
  throw Error(Exit::kDoesNotFit, {.area = "IO-19",
                                  .what = "cannot keep offload files here: " + errno_text(error),
                                  .place = directory,
                                  .next = "name existing, writable directories in offload.paths"});
}

// An anonymous file: it never has a name, so nothing can be left behind. O_EXCL: nor can it be given one.
int open_anonymous(const std::string& directory, int flags) {
  return ::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC | flags, 0600);
}

constexpr int kTries = 30;  // of a call that a signal interrupts

// Reserves space by writing zeros, for file systems without fallocate.
int write_zeros(int descriptor, int64_t bytes) {
  constexpr int64_t kStep = 4 * kMiB;
  const std::unique_ptr<void, decltype(&std::free)> zeros(std::aligned_alloc(kLeastAlignment, kStep),
                                                          &std::free);
  if (zeros == nullptr) return ENOMEM;
  std::memset(zeros.get(), 0, kStep);
  int interruptions = 0;  // since something was written
  for (int64_t offset = 0; offset < bytes;) {
    const ssize_t written =
        ::pwrite(descriptor, zeros.get(), static_cast<size_t>(std::min(kStep, bytes - offset)), offset);
    if (written < 0 && errno == EINTR && ++interruptions < kTries) continue;
    if (written <= 0) return written == 0 ? EIO : errno;
    offset += written;
    interruptions = 0;
  }
  return 0;
}

int reserve_bytes(int descriptor, int64_t bytes) {
  // fallocate would answer with SIGXFSZ, which ends the process
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(bytes)) return EFBIG;
  int status = 0;
  for (int i = 0; i < kTries; ++i) {
    status = ::fallocate(descriptor, 0, 0, bytes);
    if (status == 0 || errno != EINTR) break;
  }
  if (status == 0) return 0;
  return errno == EOPNOTSUPP || errno == ENOSYS ? write_zeros(descriptor, bytes) : errno;
}

// The file system's alignment for direct I/O; sets `*refused` if it reports that it has none.
int64_t direct_alignment(int descriptor, bool* refused) {
  *refused = false;
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0) {
    *refused = info.stx_dio_offset_align == 0;
    return std::max<int64_t>({kLeastAlignment, info.stx_dio_mem_align, info.stx_dio_offset_align});
  }
#endif
  return kLeastAlignment;
}

}  // namespace

Extent slice(const Extent& extent, int64_t begin, int64_t bytes) {
  LM_CHECK(begin >= 0 && bytes >= 0 && begin + bytes <= extent.bytes, "a slice beyond its extent");
  Extent out;
  int64_t before = 0;
  for (const ExtentPiece& piece : extent.pieces) {
    const int64_t from = std::max(begin, before), to = std::min(begin + bytes, before + piece.bytes);
    if (from < to) out.pieces.push_back({piece.file, piece.offset + from - before, to - from});
    before += piece.bytes;
  }
  out.bytes = bytes;
  return out;
}

SwapSpace::SwapSpace(const std::vector<SwapPath>& paths, int64_t bytes, int64_t spare) {
  LM_CHECK(!paths.empty() && bytes >= 0 && spare >= 0, "swap space without a path");
  for (const SwapPath& path : paths)
    LM_CHECK(path.weight > 0, "the weight of " + path.directory + " is not positive");
  try {
    for (const SwapPath& path : paths) open_file(path);
    capacity_ = round_up(bytes, alignment_);
    share_out(paths);
    for (size_t i = 0; i < parts_.size(); ++i) {
      reserve(static_cast<int>(i));
      try_direct(static_cast<int>(i));
      reserve_spare(static_cast<int>(i), round_up(spare, alignment_), paths[i].limit);
    }
  } catch (...) {
    for (const IoFile& file : files_) ::close(file.descriptor);
    throw;
  }
}

SwapSpace::~SwapSpace() {
  for (const IoFile& file : files_) ::close(file.descriptor);
}

void SwapSpace::share_out(const std::vector<SwapPath>& paths) {
  std::vector<size_t> order(paths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // In the order in which the paths fill up: what exceeds a path's limit raises the shares of the others.
  const auto filled = [&](size_t i) { return static_cast<double>(paths[i].limit) / paths[i].weight; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return filled(a) < filled(b); });
  double weights = 0;
  for (const SwapPath& path : paths) weights += path.weight;
  int64_t left = capacity_;
  for (const size_t i : order) {
    const auto share = static_cast<int64_t>(static_cast<double>(left) * paths[i].weight / weights);
    const int64_t wanted = i == order.back() ? left : std::min(left, round_up(share, alignment_));
    parts_[i].bytes = files_[i].bytes = std::min(wanted, paths[i].limit / alignment_ * alignment_);
    left -= parts_[i].bytes;
    weights -= paths[i].weight;
  }
  if (left > 0) fail_limits(capacity_, paths);
  const auto all = static_cast<double>(std::max<int64_t>(capacity_, 1));
  for (size_t i = 0; i < paths.size(); ++i) parts_[i].share = static_cast<double>(parts_[i].bytes) / all;
}

void SwapSpace::open_file(const SwapPath& path) {
  struct stat info {};
  if (::stat(path.directory.c_str(), &info) != 0) fail_path(errno, path.directory);
  if (!S_ISDIR(info.st_mode)) fail_path(ENOTDIR, path.directory);
  File part;
  part.directory = path.directory;
  int descriptor = open_anonymous(path.directory, O_DIRECT);
  if (descriptor < 0 && errno == EINVAL) {
    part.refusal = "the file system refuses O_DIRECT (EINVAL)";
    descriptor = open_anonymous(path.directory, 0);
  }
  if (descriptor < 0) {
    const int error = errno;
    if (error == EACCES || error == EROFS || error == EPERM || error == ENOENT)
      fail_path(error, path.directory);
    if (is_no_space(error)) fail_full(error, path.directory, 0);
    throw disk_error(error == EISDIR ? EOPNOTSUPP : error,
                     "this file system has no anonymous files (O_TMPFILE)", path.directory);
  }
  bool refused = false;
  alignment_ = std::max(alignment_, direct_alignment(descriptor, &refused));
  if (refused && part.refusal.empty()) {
    part.refusal = "the file system has no direct transfers (STATX_DIOALIGN is 0)";
    ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) & ~O_DIRECT);
  }
  files_.push_back({descriptor, 0});
  parts_.push_back(std::move(part));
}

void SwapSpace::reserve(int index) {
  const IoFile& file = files_[static_cast<size_t>(index)];
  const std::string& directory = path(index);
  if (file.bytes == 0) return;
  // Checked first, as a failing fallocate fills the disk for a moment.
  const int64_t free = free_bytes(directory);
  if (free >= 0 && free < file.bytes) fail_full(ENOSPC, directory, file.bytes);
  const int error = reserve_bytes(file.descriptor, file.bytes);
  if (is_no_space(error)) fail_full(error, directory, file.bytes);
  if (error != 0) throw disk_error(error, "cannot reserve " + format_bytes(file.bytes), directory);
}

// Optional: without it a run fails only if a write does, and other processes need disk space, too.
void SwapSpace::reserve_spare(int index, int64_t bytes, int64_t limit) {
  IoFile& file = files_[static_cast<size_t>(index)];
  File& part = parts_[static_cast<size_t>(index)];
  if (bytes == 0 || file.bytes == 0 || bytes > limit - file.bytes || bytes > free_bytes(part.directory) / 4)
    return;
  if (reserve_bytes(file.descriptor, file.bytes + bytes) != 0) return;
  file.bytes += bytes;
  part.spare = bytes;
}

std::optional<ExtentPiece> SwapSpace::spare(int failed, int64_t bytes) {
  const int count = static_cast<int>(files_.size());
  for (int step = 1; step <= count; ++step) {  // the failed one last
    const int index = (failed + step) % count;
    File& part = parts_[static_cast<size_t>(index)];
    if (bytes > part.spare - part.spare_used) continue;
    return ExtentPiece{index, part.bytes + std::exchange(part.spare_used, part.spare_used + bytes), bytes};
  }
  return std::nullopt;
}

// Some file systems accept the flag and refuse the transfers.
void SwapSpace::try_direct(int index) {
  const IoFile& file = files_[static_cast<size_t>(index)];
  File& part = parts_[static_cast<size_t>(index)];
  if (file.bytes == 0 || !part.refusal.empty()) return;
  const auto bytes = static_cast<size_t>(alignment_);
  const std::unique_ptr<void, decltype(&std::free)> zeros(std::aligned_alloc(bytes, bytes), &std::free);
  LM_CHECK(zeros != nullptr, "no memory for a trial write");
  std::memset(zeros.get(), 0, bytes);
  ssize_t written = 0;
  for (int i = 0; i < kTries; ++i) {
    written = ::pwrite(file.descriptor, zeros.get(), bytes, 0);
    if (written >= 0 || errno != EINTR) break;
  }
  if (written == alignment_) return;
  const int error = written < 0 ? errno : EIO;
  if (error != EINVAL) throw disk_error(error, "trial write", part.directory);
  part.refusal = fmt::format("a direct write of {} bytes is refused (EINVAL)", alignment_);
  ::fcntl(file.descriptor, F_SETFL, ::fcntl(file.descriptor, F_GETFL) & ~O_DIRECT);
}

// Dirty pages would stay in the cache, and so would a part of a large page.
void SwapSpace::drop_cached(const Extent& extent) const {
  for (const ExtentPiece& piece : extent.pieces) {
    const int descriptor = files_[static_cast<size_t>(piece.file)].descriptor;
    constexpr unsigned kOut =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    constexpr int64_t kLargePage = 2 * kMiB;
    const int64_t first = piece.offset / kLargePage * kLargePage,
                  bytes = round_up(piece.offset + piece.bytes, kLargePage) - first;
    ::sync_file_range(descriptor, first, bytes, kOut);
    ::posix_fadvise(descriptor, first, bytes, POSIX_FADV_DONTNEED);
  }
}

int64_t SwapSpace::room(int index) const {
  const File& part = parts_[static_cast<size_t>(index)];
  return part.bytes - part.used;
}

double SwapSpace::behind(int index, int64_t total) const {
  const File& part = parts_[static_cast<size_t>(index)];
  return static_cast<double>(total) * part.share - static_cast<double>(part.used);
}

void SwapSpace::take(int index, int64_t bytes, Extent& extent) {
  if (bytes == 0) return;
  File& part = parts_[static_cast<size_t>(index)];
  ExtentPiece* last = extent.pieces.empty() ? nullptr : &extent.pieces.back();
  if (last != nullptr && last->file == index && last->offset + last->bytes == part.used) {
    last->bytes += bytes;
  } else {
    extent.pieces.push_back({index, part.used, bytes});
  }
  part.used += bytes;
  allocated_ += bytes;
  extent.bytes += bytes;
}

Extent SwapSpace::allocate(int64_t bytes) {
  LM_CHECK(bytes >= 0, "a negative extent");
  const int64_t wanted = padded(bytes);
  LM_CHECK(wanted <= capacity_ - allocated_,
           fmt::format("swap space of {} bytes has {} left and got a request for {}", capacity_,
                       capacity_ - allocated_, wanted));
  const int count = static_cast<int>(files_.size());
  const int64_t total = allocated_ + wanted;
  Extent extent;
  // Large: every path contributes up to its share, in steps of the alignment.
  if (wanted >= kSmallPiece * count) {
    for (int i = 0; i < count; ++i) {
      const auto lag = static_cast<int64_t>(std::max(behind(i, total), 0.0));
      take(i, std::min({lag / alignment_ * alignment_, room(i), wanted - extent.bytes}), extent);
    }
  }
  // Small, or the remainder of rounding: to the path furthest below its share that has room.
  while (extent.bytes < wanted) {
    int best = -1;
    for (int i = 0; i < count; ++i) {
      if (room(i) > 0 && (best < 0 || behind(i, total) > behind(best, total))) best = i;
    }
    LM_CHECK(best >= 0, "the files' room is less than the space's");
    take(best, std::min(room(best), wanted - extent.bytes), extent);
  }
  return extent;
}

int64_t SwapSpace::padded(int64_t bytes) const {
  return round_up(bytes, alignment_);
}

int64_t SwapSpace::alignment() const {
  return alignment_;
}

const std::vector<IoFile>& SwapSpace::files() const {
  return files_;
}

const std::string& SwapSpace::path(int index) const {
  return parts_.at(static_cast<size_t>(index)).directory;
}

bool SwapSpace::direct(int index, std::string* reason) const {
  const std::string& refusal = parts_.at(static_cast<size_t>(index)).refusal;
  if (reason != nullptr) *reason = refusal;
  return refusal.empty();
}

}  // namespace lm
