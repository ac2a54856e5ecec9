#include "tests/support/sim_disk.h"

#include <fmt/format.h>
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <optional>

#include "base/error.h"

namespace lm {
namespace {

constexpr std::chrono::milliseconds kLate{2}, kLook{1};
constexpr int64_t kSector = 512;      // what a short transfer is a multiple of
constexpr int64_t kAlignment = 4096;  // what a request must be a multiple of, as with O_DIRECT

// A fault of one direction does nothing in the other.
bool concerns(SimFault fault, IoDirection direction) {
  if (fault == SimFault::kBitFlip || fault == SimFault::kStrayRead) return direction == IoDirection::kRead;
  if (fault == SimFault::kDroppedWrite || fault == SimFault::kStrayWrite)
    return direction == IoDirection::kWrite;
  return true;
}

}  // namespace

struct SimDisk::Pending {
  IoRequest request;
  std::optional<SimFault> fault;
  Clock::time_point finish;
};

class SimDisk::Engine final : public IoEngine {
 public:
  explicit Engine(SimDisk& disk) : disk_(disk), depth_(disk.setup_.depth) {}

  int depth() const override { return depth_; }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoResult>& results) override;
  void wake() override {
    const std::lock_guard lock(disk_.mutex_);
    woken_ = true;
    changed_.notify_one();
  }
  std::string description() const override { return fmt::format("simulated disk, depth {}", depth_); }

 private:
  SimDisk& disk_;
  const int depth_;
  std::vector<Pending> pending_;  // of the I/O thread alone
  std::condition_variable changed_;
  bool woken_ = false;  // guarded by the disk's mutex
};

void SimDisk::Engine::submit(const IoRequest& request) {
  const std::lock_guard lock(disk_.mutex_);
  LM_CHECK(static_cast<int>(pending_.size()) < depth_, "more requests than the engine's depth");
  LM_CHECK(request.file >= 0 && static_cast<size_t>(request.file) < disk_.files_.size() &&
               request.offset >= 0 && request.bytes > 0 &&
               request.offset + request.bytes <=
                   static_cast<int64_t>(disk_.files_[static_cast<size_t>(request.file)].size()),
           "a request beyond the simulated file");
  Pending pending{request, std::nullopt, disk_.finish_time(request)};
  const int64_t operation = disk_.operations_++;
  for (const SimFaultAt& at : disk_.setup_.faults) {
    if (operation != at.operation && !(at.for_ever && operation > at.operation)) continue;
    if (!concerns(at.fault, request.direction) || (at.file >= 0 && at.file != request.file)) continue;
    pending.fault = at.fault;
    ++disk_.injected_;
    if (at.fault == SimFault::kDelay) pending.finish = std::max(pending.finish, disk_.now()) + kLate;
    if (at.fault == SimFault::kHang) pending.finish = Clock::time_point::max();
    break;
  }
  pending_.push_back(pending);
}

void SimDisk::Engine::wait(std::vector<IoResult>& results) {
  const size_t before = results.size();
  std::unique_lock lock(disk_.mutex_);
  for (;;) {
    const auto now = disk_.now();
    if (disk_.setup_.shuffle) std::shuffle(pending_.begin(), pending_.end(), disk_.random_);
    auto next = Clock::time_point::max();
    for (size_t i = 0; i < pending_.size();) {
      // Shuffled, some of what is due waits for the next call, so that later requests overtake it.
      const bool held = disk_.setup_.shuffle && results.size() > before && disk_.random_() % 2 == 0;
      if (pending_[i].finish > now || held) {
        next = std::min(next, pending_[i++].finish);
        continue;
      }
      disk_.complete(pending_[i], results);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (results.size() > before || woken_) {
      woken_ = false;
      return;
    }
    if (next == Clock::time_point::max()) {
      changed_.wait(lock);
    } else if (disk_.setup_.now) {
      changed_.wait_for(lock, kLook);  // nobody says that the test's clock has moved
    } else {
      changed_.wait_until(lock, next);
    }
  }
}

SimDisk::SimDisk(std::span<const IoFile> files, SimSetup setup)
    : setup_(std::move(setup)), random_(setup_.seed) {
  for (const IoFile& file : files) files_.emplace_back(static_cast<size_t>(file.bytes));
}

SimDisk::~SimDisk() = default;

std::unique_ptr<IoEngine> SimDisk::make_engine() {
  return std::make_unique<Engine>(*this);
}

void SimDisk::plan_faults(std::vector<SimFaultAt> faults) {
  const std::lock_guard lock(mutex_);
  setup_.faults = std::move(faults);
  operations_ = injected_ = 0;
}

int64_t SimDisk::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_;
}

int64_t SimDisk::injected() const {
  const std::lock_guard lock(mutex_);
  return injected_;
}

std::span<std::byte> SimDisk::contents(int file) {
  return files_.at(static_cast<size_t>(file));
}

// Each link is busy until it has moved what it was given; an idle one starts now.
SimDisk::Clock::time_point SimDisk::finish_time(const IoRequest& request) {
  const auto now = this->now();
  const auto occupy = [&](Clock::time_point& free, double bytes_per_s) {
    if (bytes_per_s <= 0) return now;
    const std::chrono::duration<double> time(static_cast<double>(request.bytes) / bytes_per_s);
    free = std::max(free, now) + std::chrono::duration_cast<Clock::duration>(time);
    return free;
  };
  const bool read = request.direction == IoDirection::kRead;
  return std::max(
      occupy(read ? read_free_ : write_free_, read ? setup_.read_bytes_per_s : setup_.write_bytes_per_s),
      occupy(both_free_, setup_.both_bytes_per_s));
}

int64_t SimDisk::another_place(const IoRequest& request) {
  const auto size = static_cast<int64_t>(files_[static_cast<size_t>(request.file)].size());
  if (size < 2 * request.bytes) return request.offset;
  const int64_t places = size / request.bytes;
  const int64_t own = request.offset / request.bytes;
  return (own + 1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(places - 1))) % places *
         request.bytes;
}

// Returns the bytes moved.
int64_t SimDisk::move(const Pending& pending) {
  const IoRequest& request = pending.request;
  const std::optional<SimFault> fault = pending.fault;
  const bool read = request.direction == IoDirection::kRead;
  if (!read && fault == SimFault::kDroppedWrite) return request.bytes;
  int64_t bytes = request.bytes, offset = request.offset;
  if (fault == SimFault::kShort) {
    const int64_t sectors = request.bytes / kSector;
    bytes = sectors < 2
                ? request.bytes
                : kSector * (1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(sectors - 1)));
  }
  if (fault == (read ? SimFault::kStrayRead : SimFault::kStrayWrite)) offset = another_place(request);
  std::byte* const stored = files_[static_cast<size_t>(request.file)].data() + offset;
  if (read) {
    std::memcpy(request.memory, stored, static_cast<size_t>(bytes));
    if (fault == SimFault::kBitFlip) {
      const uint64_t bit = random_() % static_cast<uint64_t>(bytes * 8);
      request.memory[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    }
  } else {
    std::memcpy(stored, request.memory, static_cast<size_t>(bytes));
  }
  return bytes;
}

void SimDisk::complete(const Pending& pending, std::vector<IoResult>& results) {
  const uint64_t id = pending.request.id;
  const auto memory = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pending.request.memory));
  if ((pending.request.offset | pending.request.bytes | memory) % kAlignment != 0) {
    results.push_back({id, -EINVAL});
    return;
  }
  switch (pending.fault.value_or(SimFault::kDelay)) {
    case SimFault::kEio:
      results.push_back({id, -EIO});
      return;
    case SimFault::kEnospc:
      results.push_back({id, -ENOSPC});
      return;
    case SimFault::kEintr:
      results.push_back({id, -EINTR});
      return;
    case SimFault::kEagain:
      results.push_back({id, -EAGAIN});
      return;
    case SimFault::kZero:
      results.push_back({id, 0});
      return;
    case SimFault::kLong:
      results.push_back({id, move(pending) + kSector});
      return;
    case SimFault::kUnknown:
      results.push_back({id ^ (uint64_t{1} << 62), move(pending)});
      return;
    case SimFault::kDuplicate:
      results.push_back({id, move(pending)});
      results.push_back({id, pending.request.bytes});
      return;
    default:
      results.push_back({id, move(pending)});
  }
}

}  // namespace lm
