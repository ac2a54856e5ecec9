#include "offload/pinned.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/bytes.h"
#include "base/cuda.h"
#include "base/error.h"
#include "base/host_address.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

// Touches every page now, so that no step pays for page faults or fails at a memory limit.
void populate(std::byte* begin, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  int status = 0;
  do {
    status = ::madvise(begin, static_cast<size_t>(bytes), MADV_POPULATE_WRITE);
  } while (status != 0 && (errno == EINTR || errno == EAGAIN));
  if (status == 0) return;
  if (errno != EINVAL) {  // EINVAL: a kernel before 5.14
    throw Error(Exit::kHostMemory,
                {.area = "MEM-17",
                 .what = "no " + format_bytes(bytes) + " of host memory for transfers: " + errno_text(errno),
                 .place = "",
                 .next = "lower offload.host_memory"});
  }
#endif
  volatile std::byte* page = begin;
  for (int64_t i = 0; i < bytes; i += PinnedPool::kAlignment) page[i] = std::byte{0};
}

}  // namespace

PinnedPool::PinnedPool(DeviceType device, int64_t bytes, int64_t alignment)
    : alignment_(alignment),
      memory_(DeviceType::kCpu, bytes == 0 ? 0 : round_up(bytes, alignment) + alignment - kAlignment),
      capacity_(round_up(bytes, alignment)) {
  LM_CHECK(bytes >= 0 && alignment >= kAlignment && alignment % kAlignment == 0,
           "a pool's size and alignment");
  if (capacity_ == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(memory_.data());
  const auto step = static_cast<uintptr_t>(alignment_);
  begin_ = memory_.data() + ((address + step - 1) / step * step - address);
  populate(begin_, capacity_);
  if (device == DeviceType::kCuda) registered_ = cuda_register_host(begin_, capacity_, &refusal_);
  used_in_place_ = registered_ && cuda_uses_host_addresses();
  free_.emplace(0, capacity_);
}

PinnedPool::~PinnedPool() {
  if (registered_) cuda_unregister_host(begin_);
}

PinnedBlock PinnedPool::lease(int64_t bytes) {
  LM_CHECK(bytes > 0, "an empty pinned block");
  const int64_t wanted = round_up(bytes, alignment_);
  const std::lock_guard lock(mutex_);
  // The smallest that fits: large blocks stay whole.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second >= wanted && (best == free_.end() || it->second < best->second)) best = it;
  }
  LM_CHECK(best != free_.end(), "the pool of " + format_bytes(capacity_) + " has lent " +
                                    format_bytes(leased_) + " and got a request for " + format_bytes(wanted));
  const int64_t offset = best->first, size = best->second;
  free_.erase(best);
  if (size > wanted) free_.emplace(offset + wanted, size - wanted);
  leased_ += wanted;
  PinnedBlock block;
  block.pool_ = this;
  block.data_ = begin_ + offset;
  block.size_ = bytes;
  return block;
}

void PinnedPool::give_back(std::byte* data, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const int64_t size = round_up(bytes, alignment_);
  leased_ -= size;
  auto it = free_.emplace(data - begin_, size).first;
  const auto next = std::next(it);
  if (next != free_.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it == free_.begin()) return;
  const auto previous = std::prev(it);
  if (previous->first + previous->second == it->first) {
    previous->second += it->second;
    free_.erase(it);
  }
}

int64_t PinnedPool::leased() const {
  const std::lock_guard lock(mutex_);
  return leased_;
}

bool PinnedPool::registered(std::string* reason) const {
  if (reason != nullptr) *reason = refusal_;
  return registered_;
}

bool PinnedPool::used_in_place(std::string* reason) const {
  if (reason != nullptr)
    *reason = registered_ ? "kernels on this system do not reach it by its address" : refusal_;
  return used_in_place_;
}

PinnedBlock::PinnedBlock(PinnedBlock&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  if (this == &other) return *this;
  release();
  pool_ = std::exchange(other.pool_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void PinnedBlock::release() noexcept {
  if (pool_ != nullptr) pool_->give_back(data_, size_);
  pool_ = nullptr;
  data_ = nullptr;
  size_ = 0;
}

}  // namespace lm
