#include "comm/shared_region.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr uint64_t kMagic = 0x326b6e61726d6c6cULL;  // "llmrank2": layout version 2
constexpr int64_t kPage = 4096;
constexpr int kMostRanks = 1 << 12;
// A meeting that is about to be complete is not worth two system calls.
constexpr int kSpins = 200;

using Name = std::array<uint64_t, 6>;

Error region_error(const char* what) {
  return Error(Exit::kHostMemory, {.area = "COMM-16",
                                   .what = std::string(what) + ": " + std::strerror(errno),
                                   .place = "",
                                   .next = "use fewer ranks"});
}

}  // namespace

// Of one rank, in a cache line of its own but for the name.
struct alignas(64) SharedRegion::Place {
  std::atomic<uint64_t> arrived, heartbeats;
  std::atomic<uint64_t> enqueued, begun, done;   // of its GPU
  std::atomic<uint64_t> what[2][Name().size()];  // names of even meetings and of odd ones
};

struct SharedRegion::Header {
  uint64_t magic;
  int32_t ranks;
  int64_t staging;
  alignas(64) std::atomic<uint32_t> bell;  // rung when a meeting is complete or a rank has ended
  std::atomic<uint32_t> ended;
  static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
};

namespace {

int64_t places_bytes(int ranks, int64_t place) {
  return round_up(kPage + ranks * place, kPage);
}

void ring(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

SharedRegion SharedRegion::create(int ranks, int64_t staging) {
  LM_CHECK(ranks >= 1 && ranks <= kMostRanks && staging >= kPage, "ranks of a shared region");
  static_assert(sizeof(Header) <= kPage);
  staging = round_up(staging, kPage);
  const int64_t bytes = places_bytes(ranks, sizeof(Place)) + ranks * staging;
  SharedRegion region(memfd_create("lmlaunch-ranks", MFD_CLOEXEC), nullptr, bytes);
  if (region.fd_ < 0 || ftruncate(region.fd_, bytes) != 0) throw region_error("memory that the ranks share");
  void* const memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, region.fd_, 0);
  if (memory == MAP_FAILED) throw region_error("mapping the memory that the ranks share");
  region.memory_ = static_cast<std::byte*>(memory);
  auto* const header = new (memory) Header{};
  header->magic = kMagic;
  header->ranks = ranks;
  header->staging = staging;
  for (int r = 0; r < ranks; ++r) new (&region.place(r)) Place{};
  return region;
}

SharedRegion SharedRegion::attach(int fd) {
  struct stat info {};
  const bool whole = fstat(fd, &info) == 0 && info.st_size >= kPage;
  void* const memory =
      whole ? mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
            : MAP_FAILED;
  LM_CHECK(memory != MAP_FAILED, "no memory that ranks share");
  SharedRegion region(fd, static_cast<std::byte*>(memory), info.st_size);
  const Header& header = region.header();
  LM_CHECK(header.magic == kMagic &&
               info.st_size == places_bytes(header.ranks, sizeof(Place)) + header.ranks * header.staging,
           "no memory that ranks of this version share");
  fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for data workers
  return region;
}

SharedRegion::SharedRegion(SharedRegion&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_) {}

SharedRegion::~SharedRegion() {
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

int SharedRegion::ranks() const {
  return header().ranks;
}

int64_t SharedRegion::staging_bytes() const {
  return header().staging;
}

SharedRegion::Place& SharedRegion::place(int rank) const {
  return reinterpret_cast<Place*>(memory_ + kPage)[rank];
}

std::byte* SharedRegion::staging(int rank) const {
  return memory_ + places_bytes(ranks(), sizeof(Place)) + rank * staging_bytes();
}

bool SharedRegion::end() {
  const bool first = header().ended.exchange(1, std::memory_order_acq_rel) == 0;
  ring(header().bell);
  return first;
}

bool SharedRegion::ended() const {
  return header().ended.load(std::memory_order_acquire) != 0;
}

uint64_t SharedRegion::arrive(int rank, const char* what) {
  Place& here = place(rank);
  Name name{};
  std::strncpy(reinterpret_cast<char*>(name.data()), what, sizeof name - 1);
  const uint64_t meeting = here.arrived.load(std::memory_order_relaxed) + 1;
  for (size_t i = 0; i < name.size(); ++i)
    here.what[meeting % 2][i].store(name[i], std::memory_order_relaxed);
  // In one order with the others' stores and the loads that follow, so that the last of two notices.
  here.arrived.store(meeting, std::memory_order_seq_cst);
  if (all_arrived(meeting)) ring(header().bell);
  return meeting;
}

bool SharedRegion::all_arrived(uint64_t meeting) const {
  for (int r = 0; r < ranks(); ++r) {
    if (place(r).arrived.load(std::memory_order_seq_cst) < meeting) return false;
  }
  return true;
}

bool SharedRegion::wait(uint64_t meeting, int timeout_ms) const {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (all_arrived(meeting)) return true;
  }
  std::atomic<uint32_t>& bell = header().bell;
  const uint32_t rung = bell.load(std::memory_order_acquire);
  if (all_arrived(meeting)) return true;
  if (ended()) return false;
  const timespec timeout{timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
  syscall(SYS_futex, &bell, FUTEX_WAIT, rung, &timeout, nullptr, 0);
  return all_arrived(meeting);
}

void SharedRegion::post_heartbeat(int rank) {
  place(rank).heartbeats.fetch_add(1, std::memory_order_relaxed);
}

void SharedRegion::post_device(int rank, const DeviceProgress& progress) {
  Place& here = place(rank);
  here.enqueued.store(progress.enqueued, std::memory_order_release);
  here.begun.store(progress.begun, std::memory_order_release);
  here.done.store(progress.done, std::memory_order_release);
}

Posted SharedRegion::peek(int rank) const {
  const Place& there = place(rank);
  const Position last = where(rank);
  Posted out{.heartbeats = there.heartbeats.load(std::memory_order_relaxed),
             .last = {last.what, last.meeting}};
  out.device.done = there.done.load(std::memory_order_acquire);  // in this order none exceeds the next
  out.device.begun = there.begun.load(std::memory_order_acquire);
  out.device.enqueued = there.enqueued.load(std::memory_order_acquire);
  return out;
}

std::string SharedRegion::name(int rank, uint64_t meeting) const {
  Name name{};
  for (size_t i = 0; i < name.size(); ++i)
    name[i] = place(rank).what[meeting % 2][i].load(std::memory_order_relaxed);
  name.back() &= ~(0xffULL << 56);
  return reinterpret_cast<const char*>(name.data());
}

SharedRegion::Position SharedRegion::where(int rank) const {
  const uint64_t meeting = place(rank).arrived.load(std::memory_order_acquire);
  return {meeting, name(rank, meeting)};
}

}  // namespace lm
