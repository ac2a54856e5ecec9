// Copies between a device and ordinary host memory outside of a step (loading, saving, export). CUDA may
// execute a copy with ordinary memory late, or block the caller; here bytes are copied through one registered
// buffer of bounded size, double-buffered: the host works on one half while the other is being copied. On the
// CPU nothing is staged and no buffer is allocated. One thread, which issues `stream`'s work.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "base/arena.h"
#include "base/bytes.h"
#include "base/cuda.h"

namespace lm {

// Host memory that the devices use: registered with CUDA for the life of this object if `device` is a GPU. It
// also works if CUDA refuses, but copies with it then block their caller. Uninitialised; move-only.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  // Throws Error(31) if the memory cannot be allocated.
  RegisteredMemory(DeviceType device, int64_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(RegisteredMemory&& other) noexcept;
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept;
  std::byte* data() const { return memory_.data(); }
  int64_t size() const { return memory_.size(); }
  // "" if CUDA registered it, or was not asked to; else the reason.
  const std::string& refusal() const { return refusal_; }

 private:
  Memory memory_;
  bool registered_ = false;
  std::string refusal_;
};

// Warns (MEM-17) that CUDA refused `bytes` of host memory for `what`, with the price and the remedy.
void warn_not_registered(const std::string& what, int64_t bytes, const std::string& refusal);

// Host memory of loading and saving on a GPU; the plan counts it.
inline constexpr int64_t kStagingBytes = 64 * kMiB;

// Per rank, in shared memory of a machine: messages between its ranks are copied through it.
inline constexpr int64_t kRankStagingBytes = 8 * kMiB;

// The same on a GPU, for data from other GPUs that is to be added: with eight ranks 8 MiB each, enough for
// the link's full bandwidth.
inline constexpr int64_t kDeviceRankStagingBytes = 64 * kMiB;

// The partial sum of a machine's ranks, sent to the other machines to be added there.
constexpr int64_t partial_sum_bytes(DeviceType device) {
  return device == DeviceType::kCpu ? kRankStagingBytes : kDeviceRankStagingBytes;
}

class Staging {
 public:
  // The buffer is allocated at first use.
  explicit Staging(StreamView stream, int64_t bytes = kStagingBytes);
  ~Staging();  // nothing is in flight afterwards
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // False on the CPU: memory of the stream's device is host memory.
  bool used() const { return stream_.device == DeviceType::kCuda; }
  // Bytes of a half. Only where used(): next, send.
  int64_t piece_bytes() const { return bytes_ / 2; }
  // Copies to the device. next: a half that no copy reads any more, to be filled. send: enqueues a copy of
  // its bytes from `from` on to `to`, after the stream's work so far. Call next() again for the next half.
  std::byte* next();
  void send(std::byte* to, const std::byte* from, int64_t bytes);
  // Waits until everything sent has arrived.
  void finish();
  // Fills all `bytes` of `to` by calls of fill(offset, host memory): on the CPU one call, in place.
  using Fill = std::function<void(int64_t offset, std::span<std::byte> bytes)>;
  void write(std::byte* to, int64_t bytes, const Fill& fill);

  // From the device: calls take(offset, bytes of host memory) until all of `from` is passed; it includes the
  // stream's earlier work. On the CPU one call, with the memory itself.
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
  int64_t piece_ = 0;  // current piece, a running count
};

}  // namespace lm
