// The interface of tokenized examples: a token file on disk (token_file.h). Any thread may call a source,
// each with its own buffer; returned spans are in that buffer or in the source, and are valid until the
// buffer's next use. Lengths are in tokens. Reading throws Error(11) if the source is damaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lm {

// A part of one example: the tokens and, for each, whether it is a training target (0 or not 0).
struct ExampleView {
  std::span<const int32_t> tokens;
  std::span<const uint8_t> trained;
};

// Scratch of a reader. `trained` caches a window of the source, so that a walk over all examples makes few
// system calls.
struct ExampleBuffer {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> trained;
  int64_t trained_first = 0;  // position in the source of trained[0]
};

class DataSource {
 public:
  virtual ~DataSource() = default;

  virtual int64_t examples() const = 0;
  virtual int64_t length(int64_t index) const = 0;
  // Tokens [begin, begin + count) of example `index`.
  virtual ExampleView example(int64_t index, int64_t begin, int64_t count, ExampleBuffer& buffer) const = 0;
  // Only the training mask of a whole example: cheaper, for counting targets.
  virtual std::span<const uint8_t> trained(int64_t index, ExampleBuffer& buffer) const = 0;

  // For messages: the source's name, and the position of an example's first token among all of its tokens.
  virtual std::string name() const = 0;
  virtual int64_t first_token(int64_t index) const = 0;
  // Same content, same value; saved in checkpoints, so that a resumed run detects different data.
  virtual uint64_t fingerprint() const = 0;
};

}  // namespace lm
