// Copies between a device and ordinary host memory outside of a step (loading, saving, export). CUDA may
// carry out a copy with ordinary memory late, or stop the caller for it; here bytes pass through one
// registered buffer of bounded size, whose two halves take turns: the host works on one while the other is
// being copied. On the CPU nothing is staged and no buffer is made. One thread, which issues `stream`'s work.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "base/arena.h"
#include "base/bytes.h"
#include "base/cuda.h"

namespace lm {

// Host memory that the devices use: registered with CUDA for the life of this object where `device` is a GPU.
// It works where CUDA refuses that, too, but copies with it then stop their caller. Uninitialised; move-only.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  // Throws Error(31) where there is no such memory.
  RegisteredMemory(DeviceType device, int64_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(RegisteredMemory&& other) noexcept;
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept;
  std::byte* data() const { return memory_.data(); }
  int64_t size() const { return memory_.size(); }
  // "" where CUDA took it, or was not asked; else why not.
  const std::string& refusal() const { return refusal_; }

 private:
  Memory memory_;
  bool registered_ = false;
  std::string refusal_;
};

// Warns (MEM-17) that CUDA refused `bytes` of host memory for `what`, with the price and the remedy.
void warn_not_registered(const std::string& what, int64_t bytes, const std::string& refusal);

// What of host memory loading and saving take on a GPU; the plan counts it.
inline constexpr int64_t kStagingBytes = 64 * kMiB;

// Of every rank, in memory that the ranks of a machine share: what they send to one another passes through
// it.
inline constexpr int64_t kRankStagingBytes = 8 * kMiB;

// The same on a GPU, for what has come from other GPUs to be added: of eight ranks 8 MiB each, long enough
// for a link's rate.
inline constexpr int64_t kDeviceRankStagingBytes = 64 * kMiB;

// What a machine's ranks have added up before it goes to the other machines, where it is added.
constexpr int64_t partial_sum_bytes(DeviceType device) {
  return device == DeviceType::kCpu ? kRankStagingBytes : kDeviceRankStagingBytes;
}

class Staging {
 public:
  // The buffer is made when the first bytes need it.
  explicit Staging(StreamView stream, int64_t bytes = kStagingBytes);
  ~Staging();  // nothing is in flight afterwards
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // False on the CPU: memory of the stream's device is host memory.
  bool used() const { return stream_.device == DeviceType::kCuda; }
  // Bytes of a half. Only where used(): next, send.
  int64_t piece_bytes() const { return bytes_ / 2; }
  // To the device: a half that nothing reads any more, to be filled; then, of what it was filled with, bytes
  // from `from` on go to `to`, behind what the stream has been given so far. next() again before the half
  // after it.
  std::byte* next();
  void send(std::byte* to, const std::byte* from, int64_t bytes);
  // Everything sent has arrived.
  void finish();
  // All `bytes` of `to`, made by fill(offset, host memory): on the CPU in one call, in place.
  using Fill = std::function<void(int64_t offset, std::span<std::byte> bytes)>;
  void write(std::byte* to, int64_t bytes, const Fill& fill);

  // From the device: calls take(offset, bytes of host memory) until all of `from` has been given; what the
  // stream was given before is complete in it. On the CPU one call, with the memory itself.
  using Take = std::function<void(int64_t offset, std::span<const std::byte> bytes)>;
  void read(const std::byte* from, int64_t bytes, const Take& take);
  // The same into ordinary memory; complete on return.
  void read_into(void* to, const void* from, int64_t bytes);

 private:
  struct Half {
    explicit Half(DeviceType device) : copied(device) {}
    std::byte* data = nullptr;
    Event copied;  // the last copy with it
  };
  void make_buffer();
  Half& half(int64_t piece) { return halves_[piece % 2]; }

  StreamView stream_;
  int64_t bytes_;
  RegisteredMemory buffer_;
  Half halves_[2];
  int64_t piece_ = 0;  // under way: pieces are counted through
};

}  // namespace lm
