// A checkpoint in the making, by a protocol after which a checkpoint that was seen is a checkpoint that is
// kept: everything is written into a directory of a temporary name and made durable; then the directory gets
// its name, which is made durable, too. Whatever happens before leaves an incomplete directory that no start
// takes for a checkpoint. `write` may be called by two threads at once, `wait` by any, the rest by one at a
// time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_writer.h"
#include "comm/group.h"
#include "plan/state_catalogue.h"

namespace lm {

struct SaveSetup {
  std::string directory;  // of all checkpoints of the run; made where it is missing
  int64_t step = 0;
  const StateCatalogue& catalogue;  // borrowed; of several ranks each its own
  Group* group = nullptr;           // the ranks that save together: all construct, and all commit
  bool copies = true;               // save_copies(): how many buffers there are
  std::unique_ptr<PinnedPool>* buffers = nullptr;  // as ShardSetup has them
  IoEngineKind engine = IoEngineKind::kAuto;
  std::function<std::unique_ptr<IoEngine>(const EngineSetup&)> make_engine = {};  // for tests
};

class Save : public StateSink {
 public:
  // Throws Error(20) where the disk has not 1.05 times the bytes free, Error(20, 21) where it cannot be
  // written.
  explicit Save(const SaveSetup& setup);
  ~Save() override;  // without commit the directory goes
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Bytes of an entry of the catalogue, in any order and in pieces; they are copied. Numbers: one thread.
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) override {
    put(entry, offset, bytes, nullptr, 1);
  }
  void write_by(int threads, const StateEntry& entry, int64_t offset,
                std::span<const std::byte> bytes) override {
    put(entry, offset, bytes, nullptr, threads);
  }
  // Those are written from where they lie.
  void lend(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
            std::vector<Write>& writes) override {
    put(entry, offset, bytes, &writes, 1);
  }
  void wait(std::span<const Write> writes) override { shard_->wait(writes); }
  // Every byte of the catalogue must have come. The manifest's files, arrays and numbers are filled in here.
  // `allowed` is asked before the name is given, and throws where this process may not publish any more.
  // The checkpoint's path; it is on the disk.
  // With several ranks the first one's manifest counts. What one of them fails by, all throw.
  std::string commit(Manifest manifest, const std::function<void()>& allowed = {});

 private:
  void list(const StateCatalogue& catalogue);
  // `lent`: the writes from where the bytes lie; null: they are copied.
  void put(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
           std::vector<Write>* lent, int threads);
  void make_directory(const std::string& directory, int64_t bytes);
  // Files and arrays of all ranks into the first one's manifest.
  void add_others(Manifest& manifest);
  void publish(const Manifest& manifest, const std::function<void()>& allowed);

  LocalGroup alone_;
  Group& group_;
  std::string path_, temporary_;
  std::map<std::string, std::vector<size_t>> places_;  // of each array its parts, in arrays_
  std::vector<SavedArray> arrays_;
  std::map<std::string, int64_t> numbers_;
  std::unique_ptr<ShardWriter> shard_;
};

// Bytes that a checkpoint of this state takes on a disk, its manifest included.
int64_t checkpoint_bytes(const StateCatalogue& catalogue);

}  // namespace lm
