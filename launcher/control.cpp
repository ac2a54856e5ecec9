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

constexpr uint64_t kMagic = 0x336c72746e6f636cULL;  // "lcontrl3": layout version 3

// A record as it is stored in the region.
struct Text {
  int64_t step, repeat, exit_code;
  char checkpoint[4096];  // PATH_MAX
  char reason[256];
};
constexpr size_t kWords = sizeof(Text) / sizeof(uint64_t);
static_assert(sizeof(Text) % sizeof(uint64_t) == 0);

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

// A record and its version, which is odd while the record is written.
struct Control::Slot {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> words[kWords];
};

struct Control::Region {
  uint64_t magic;
  std::atomic<int32_t> stop_requests;
  std::atomic<int32_t> first_signal;
  std::atomic<uint64_t> records;  // published so far; the newest lies in slots[records % 2]
  Slot slots[2];
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free);
};

Control Control::create() {
  Control control(memfd_create("lmlaunch-control", MFD_CLOEXEC));
  if (control.fd_ < 0 || ftruncate(control.fd_, sizeof(Region)) != 0)
    throw system_error("memfd for the rank's control region");
  void* address = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, control.fd_, 0);
  if (address == MAP_FAILED) throw system_error("mapping the rank's control region");
  control.region_ = new (address) Region{};
  control.region_->magic = kMagic;
  return control;
}

Control Control::attach(int fd) {
  Control control(fd);
  struct stat info {};
  const bool fits = fstat(fd, &info) == 0 && info.st_size == static_cast<off_t>(sizeof(Region));
  void* address =
      fits ? mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  LM_CHECK(address != MAP_FAILED, "--control-fd is not a control region of this version");
  control.region_ = static_cast<Region*>(address);
  fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for data workers
  LM_CHECK(control.region_->magic == kMagic, "--control-fd is not a control region of this version");
  return control;
}

Control::Control(Control&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      region_(std::exchange(other.region_, nullptr)),
      writing_(std::move(other.writing_)) {}

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

void Control::publish(const WorkerRecord& record) {
  const std::lock_guard lock(*writing_);
  WorkerRecord next = record;
  if (const int ends = latest().exit_code; ends >= 0) next.exit_code = ends;
  write(next);
}

void Control::publish_end(int exit_code) {
  const std::lock_guard lock(*writing_);
  WorkerRecord last = latest();
  last.exit_code = exit_code;
  write(last);
}

// Called by one thread at a time. Writes the slot that is not published: if the rank is killed here, the
// earlier record stays. A reader of that slot sees that its version has changed.
void Control::write(const WorkerRecord& record) {
  Text text{};
  text.step = record.step, text.repeat = record.repeat, text.exit_code = record.exit_code;
  copy_text(text.checkpoint, sizeof text.checkpoint, record.checkpoint);
  copy_text(text.reason, sizeof text.reason, record.reason);
  uint64_t words[kWords];
  std::memcpy(words, &text, sizeof text);
  const uint64_t next = region_->records.load(std::memory_order_relaxed) + 1;
  Slot& slot = region_->slots[next % 2];
  const uint64_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(version + 2, std::memory_order_release);
  region_->records.store(next, std::memory_order_release);
}

WorkerRecord Control::latest() const {
  for (;;) {
    const uint64_t records = region_->records.load(std::memory_order_acquire);
    if (records == 0) return {};
    const Slot& slot = region_->slots[records % 2];
    const uint64_t version = slot.version.load(std::memory_order_acquire);
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
    if (version % 2 != 0 || slot.version.load(std::memory_order_relaxed) != version) continue;
    Text text;
    std::memcpy(&text, words, sizeof text);
    return {text.step, text.repeat,
            std::string(text.checkpoint, strnlen(text.checkpoint, sizeof text.checkpoint)),
            std::string(text.reason, strnlen(text.reason, sizeof text.reason)),
            static_cast<int>(text.exit_code)};
  }
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : std::string("SIG") + name;
}

}  // namespace lm
