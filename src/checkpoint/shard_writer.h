// A rank's file of a checkpoint in the making: safetensors whose arrays may come in any order and in pieces,
// as the updates of a step produce them. Bytes are copied into a few buffers, checksummed there and written
// by the I/O engine past the page cache, so that whoever gives them may change them at once, and waits only
// when all buffers are under way. One thread at a time calls.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "offload/engines.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "weights/safetensors.h"

namespace lm {

struct ShardSetup {
  std::string path;
  std::vector<TensorInfo> arrays;  // each a multiple of 4096 bytes, as flat arrays are
  IoEngineKind engine = IoEngineKind::kAuto;
  // Replaces the engine that `engine` names, for tests.
  std::function<std::unique_ptr<IoEngine>(const EngineSetup&)> make_engine = {};
};

class ShardWriter {
 public:
  // Memory of a writer, which the plan counts.
  static constexpr int64_t kChunk = 4 << 20, kBuffers = 4;
  static constexpr int64_t kMemory = kChunk * kBuffers;

  // Reserves the file's space and writes its header. Throws Error(20, 21, 31); nothing but an incomplete file
  // stays behind.
  explicit ShardWriter(ShardSetup setup);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Bytes of an array (its place in the setup), from byte `offset` of it; both multiples of 4096. Throws
  // Error(20, 21).
  void write(size_t array, int64_t offset, std::span<const std::byte> bytes);
  // Every byte of every array must have come, once. Waits, and makes them durable.
  CheckpointFile finish();
  // Where an array begins in the file.
  int64_t offset(size_t array) const { return offsets_[array]; }

 private:
  class Files;
  void put(int64_t offset, std::span<const std::byte> bytes);

  ShardSetup setup_;
  std::vector<int64_t> offsets_;  // of each array, and the file's end
  std::unique_ptr<Files> files_;
  std::unique_ptr<PinnedPool> memory_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<Ticket> written_;  // the last write of each buffer
  size_t next_ = 0;              // buffer
  CheckpointFile file_;
};

}  // namespace lm
