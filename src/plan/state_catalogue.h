// A run's state as a list, made from layout and plan alone: every name, type, size and place, without a byte
// of memory. What saves, hashes, compares or restores state walks it; bytes are moved by a source and a sink,
// and neither listing nor reading marks anything as changed. Pure values.
//
//   block<b>.weight   working weights: block b's flat array of what is trained
//   block<b>.<s>      stream s of the optimizer's state (optim/rules), over the same
//   optimizer.t       updates so far
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "plan/plan.h"

namespace lm {

// What a checkpoint in the making copies passes through buffers of so many bytes: as many that what is saved
// of a unit in its update waits less for the disk. With 4 such a step took 1.28 of its bound (SmolLM2-135M,
// all on disk, benchmarks/save.py), with 16 1.20.
inline constexpr int64_t kSaveBuffer = int64_t{4} << 20;
// Registered host memory through which it brings state from a GPU, beside the step.
inline constexpr int64_t kSaveStaging = 4 * kSaveBuffer;
// Whether a save copies. State of one rank in host memory, which no update changes before the next step's
// check, is written from where it lies (train/step_save.h), and little else has to be copied.
bool save_copies(const PlacementPlan& placement, Clip clip);
// For a rank's file of so many bytes; more than the threads that fill them.
inline int64_t save_buffers(int64_t bytes, bool copies) {
  constexpr int64_t kFewest = 3, kMost = 16;
  return copies ? std::clamp<int64_t>(ceil_div(bytes, kSaveBuffer), kFewest, kMost) : kFewest;
}
// Host memory that they take, beside the state itself.
int64_t save_buffer_bytes(const ModelLayout& layout, const NumericsPlan& numerics,
                          const PlacementPlan& placement, Clip clip);

// An array, or the part of it that lies in one unit: with several ranks, in a rank's shard of the unit.
struct StateEntry {
  std::string name;
  StateClass state = StateClass::kWeights;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape = {};  // of the whole array; none: a number
  int64_t unit = -1;                // of ModelLayout::units; -1: of none
  size_t stream = 0;                // of the optimizer's state
  // Elements of the array that are here, and of its block's flat array what they are of.
  int64_t first = 0, elements = 1;
  Shard shard = {};
  int64_t bytes() const { return elements * static_cast<int64_t>(dtype_size(dtype)); }
};
using StateCatalogue = std::vector<StateEntry>;

// The order is that in which state is moved: weights, then the optimizer's (none without training), each by
// block, and a name's parts one after another. With several ranks each lists what it moves: its part of every
// unit (part_of; of a shard with copies each of them lists another), and the first also what is no array.
// Together they are the whole.
struct ListedBy {
  Sharding sharding;
  int rank = 0;
};
StateCatalogue list_state(const ModelLayout& layout, const NumericsPlan& numerics, bool chunked_head,
                          bool training, const ListedBy& by = {});

// What state comes from: memory of a rank, wherever it lives, or files.
class StateSource {
 public:
  virtual ~StateSource() = default;
  // Calls take(entry, offset, bytes) until all of every entry has been given, each from its beginning on;
  // offset in bytes. The bytes are host memory, complete, and valid during the call only. `entries` are
  // neighbours in a catalogue, of one class and unit: they may take turns.
  using Take = std::function<void(const StateEntry&, int64_t offset, std::span<const std::byte>)>;
  virtual void read(std::span<const StateEntry> entries, const Take& take) = 0;
};

// Where it goes: a file, a hash, a test's memory.
class StateSink {
 public:
  virtual ~StateSink() = default;
  virtual void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) = 0;
  // write() by so many OpenMP threads, whose team the caller must have.
  virtual void write_by(int /*threads*/, const StateEntry& entry, int64_t offset,
                        std::span<const std::byte> bytes) {
    write(entry, offset, bytes);
  }
  // The same of bytes that stay as they are until wait() has returned for what is added to `writes`: they
  // need not be copied.
  using Write = uint64_t;
  virtual void lend(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
                    std::vector<Write>& /*writes*/) {
    write(entry, offset, bytes);
  }
  virtual void wait(std::span<const Write> /*writes*/) {}
};

// State that can be read in any order: a checkpoint's.
class StateReader {
 public:
  // What read takes.
  struct Part {
    std::string array;
    int64_t offset = 0;
    std::span<std::byte> bytes;
  };
  virtual ~StateReader() = default;
  // Bytes of an array of the catalogue, from byte `offset` of the whole of it. Throws Error(14) for an array
  // that is not there or not of this type and size, and Error(22) for bytes that are not those that were
  // written.
  virtual void read(const std::string& array, int64_t offset, std::span<std::byte> bytes) = 0;
  // All of them: a disk is at its speed when it is asked for much at once.
  virtual void read(std::span<const Part> parts) {
    for (const Part& part : parts) read(part.array, part.offset, part.bytes);
  }
};

}  // namespace lm
