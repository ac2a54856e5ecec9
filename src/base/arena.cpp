#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/cuda.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kHugePage = 2 * kMiB;

// Transparent huge pages: first touch of 1 GiB costs 512 faults instead of 262,144.
std::byte* map_host(int64_t bytes) {
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Error(Exit::kHostMemory, {.area = "MEM-16",
                                    .what = "cannot map " + format_bytes(bytes) + " of host memory",
                                    .place = "",
                                    .next = "lower train.micro_batch or data.max_length"});
  }
  if (bytes >= kHugePage) madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return static_cast<std::byte*>(p);
}

std::byte* obtain(DeviceType device, int64_t bytes) {
  if (bytes == 0) return nullptr;
  return device == DeviceType::kCpu ? map_host(bytes) : static_cast<std::byte*>(cuda_allocate(bytes));
}

void give_back(DeviceType device, std::byte* memory, int64_t bytes) noexcept {
  if (memory == nullptr) return;
  if (device == DeviceType::kCpu) {
    munmap(memory, static_cast<size_t>(bytes));
  } else {
    cuda_free(memory);
  }
}

}  // namespace

Arena::Arena(DeviceType device, int64_t bytes)
    : device_(device), memory_(obtain(device, bytes)), capacity_(bytes) {}

// Not null, which would mean an undefined view.
Arena::Arena(Counting)
    : device_(DeviceType::kCpu),
      memory_(reinterpret_cast<std::byte*>(kAlignment)),
      owned_(false),
      capacity_(kEndless) {}

Arena::Arena(DeviceType device, std::byte* memory, int64_t bytes)
    : device_(device), memory_(memory), owned_(false), capacity_(bytes) {}

Arena::~Arena() {
  if (owned_) give_back(device_, memory_, capacity_);
}

std::byte* Arena::allocate(int64_t bytes) {
  int64_t rounded = round_up(bytes, kAlignment);
  if (capacity_ == kEndless) rounded = std::min(rounded, capacity_ - used_);
  LM_CHECK(rounded <= capacity_ - used_, "the arena of " + format_bytes(capacity_) + " holds " +
                                             format_bytes(used_) + " and got a request for " +
                                             format_bytes(rounded));
  std::byte* out = memory_ + used_;
  used_ += rounded;
  if (used_ > high_water_) high_water_ = used_;
  return out;
}

void Arena::rewind(int64_t mark) {
  LM_CHECK(mark <= used_, "frames must end in reverse order");
  used_ = mark;
}

Memory::Memory(DeviceType device, int64_t bytes)
    : device_(device), data_(obtain(device, bytes)), size_(bytes) {
  if (device == DeviceType::kCuda && bytes > 0) zero_bytes(data_, bytes, {DeviceType::kCuda, nullptr});
}

Memory::~Memory() {
  give_back(device_, data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this == &other) return *this;
  give_back(device_, data_, size_);
  device_ = other.device_;
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

}  // namespace lm
