// The host memory of transfers, mapped and registered once: pinning touches every page, so it never happens
// inside a step. The pool owns the memory and lends aligned blocks; it never grows past its budget, so that a
// wrong plan is an error. Any thread may lease; the pool outlives its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "base/arena.h"

namespace lm {

class PinnedPool;

// A lease; its end returns the memory. Move-only.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  ~PinnedBlock() { release(); }
  PinnedBlock(PinnedBlock&& other) noexcept;
  PinnedBlock& operator=(PinnedBlock&& other) noexcept;
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }  // as requested
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  void release() noexcept;

 private:
  friend class PinnedPool;
  PinnedPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

class PinnedPool {
 public:
  // Addresses and rounded sizes of blocks are multiples of this: a page, and the alignment of direct I/O.
  static constexpr int64_t kAlignment = 4096;

  // `device` kCuda: registered with CUDA, so that copies to the GPU run at the link's speed. Every page is
  // touched here. Throws Error(31) if the memory cannot be allocated. `alignment` exceeds kAlignment if a
  // disk needs it.
  PinnedPool(DeviceType device, int64_t bytes, int64_t alignment = kAlignment);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Uninitialised. Throws Error(70) when the budget has no such block left: the plan was wrong.
  PinnedBlock lease(int64_t bytes);

  // All of it, for the engine to register.
  std::span<std::byte> memory() const { return {begin_, static_cast<size_t>(capacity_)}; }
  int64_t capacity() const { return capacity_; }
  int64_t leased() const;
  // Whether it is registered with CUDA; false on the CPU, and if CUDA refused: `reason` then gives the
  // reason.
  bool registered(std::string* reason = nullptr) const;
  // Whether kernels may use it by its address; if not, `reason` gives the reason.
  bool used_in_place(std::string* reason = nullptr) const;

 private:
  friend class PinnedBlock;
  void give_back(std::byte* data, int64_t bytes) noexcept;

  const int64_t alignment_;
  Memory memory_;
  std::byte* begin_ = nullptr;  // the first aligned byte
  int64_t capacity_ = 0;
  bool registered_ = false, used_in_place_ = false;
  std::string refusal_;

  mutable std::mutex mutex_;         // guards all below
  std::map<int64_t, int64_t> free_;  // offset -> bytes; neighbours are joined
  int64_t leased_ = 0;
};

}  // namespace lm
