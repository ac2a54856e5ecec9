// The interface of what gives a run its batches, one optimizer step after another: the loader of a token file
// (loader.h), or of rows that are read as the run goes (stream_loader.h). Called by one thread at a time (in
// training prefetch.h's). Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/batch.h"

namespace lm {

// A point of the data files from which rows are read on, behind a chunk of them.
struct RowPosition {
  int64_t file = 0, row = 0, byte = 0;  // the last row that was read, and the byte after it; 0: unknown
  std::string format = {};              // of that file's rows; "": not yet detected
  int64_t rows = 0;                     // read in this epoch
  int64_t done = 0;                     // bytes of all files up to there
  bool operator==(const RowPosition&) const = default;
};

// A point of an epoch of streamed rows from which its sequences can be made again: the first document of a
// window. Documents that went into sequences before it are not needed.
struct StreamAnchor {
  RowPosition rows = {};           // where the chunk of its first document begins
  int64_t skip = 0;                // documents of that chunk that come before
  int64_t examples = 0;            // of the epoch before that chunk
  int64_t window = 0;              // its number in the epoch
  int64_t sequences = 0;           // begun before
  std::vector<int64_t> room = {};  // left in the newest of them, oldest first; empty without packing
  bool operator==(const StreamAnchor&) const = default;
};

// A run's position in its data: the step that next() returns.
struct LoaderPosition {
  int64_t epoch = 0, step = 0;  // completed steps of the epoch
  // Identifies its data. For a token file it follows from the cache key, which covers everything the tokens
  // depend on: data files, tokenizer, template and options (data/prepare.h).
  int64_t fingerprint = 0;
  std::optional<StreamAnchor> stream = {};  // of streamed rows; unset: the epoch's beginning
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;

  // The next step's micro-batches of this rank; moves the position. The last step of an epoch may be short.
  virtual StepBatches next() = 0;
  virtual const LoaderPosition& position() const = 0;
  // next() refuses a position of other data or options.
  virtual void restore(const LoaderPosition& position) = 0;
  // Of data up to the position, with a fraction.
  virtual double epochs() = 0;
};

// Throws Error(11) for a position of other data than `fingerprint`'s. `name`: the user's files.
void check_fingerprint(const LoaderPosition& position, int64_t fingerprint, const std::string& name);
// Throws Error(14): no step is there.
[[noreturn]] void refuse_position(const LoaderPosition& position);

}  // namespace lm
