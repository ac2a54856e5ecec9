// Saves a checkpoint by a protocol that makes every visible checkpoint durable: everything is written into a
// directory with a temporary name and synced; then the directory is renamed, and the rename is synced, too. A
// failure before that leaves an incomplete directory that resuming ignores. `write` may be called by two
// threads at once, `wait` by any, the rest by one at a time.
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
  std::string directory;  // of all checkpoints of the run; created if missing
  int64_t step = 0;
  const StateCatalogue& catalogue;  // borrowed; per rank
  Group* group = nullptr;           // the ranks that save together: all of them construct and commit
  bool copies = true;               // save_copies(): decides the number of buffers
  std::unique_ptr<PinnedPool>* buffers = nullptr;  // as in ShardSetup
  IoEngineKind engine = IoEngineKind::kAuto;
  std::function<std::unique_ptr<IoEngine>(const EngineSetup&)> make_engine = {};  // for tests
};

class Save : public StateSink {
 public:
  // Throws Error(20) unless the disk has 1.05 times the bytes free, Error(20, 21) if it cannot be written.
  explicit Save(const SaveSetup& setup);
  ~Save() override;  // without commit the directory is removed
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Writes bytes of an entry of the catalogue, in any order and in pieces; they are copied. Scalars: one
  // thread.
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) override {
    put(entry, offset, bytes, nullptr, 1);
  }
  void write_by(int threads, const StateEntry& entry, int64_t offset,
                std::span<const std::byte> bytes) override {
    put(entry, offset, bytes, nullptr, threads);
  }
  // The same without a copy.
  void lend(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
            std::vector<Write>& writes) override {
    put(entry, offset, bytes, &writes, 1);
  }
  void wait(std::span<const Write> writes) override { shard_->wait(writes); }
  // Every byte of the catalogue must have been written. Fills in the manifest's files, arrays and numbers.
  // `allowed` is called before the rename, and throws if this process may not publish any more. Returns the
  // path of the durable checkpoint. With several ranks the first one's manifest is used. If one fails, all
  // throw its error.
  std::string commit(Manifest manifest, const std::function<void()>& allowed = {});

 private:
  void list(const StateCatalogue& catalogue);
  // `lent`: collects the writes without a copy; null: the bytes are copied.
  void put(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
           std::vector<Write>* lent, int threads);
  void make_directory(const std::string& directory, int64_t bytes);
  // Adds the files and arrays of all ranks to the first one's manifest.
  void add_others(Manifest& manifest);
  void publish(const Manifest& manifest, const std::function<void()>& allowed);

  LocalGroup alone_;
  Group& group_;
  std::string path_, temporary_;
  std::map<std::string, std::vector<size_t>> places_;  // per array its parts, indices into arrays_
  std::vector<SavedArray> arrays_;
  std::map<std::string, int64_t> numbers_;
  std::unique_ptr<ShardWriter> shard_;
};

// Disk space of a checkpoint of this state, its manifest included.
int64_t checkpoint_bytes(const StateCatalogue& catalogue);

}  // namespace lm
