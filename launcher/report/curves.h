// A run's rows of metrics.jsonl in bounded memory: each series as at most kMostPoints points, each for one
// step or, in a long run, for several (mean, minimum, maximum). A growing file is read on from where the last
// call ended. One thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"

namespace lm {

class Curves {
 public:
  static constexpr int64_t kMostPoints = 800;
  static constexpr size_t kMostAnswers = 16;       // of the first rows, and of the last
  static constexpr size_t kMostAnswerText = 2000;  // bytes of a prompt, and of an answer

  explicit Curves(std::string path) : path_(std::move(path)) {}

  // Reads the rows since the last call. A truncated file (its run was resumed from a checkpoint) is read
  // anew; a missing one has no rows.
  void read();

  Json series() const;  // {"step": [...], "loss": [1.2, [mean, least, most], null, ...], ...}
  // One entry for each evaluation set, in the order of their first rows; the first is the one that decides:
  // [{"set": "" or its name, "points": [[step, loss, token accuracy if it was recorded], ...]}, ...]
  Json evaluations() const;
  // Scores of answers to eval.generate.data: [{"name": "exact_match", "points": [[step, value], ...]}, ...]
  Json scores() const;
  Json answers() const;  // [[step, prompt, answer], ...] of the first and the last sample rows
  Json totals() const;   // of the whole run: tokens, seconds, bytes, peaks, means, skipped steps
  int64_t rows() const { return rows_; }

 private:
  static constexpr std::array kSeries = {"loss",
                                         "grad_norm",
                                         "lr",
                                         "tokens_per_s",
                                         "sol_pct",
                                         "step_ms",
                                         "data_ms",
                                         "host_bytes",
                                         "device_bytes",
                                         "disk_bytes",
                                         "read_bytes",
                                         "written_bytes",
                                         "hidden_pct",
                                         "to_device_bytes",
                                         "from_device_bytes",
                                         "sent_bytes",
                                         "routed_waits",
                                         "routed_bytes",
                                         "token_accuracy",
                                         "router_aux_loss",
                                         "expert_load_max",
                                         "expert_load_min",
                                         "router_entropy"};
  struct Spread {
    int64_t count = 0;
    double sum = 0, least = 0, most = 0;
    void add(const Spread& other);
  };
  struct Point {
    int64_t step = 0;  // its last step
    std::array<Spread, kSeries.size()> of;
  };

  void add_row(const std::string& line);
  void add_step(int64_t step, const Json& row);
  void add_evaluation(int64_t step, const std::string& set, std::optional<double> loss,
                      std::optional<double> accuracy);
  void add_scores(int64_t step, const Json& row);
  void add_answer(int64_t step, const Json& row);
  void start_anew();

  std::string path_;
  int64_t read_ = 0;  // bytes, up to the end of a line
  int64_t rows_ = 0, skipped_ = 0;
  int64_t width_ = 1;  // steps of a point
  std::vector<Point> points_;
  struct Evaluation {
    int64_t step = 0;
    double loss = 0;
    std::optional<double> accuracy;
  };
  std::vector<std::pair<std::string, std::vector<Evaluation>>> evaluations_;
  std::vector<std::pair<std::string, std::vector<std::pair<int64_t, double>>>> scores_;
  std::deque<Json> first_answers_, last_answers_;
  Point whole_;  // every step
  double tokens_ = 0, moving_ = 0, hidden_ = 0;
  std::optional<double> last_loss_;
};

}  // namespace lm
