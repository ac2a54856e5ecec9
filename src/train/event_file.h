// A run's curves as TensorBoard reads them: an event file in the run's directory tensorboard/, with the tags
// that Transformers' TensorBoardCallback writes (train/loss, train/grad_norm, train/learning_rate,
// train/epoch, train/train_tokens_per_second, eval/loss). Each start of a run writes a file of its own, which
// sorts behind the earlier ones. A copy for viewing: where it cannot be written the run says so once and goes
// on. One thread.
//
//   file   = record*
//   record = length (8 bytes), checksum of the length (4), Event (length bytes), checksum of the Event (4)
//
// Numbers are little-endian, checksums masked CRC-32C, an Event is a protocol buffer:
// {1: double wall_time, 2: int64 step, 3: string file_version | 5: Summary | 7: SessionLog}.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

namespace lm {

struct Scalar {
  std::string_view tag;
  double value;
};

class EventFile {
 public:
  // Creates `directory`, and a file in it.
  explicit EventFile(const std::string& directory);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  void write(int64_t step, std::span<const Scalar> scalars);
  // The run goes on after `step`: what was written of later steps is forgotten.
  void go_on_after(int64_t step);

 private:
  void write_event(int64_t step, const std::string& what);
  void give_up(const std::string& what);  // errno says why

  std::string path_;
  std::FILE* file_ = nullptr;
};

// The checksum of a record's parts.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace lm
