// A run's curves for TensorBoard: an event file in the run's directory tensorboard/, with the tags of
// Transformers' TensorBoardCallback (train/loss, train/grad_norm, train/learning_rate, train/epoch,
// train/train_tokens_per_second, eval/loss). Each start of a run writes its own file, which sorts after the
// earlier ones. It is only a copy for viewing: if it cannot be written the run logs that once and continues.
// One thread.
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
  // The run resumes after `step`: readers drop later steps written before.
  void go_on_after(int64_t step);

 private:
  void write_event(int64_t step, const std::string& what);
  void give_up(const std::string& what);  // the reason is in errno

  std::string path_;
  std::FILE* file_ = nullptr;
};

// The checksum of a record's parts.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace lm
