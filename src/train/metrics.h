// metrics.jsonl: one object per optimizer step, numbers with enough digits to round-trip, flushed row by row;
// the process's resident memory, which plan and metrics mean by host_bytes; and what it has of the GPU's.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "base/batch.h"
#include "plan/predict.h"
#include "train/event_file.h"

namespace lm {

// What the batches of a step really ask for: rows without a target do not pass the head, and attention sees
// no other document.
StepWork work_of(const StepBatches& batches);

struct StepRow {
  int64_t step = 0;
  double epoch = 0;  // of the data seen so far, with this step's
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false;
  std::string fault;  // of a skipped step, for the log
  int64_t target_tokens = 0;
  int64_t tokens = 0;
  double step_ms = 0;
  double tokens_per_s = 0;
  double sol_pct = 0;  // share of the speed of light: necessary FLOP of the step at peak rate / measured time
  int64_t device_bytes = 0;  // device_bytes(), the most so far
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;  // of state that lives on disks
  // Since the row before, by offloading: from and to disks, and by copies to and from a GPU; and by this rank
  // to others.
  int64_t read_bytes = 0, written_bytes = 0;
  int64_t to_device_bytes = 0, from_device_bytes = 0;
  int64_t sent_bytes = 0, between_machines_bytes = 0;
  // Of the time of that I/O (and, on a GPU, of copies to it and from it), hidden behind compute. On a GPU of
  // what was over at the step's check; the rest counts for the next row.
  double hidden_pct = 100;
  double disk_seconds = 0;  // in which some transfer of a disk was under way; not in the file
  double wait_seconds = 0;  // in which compute waited for transfers; not in the file
};

// Share of I/O's time that compute did not wait for; 100 when nothing moved.
double hidden_pct(double busy_seconds, double wait_seconds);

class MetricsFile {
 public:
  // "": a rank that leaves its rows to another. Throws Error(21) when it cannot be written. The same numbers
  // go to `events`, which may be null.
  explicit MetricsFile(std::string path, EventFile* events = nullptr);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void write(const StepRow& row);
  void write_sample(int64_t step, const std::string& prompt, const std::string& answer);
  // `set`: of several evaluation sets the name, else "".
  void write_eval(int64_t step, double eval_loss, int64_t target_tokens, const std::string& set = "");
  // Keeps the first `bytes`, rows of an earlier start, and goes on behind them. Where fewer are left (a power
  // cut) the whole rows of these stay.
  void keep(int64_t bytes);
  // Its length, which is on the disk when this returns.
  int64_t sync();

 private:
  void write_line(const std::string& line);
  [[noreturn]] void fail(const std::string& what) const;  // errno says why
  std::string path_;
  std::FILE* file_ = nullptr;
  EventFile* events_;
};

// GPU memory that this process has allocated now, by itself and by LibTorch's allocator (what that holds,
// used or not). The plan's device bytes mean the same and more: its reserve also covers the driver's context
// and what libraries keep there, which is not in here. 0 on the CPU.
int64_t device_bytes();
// Resident memory of this process now, and at its peak.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace lm
