// metrics.jsonl: one object per optimizer step, numbers with enough digits to round-trip, flushed row by row;
// the process's resident memory, which is host_bytes of plan and metrics; and its GPU memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "base/batch.h"
#include "data/choices.h"
#include "plan/cost_model.h"
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
  // Share of target tokens that are the argmax of their logits; a head of scores has none.
  std::optional<double> token_accuracy = {};
  NamedColumns columns = {};  // the objective's
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false;
  std::string fault;  // the reason of a skipped step, for the log
  // For a model in fp16: the step's loss scale, and whether gradients exceeded the range with it. Such a step
  // is skipped and does not count as `skipped`.
  std::optional<double> loss_scale = {};
  bool overflow = false;
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
  // Of experts that are fetched once a router has chosen them (train/routed_experts.h); in the file where
  // there were some.
  int64_t routed_waits = 0, routed_bytes = 0;
  // Percentage of the time of that I/O (and, on a GPU, of copies to and from it) hidden behind compute. On a
  // GPU it covers transfers finished at the step's check; the others count in the next row.
  double hidden_pct = 100;
  double disk_seconds = 0;  // with a disk transfer in flight; not in the file
  double wait_seconds = 0;  // of compute waiting for transfers; not in the file
};

// Scores of the answers to eval.generate.data.
struct AnswerScores {
  NamedScores scores = {};  // {"exact_match", ...} and what eval.generate.command printed
  int64_t answers = 0;
};

// Over the eval set: the sum of weight * nll divided by that of the targets' weights, as in training. Of rows
// of choices only the right endings count, as in training.
struct EvalResult {
  double loss = 0;
  double token_accuracy = 0;  // as in StepRow
  int64_t target_tokens = 0;
  std::optional<ChoiceScores> choices = {};  // of a set of choices
  AnswerScores answers = {};                 // recorded beside the loss of the first set
  // For a head of scores: the loss is the objective's, `target_tokens` counts examples, and these are its
  // columns and figures. There is no token accuracy.
  bool scored = false;
  NamedColumns columns = {};
};

// {"token_accuracy", ...} and those of choices, or a head's columns: as they are recorded beside the loss.
NamedScores named_scores(const EvalResult& result);
// Line for a head of scores: "0.4312 over 200 examples, accuracy 0.8150, f1 0.8122".
std::string describe_scored(const EvalResult& result);
// {"generate_exact_match", ...}: likewise; they are of no set.
NamedScores named_scores(const AnswerScores& answers);
// "exact_match 0.2500, token_f1 0.4000 over 12 answers".
std::string describe(const AnswerScores& answers);

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
  // `set`: the name of the evaluation set if there are several, else "".
  void write_eval(int64_t step, const EvalResult& result, const std::string& set = "");
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
