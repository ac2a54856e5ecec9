// Writes a rank's file of a new checkpoint: safetensors whose arrays may be written in any order and in
// pieces, as the updates of a step produce them. Bytes are copied into a few buffers, checksummed there and
// written by the I/O engine with direct I/O, so that the caller may change them at once, and waits only if
// all buffers are in flight. Lent bytes are written without a copy. `write` may be called by two threads at
// once, `wait` by any, the rest by one.
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
  int ranks = 1;       // that write the checkpoint, one file each
  bool copies = true;  // save_copies()
  // The pool of buffers, left for the next writer so that only the first one pays for fresh pages; outlives
  // the writer. Not left there while a hung disk still uses them. Null: the writer has its own.
  std::unique_ptr<PinnedPool>* buffers = nullptr;
  IoEngineKind engine = IoEngineKind::kAuto;
  // Replaces the engine that `engine` names, for tests.
  std::function<std::unique_ptr<IoEngine>(const EngineSetup&)> make_engine = {};
};

class ShardWriter {
 public:
  // A chunk is at most one buffer long; there are save_buffers() of them.
  static constexpr int64_t kChunk = kSaveBuffer;

  // Reserves the file's space and writes its header. Throws Error(20, 21, 31); leaves only an incomplete file
  // behind.
  explicit ShardWriter(ShardSetup setup);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Writes bytes of an array (an index into the setup's) from byte `offset` on; both must be multiples of
  // 4096 if every array's size is one and none has 1-byte elements, as for flat arrays: others go through the
  // page cache. Throws Error(20, 21). `lent`: the bytes must not change until wait() has returned for the
  // tickets added to it. `threads`: OpenMP threads that copy the bytes and compute their checksums.
  void write(size_t array, int64_t offset, std::span<const std::byte> bytes,
             std::vector<Ticket>* lent = nullptr, int threads = 1);
  void wait(std::span<const Ticket> writes);
  // Every byte of every array must have been written once. Waits for the writes and syncs the file.
  CheckpointFile finish();
  // Where an array begins in the file.
  int64_t offset(size_t array) const { return offsets_[array]; }

 private:
  class Files;
  struct Buffer {
    Ticket written = 0;  // its last write
    bool filling = false;
  };
  // Writes with one checksum per `checked` bytes.
  void put(int64_t offset, std::span<const std::byte> bytes, int64_t checked, std::vector<Ticket>* lent,
           int threads);
  // Starts a write of at most kChunk bytes at file offset `at`; through the buffer, or without a copy.
  Ticket start(int64_t at, std::span<const std::byte> piece, std::byte* buffer, int64_t checked, int threads);
  size_t take_buffer();

  ShardSetup setup_;
  std::vector<int64_t> offsets_;  // of each array, and the file's end
  std::unique_ptr<Files> files_;
  std::unique_ptr<PinnedPool> memory_;
  std::unique_ptr<IoQueue> queue_;
  std::mutex mutex_;  // guards all below
  std::vector<Buffer> buffers_;
  size_t next_ = 0;  // buffer
  CheckpointFile file_;
};

}  // namespace lm
