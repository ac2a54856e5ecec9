// metrics.jsonl: one object per optimizer step, numbers with enough digits to round-trip, flushed row by row;
// the process's resident memory, which is host_bytes of plan and metrics; and its GPU memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "base/batch.h"
#include "data/choices.h"
#include "plan/predict.h"
#include "train/event_file.h"
#include "train/objectives/objective.h"

namespace lm {

// The necessary work of a step's batches: rows without a target skip the head, and attention stays inside a
// document.
StepWork work_of(const StepBatches& batches);

struct StepRow {
  int64_t step = 0;
  double epoch = 0;  // of the data seen so far, with this step's
  double loss = 0;
  NamedColumns columns = {};  // the objective's
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false;
  std::string fault;  // the reason of a skipped step, for the log
  int64_t target_tokens = 0;
  int64_t tokens = 0;
  double step_ms = 0;
  double data_ms = 0;  // of it, waiting for the batches (data/prefetch.h)
  double tokens_per_s = 0;
  double sol_pct = 0;        // utilization: time of the step's necessary FLOP at peak rate / measured time
  int64_t device_bytes = 0;  // device_bytes(), the peak so far
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;  // of state on disks
  // Since the previous row, by offloading: from and to disks, and by copies to and from a GPU; and sent by
  // this rank to others.
  int64_t read_bytes = 0, written_bytes = 0;
  int64_t to_device_bytes = 0, from_device_bytes = 0;
  int64_t sent_bytes = 0, between_machines_bytes = 0;
  // Percentage of the time of that I/O (and, on a GPU, of copies to and from it) hidden behind compute. On a
  // GPU it covers transfers finished at the step's check; the others count in the next row.
  double hidden_pct = 100;
  double disk_seconds = 0;  // with a disk transfer in flight; not in the file
  double wait_seconds = 0;  // of compute waiting for transfers; not in the file
};

// Percentage of I/O time during which compute did not wait; 100 without I/O.
double hidden_pct(double busy_seconds, double wait_seconds);

class MetricsFile {
 public:
  // "": this rank writes no rows, another one does. Throws Error(21) if it cannot be written. The same
  // numbers go to `events`, which may be null.
  explicit MetricsFile(std::string path, EventFile* events = nullptr);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void write(const StepRow& row);
  void write_sample(int64_t step, const std::string& prompt, const std::string& answer);
  // `set`: the name of the evaluation set if there are several, else "". `choices`: of one of choices.
  // `columns`: of a head of scores.
  void write_eval(int64_t step, double eval_loss, int64_t target_tokens, const std::string& set = "",
                  const std::optional<ChoiceScores>& choices = std::nullopt,
                  const NamedColumns& columns = {});
  // Keeps the first `bytes`, rows of an earlier start, and appends to them. If fewer are left (a power cut),
  // keeps the complete rows.
  void keep(int64_t bytes);
  // Makes the file durable and returns its length.
  int64_t sync();

 private:
  void write_line(const std::string& line);
  [[noreturn]] void fail(const std::string& what) const;  // the reason is in errno
  std::string path_;
  std::FILE* file_ = nullptr;
  EventFile* events_;
};

// GPU memory that this process has allocated now, itself and by LibTorch's allocator (its reserved memory,
// used or not). The plan's device bytes include more: its reserve also covers the driver's context and memory
// of libraries, which are not counted here. 0 on the CPU.
int64_t device_bytes();
// Resident memory of this process now, and at its peak.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace lm
