#include "nccl_region.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace emulator {
namespace {

void write_text(char (&to)[NcclRegion::kText], const std::string& text) {
  std::snprintf(to, sizeof to, "%s", text.c_str());
}

constexpr size_t kPlaces = 1 << 16;

}  // namespace

bool nccl_wait(const std::function<bool()>& ready, const NcclRegion::Stopped& stopped) {
  for (int turn = 0; !ready(); ++turn) {
    if (stopped()) return false;
    turn < 100 ? static_cast<void>(sched_yield()) : static_cast<void>(usleep(100));
  }
  return true;
}

NcclRegion::NcclRegion(const std::string& name, int rank, int ranks)
    : name_(name),
      rank_(rank),
      ranks_(ranks),
      size_(kPlaces + static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Channel)) {
  static_assert(sizeof(Place) * kMostRanks <= kPlaces);
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks) throw std::runtime_error("no such rank");
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);  // new memory is zeros
  int error = fd < 0 ? errno : posix_fallocate(fd, 0, static_cast<off_t>(size_));
  void* memory = MAP_FAILED;
  if (error == 0) {
    memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) error = errno;
  }
  if (fd >= 0) close(fd);
  if (error != 0) {
    shm_unlink(name.c_str());
    throw std::runtime_error("Error while creating shared memory segment /dev/shm" + name + " (size " +
                             std::to_string(size_) + "), error: " + std::strerror(error));
  }
  memory_ = static_cast<std::byte*>(memory);
}

NcclRegion::~NcclRegion() {
  munmap(memory_, size_);
  shm_unlink(name_.c_str());  // of ranks that never met
}

NcclRegion::Channel& NcclRegion::channel(int from, int to) const {
  return reinterpret_cast<Channel*>(memory_ + kPlaces)[from * ranks_ + to];
}

std::string NcclRegion::meet(const std::string& card, const Stopped& stopped) {
  write_text(place(rank_).card, card);
  place(rank_).here = 1;
  for (int r = 0; r < ranks_; ++r) {
    if (!nccl_wait([&] { return place(r).here != 0; }, stopped)) return "given up";
  }
  shm_unlink(name_.c_str());  // nobody else is to come
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_ && card == place(r).card)
      return "Duplicate GPU detected : rank " + std::to_string(rank_) + " and rank " + std::to_string(r) +
             " both on CUDA device " + card;
  }
  return "";
}

std::string NcclRegion::post(uint64_t call, const std::string& text, const Stopped& stopped) {
  write_text(place(rank_).text[call % 2], text);
  place(rank_).calls = call;
  for (int r = 0; r < ranks_; ++r) {
    if (!nccl_wait([&] { return place(r).calls >= call; }, stopped)) return "given up";
  }
  for (int r = 0; r < ranks_; ++r) {
    // Nobody is two calls ahead: that one waits for this rank.
    const char* const theirs = place(r).text[call % 2];
    if (std::strncmp(theirs, text.c_str(), kText - 1) != 0)
      return "rank " + std::to_string(rank_) + " calls " + text + ", rank " + std::to_string(r) + " " +
             theirs;
  }
  return "";
}

bool NcclRegion::send(int to, const std::string& label, const void* bytes, size_t size) {
  Channel& c = channel(rank_, to);
  if (c.taken != c.sent) return false;
  write_text(c.label, label);
  c.size = size;
  std::memcpy(c.bytes, bytes, size);
  ++c.sent;
  return true;
}

bool NcclRegion::receive(int from, const std::string& label, void* bytes, size_t size, std::string* wrong) {
  Channel& c = channel(from, rank_);
  if (c.taken == c.sent) return false;
  if (std::strncmp(c.label, label.c_str(), kText - 1) != 0 || c.size != size) {
    *wrong = c.label;
    return false;
  }
  std::memcpy(bytes, c.bytes, size);
  ++c.taken;
  return true;
}

bool NcclRegion::taken(int to) const {
  const Channel& c = channel(rank_, to);
  return c.taken == c.sent;
}

}  // namespace emulator
