// The interface of tokenized examples that are read in the order of their files and kept nowhere: a Python
// program (python_rows.h), or a test's memory. One thread; blocks. Throws Error(11) for rows that cannot be
// used, with their file and line.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/batch_source.h"

namespace lm {

// Some examples, concatenated.
struct RowChunk {
  std::vector<int64_t> lengths;  // tokens of each example
  std::vector<int32_t> tokens;
  std::vector<uint8_t> trained;  // of each token: whether it is a training target
  std::vector<uint8_t> text;     // of each example: whether it is plain text
  std::vector<float> labels;     // of scored examples, equally many of each
  RowPosition end;               // behind its rows
};

class RowStream {
 public:
  virtual ~RowStream() = default;
  // Reading resumes behind these rows: {} is the beginning of an epoch.
  virtual void seek(const RowPosition& position) = 0;
  virtual std::optional<RowChunk> next() = 0;  // unset: the epoch ends
  virtual int64_t total_bytes() const = 0;     // of the files
};

}  // namespace lm
