// A rank's file of a checkpoint in the making: safetensors whose arrays may come in any order and in pieces,
// as the updates of a step produce them. Bytes are copied into a few buffers, checksummed there and written
// by the I/O engine past the page cache, so that whoever gives them may change them at once, and waits only
// when all buffers are under way. Bytes that are lent are written from where they lie. `write` may be called
// by two threads at once, `wait` by any, the rest by one.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "offload/engines.h"
#include "offload/io_queue.h"
#include "offload/pinned.h"
#include "plan/state_catalogue.h"
#include "weights/safetensors.h"

namespace lm {

struct ShardSetup {
  std::string path;
  std::vector<TensorInfo> arrays;
  int ranks = 1;       // that write the checkpoint, each its file
  bool copies = true;  // save_copies()
  // Where the writer takes its buffers from and leaves them for the next one, so that only the first pays for
  // fresh pages; outlives it. None are left there while a disk that no longer answers has them. Null: its
  // own.
  std::unique_ptr<PinnedPool>* buffers = nullptr;
  IoEngineKind engine = IoEngineKind::kAuto;
  // Replaces the engine that `engine` names, for tests.
  std::function<std::unique_ptr<IoEngine>(const EngineSetup&)> make_engine = {};
};

class ShardWriter {
 public:
  // No chunk is longer than a buffer, of which there are save_buffers().
  static constexpr int64_t kChunk = kSaveBuffer;

  // Reserves the file's space and writes its header. Throws Error(20, 21, 31); nothing but an incomplete file
  // stays behind.
  explicit ShardWriter(ShardSetup setup);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Bytes of an array (its place in the setup), from byte `offset` of it; both multiples of 4096 where every
  // array is one and none has bytes for elements, as flat arrays are: others go through the page cache.
  // Throws Error(20, 21).
  // `lent`: the bytes stay as they are until wait() has returned for what is added to it. `threads`: of
  // OpenMP, that copy the bytes and take their checksums.
  void write(size_t array, int64_t offset, std::span<const std::byte> bytes,
             std::vector<Ticket>* lent = nullptr, int threads = 1);
  void wait(std::span<const Ticket> writes);
  // Every byte of every array must have come, once. Waits, and makes them durable.
  CheckpointFile finish();
  // Where an array begins in the file.
  int64_t offset(size_t array) const { return offsets_[array]; }

 private:
  class Files;
  struct Buffer {
    Ticket written = 0;  // its last write
    bool filling = false;
  };
  // With a checksum of every `checked` bytes.
  void put(int64_t offset, std::span<const std::byte> bytes, int64_t checked, std::vector<Ticket>* lent,
           int threads);
  // Of the file's bytes from `at` on, which are at most kChunk; through the buffer, or from where they lie.
  Ticket start(int64_t at, std::span<const std::byte> piece, std::byte* buffer, int64_t checked, int threads);
  size_t take_buffer();

  ShardSetup setup_;
  std::vector<int64_t> offsets_;  // of each array, and the file's end
  std::unique_ptr<Files> files_;
  std::unique_ptr<PinnedPool> memory_;
  std::unique_ptr<IoQueue> queue_;
  std::mutex mutex_;  // of what follows
  std::vector<Buffer> buffers_;
  size_t next_ = 0;  // buffer
  CheckpointFile file_;
};

}  // namespace lm
