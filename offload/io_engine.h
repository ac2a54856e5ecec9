// The interface between the program and the disks: requests go in, results come out, and only what an engine
// reported counts as done. Three engines: `uring` (Linux io_uring), `threads` (a pread/pwrite pool, where
// io_uring is refused) and `sim` (in memory, with seeded faults and a throttle, for tests). One thread, the
// queue's I/O thread, constructs and uses an engine; `wake` alone may be called from any thread. Memory and
// descriptors belong to the caller and outlive the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lm {

enum class IoDirection : uint8_t { kRead, kWrite };

struct IoRequest {
  IoDirection direction = IoDirection::kRead;
  int file = 0;        // index into the engine's files
  int64_t offset = 0;  // bytes into the file; a multiple of the file's alignment, as the next two
  std::byte* memory = nullptr;
  int64_t bytes = 0;
  uint64_t id = 0;  // returned with the result; unique among the requests in flight
};

struct IoResult {
  uint64_t id = 0;
  int64_t result = 0;  // bytes moved (perhaps fewer than asked), or -errno
};

// The file properties that an engine needs.
struct IoFile {
  int descriptor = -1;  // open for reading and writing, O_DIRECT where the file system has it
  int64_t bytes = 0;
};

// Consecutive bytes of one file; multiples of the files' alignment.
struct ExtentPiece {
  int file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
};

// The files that transfers go to: the interface that a queue needs.
class IoFiles {
 public:
  virtual ~IoFiles() = default;
  virtual const std::vector<IoFile>& files() const = 0;
  // The name of file `index` in messages.
  virtual const std::string& path(int index) const = 0;
  // Offsets, lengths and memory addresses of all transfers are multiples of this (at least 4096).
  virtual int64_t alignment() const = 0;
  // A spare extent for bytes that file `failed` refused; nullopt if none is left. Called by the I/O thread.
  virtual std::optional<ExtentPiece> spare(int /*failed*/, int64_t /*bytes*/) { return std::nullopt; }
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  // Requests that may be in flight at once.
  virtual int depth() const = 0;
  // Takes a request; at most depth() are in flight.
  virtual void submit(const IoRequest& request) = 0;
  // Appends at least one result, or none after `wake`. Blocks until then.
  virtual void wait(std::vector<IoResult>& results) = 0;
  // Makes the current `wait`, or the next one, return. Any thread.
  virtual void wake() = 0;
  // For the log: name and settings, e.g. "io_uring, depth 64, registered buffers and files".
  virtual std::string description() const = 0;
};

}  // namespace lm
