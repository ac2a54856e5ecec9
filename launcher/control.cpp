#include "launcher/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

constexpr uint64_t kMagic = 0x326c72746e6f636cULL;  // "lcontrl2": layout version 2

struct Slot {
  int64_t step, repeat;
  char checkpoint[4096];  // PATH_MAX
  char reason[256];
  int32_t exit_code;
};

void copy_text(char* to, size_t size, const std::string& from) {
  const size_t n = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), n);
  to[n] = 0;
}

Error system_error(const char* what) {
  return Error(
      Exit::kInternal,
      {.area = "BUG-70", .what = std::string(what) + ": " + std::strerror(errno), .place = "", .next = ""});
}

}  // namespace

struct Control::Region {
  uint64_t magic;
  std::atomic<int32_t> stop_requests;
  std::atomic<int32_t> first_signal;
  std::atomic<uint64_t> records;  // published so far; the newest lies in slots[records % 2]
  Slot slots[2];
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free);
};

Control Control::create() {
  const int fd = memfd_create("lmlaunch-control", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Region)) != 0) throw system_error("memfd for the rank's control region");
  void* address = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw system_error("mapping the rank's control region");
  auto* region = new (address) Region{};
  region->magic = kMagic;
  return Control(fd, region);
}

Control Control::attach(int fd) {
  struct stat info {};
  const bool fits = fstat(fd, &info) == 0 && info.st_size == static_cast<off_t>(sizeof(Region));
  void* address =
      fits ? mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  LM_CHECK(address != MAP_FAILED, "--control-fd is not a control region of this version");
  fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for data workers
  auto* region = static_cast<Region*>(address);
  LM_CHECK(region->magic == kMagic, "--control-fd is not a control region of this version");
  return Control(fd, region);
}

Control::Control(Control&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), region_(std::exchange(other.region_, nullptr)) {}

Control::~Control() {
  if (region_ != nullptr) munmap(region_, sizeof(Region));
  if (fd_ >= 0) close(fd_);
}

void Control::request_stop(int signal) {
  int32_t none = 0;
  region_->first_signal.compare_exchange_strong(none, signal);
  region_->stop_requests.fetch_add(1, std::memory_order_release);
}

int Control::stop_requests() const {
  return region_->stop_requests.load(std::memory_order_acquire);
}
int Control::first_signal() const {
  return region_->first_signal.load();
}

void Control::publish(const RankRecord& record) {
  const uint64_t next = region_->records.load(std::memory_order_relaxed) + 1;
  Slot& slot = region_->slots[next % 2];
  slot.step = record.step;
  slot.repeat = record.repeat;
  copy_text(slot.checkpoint, sizeof slot.checkpoint, record.checkpoint);
  copy_text(slot.reason, sizeof slot.reason, record.reason);
  slot.exit_code = record.exit_code;
  region_->records.store(next, std::memory_order_release);
}

RankRecord Control::latest() const {
  const uint64_t records = region_->records.load(std::memory_order_acquire);
  if (records == 0) return {};
  const Slot& slot = region_->slots[records % 2];
  return {slot.step, slot.repeat,
          std::string(slot.checkpoint, strnlen(slot.checkpoint, sizeof slot.checkpoint)),
          std::string(slot.reason, strnlen(slot.reason, sizeof slot.reason)), slot.exit_code};
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : std::string("SIG") + name;
}

}  // namespace lm
