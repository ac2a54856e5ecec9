#include "train/metrics.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/cuda.h"
#include "base/error.h"
#include "kernels/runtime.h"

namespace lm {

StepWork work_of(const StepBatches& batches) {
  StepWork work;
  for (const Batch& batch : batches.micro) {
    work.tokens += static_cast<double>(batch.tokens());
    for (const int32_t target : batch.target) work.target_rows += target >= 0;
    for (size_t d = 1; d < batch.document_start.size(); ++d) {
      const double length = batch.document_start[d] - batch.document_start[d - 1];
      work.squares += length * length;
    }
  }
  return work;
}

NamedScores named_scores(const EvalResult& result) {
  if (result.scored) return result.columns;
  NamedScores scores = {{"token_accuracy", result.token_accuracy}};
  if (!result.choices) return scores;
  for (const auto& score : named_scores(*result.choices)) scores.push_back(score);
  return scores;
}

std::string describe_scored(const EvalResult& result) {
  std::string out = fmt::format("{:.4f} over {} examples", result.loss, result.target_tokens);
  for (const auto& [name, value] : result.columns) out += fmt::format(", {} {:.4f}", name, value);
  return out;
}

NamedScores named_scores(const AnswerScores& answers) {
  NamedScores scores;
  for (const auto& [name, value] : answers.scores) scores.emplace_back("generate_" + name, value);
  return scores;
}

std::string describe(const AnswerScores& answers) {
  std::string out;
  for (const auto& [name, value] : answers.scores)
    out += fmt::format("{}{} {:.4f}", out.empty() ? "" : ", ", name, value);
  return fmt::format("{} over {} answer{}", out.empty() ? "no score" : out, answers.answers,
                     answers.answers == 1 ? "" : "s");
}

double hidden_pct(double busy_seconds, double wait_seconds) {
  return busy_seconds > 0 ? 100 * std::clamp(1 - wait_seconds / busy_seconds, 0.0, 1.0) : 100;
}

namespace {

// The step of the last of these complete rows; 0 if it is not one of ours.
int64_t last_step(const std::string& rows) {
  const size_t begin = rows.rfind('\n', rows.size() - 2) + 1;  // npos: the first row
  const nlohmann::json row = nlohmann::json::parse(rows.substr(begin), nullptr, false);
  return row.is_object() ? row.value("step", int64_t{0}) : 0;
}

}  // namespace

MetricsFile::MetricsFile(std::string path, EventFile* events) : path_(std::move(path)), events_(events) {
  if (path_.empty()) return;
  file_ = std::fopen(path_.c_str(), "a+e");
  if (file_ == nullptr) fail("cannot write");
}

void MetricsFile::keep(int64_t bytes) {
  if (file_ == nullptr) return;
  std::string text(static_cast<size_t>(bytes), '\0');
  if (std::fseek(file_, 0, SEEK_SET) != 0) fail("cannot read");
  text.resize(std::fread(text.data(), 1, text.size(), file_));
  const size_t rows = text.rfind('\n') + 1;  // npos: none
  if (ftruncate(fileno(file_), static_cast<off_t>(rows)) != 0 || std::fseek(file_, 0, SEEK_END) != 0)
    fail("cannot cut the file");
  if (events_ != nullptr) events_->go_on_after(rows > 0 ? last_step(text.substr(0, rows)) : -1);
}

void MetricsFile::fail(const std::string& what) const {
  throw Error(errno == ENOSPC ? Exit::kNoSpace : Exit::kIo,
              {.area = "IO-05",
               .what = what + ": " + std::strerror(errno),
               .place = path_,
               .next = "make the run directory writable, and free space on its file system"});
}

int64_t MetricsFile::sync() {
  if (file_ == nullptr) return 0;
  if (std::fflush(file_) != 0 || fdatasync(fileno(file_)) != 0) fail("cannot make rows durable");
  return std::ftell(file_);
}

MetricsFile::~MetricsFile() {
  if (file_ != nullptr) std::fclose(file_);
}

void MetricsFile::write_line(const std::string& line) {
  if (file_ == nullptr) return;
  if (std::fputs((line + "\n").c_str(), file_) < 0 || std::fflush(file_) != 0) fail("cannot append a row");
}

void MetricsFile::write(const StepRow& row) {
  nlohmann::ordered_json json = {{"step", row.step},
                                 {"epoch", row.epoch},
                                 {"loss", row.loss},
                                 {"grad_norm", row.grad_norm},
                                 {"lr", row.lr},
                                 {"target_tokens", row.target_tokens},
                                 {"tokens", row.tokens},
                                 {"step_ms", row.step_ms},
                                 {"data_ms", row.data_ms},
                                 {"tokens_per_s", row.tokens_per_s},
                                 {"sol_pct", row.sol_pct},
                                 {"device_bytes", row.device_bytes},
                                 {"host_bytes", row.host_bytes},
                                 {"disk_bytes", row.disk_bytes},
                                 {"read_bytes", row.read_bytes},
                                 {"written_bytes", row.written_bytes},
                                 {"to_device_bytes", row.to_device_bytes},
                                 {"from_device_bytes", row.from_device_bytes},
                                 {"sent_bytes", row.sent_bytes},
                                 {"hidden_pct", row.hidden_pct}};
  if (row.token_accuracy) json["token_accuracy"] = *row.token_accuracy;
  for (const auto& [name, value] : row.columns) json[name] = value;
  json["time"] = unix_seconds();
  if (row.between_machines_bytes > 0) json["between_machines_bytes"] = row.between_machines_bytes;
  if (row.routed_waits > 0) {
    json["routed_waits"] = row.routed_waits;
    json["routed_bytes"] = row.routed_bytes;
  }
  if (row.skipped) json["skipped"] = true;
  if (row.loss_scale) json["loss_scale"] = *row.loss_scale;
  if (row.overflow) json["overflow"] = true;
  write_line(json.dump());
  if (events_ == nullptr) return;
  std::vector<Scalar> scalars = {{"train/loss", row.loss},
                                 {"train/grad_norm", row.grad_norm},
                                 {"train/learning_rate", row.lr},
                                 {"train/epoch", row.epoch},
                                 {"train/train_tokens_per_second", row.tokens_per_s}};
  if (row.token_accuracy) scalars.push_back({"train/token_accuracy", *row.token_accuracy});
  events_->write(row.step, scalars);
}

void MetricsFile::write_eval(int64_t step, const EvalResult& result, const std::string& set) {
  const std::string key = set.empty() ? "eval_loss" : "eval_loss/" + set;
  nlohmann::ordered_json row = {
      {"step", step}, {key, result.loss}, {"target_tokens", result.target_tokens}, {"time", unix_seconds()}};
  // Transformers' names for losses of a dictionary of data sets.
  const std::string tag = set.empty() ? "eval/loss" : "eval/" + set + "_loss";
  std::vector<std::pair<std::string, double>> tagged = {{tag, result.loss}};
  for (const auto& [name, value] : named_scores(result)) {
    row[set.empty() ? name : name + "/" + set] = value;
    tagged.emplace_back(set.empty() ? "eval/" + name : "eval/" + set + "_" + name, value);
  }
  for (const auto& [name, value] : named_scores(result.answers)) {
    row[name] = value;
    tagged.emplace_back("eval/" + name, value);
  }
  write_line(row.dump());
  if (events_ == nullptr) return;
  std::vector<Scalar> scalars;
  for (const auto& [name, value] : tagged) scalars.push_back({name, value});
  events_->write(step, scalars);
}

void MetricsFile::write_sample(int64_t step, const std::string& prompt, const std::string& answer) {
  const nlohmann::ordered_json row = {
      {"step", step}, {"prompt", prompt}, {"answer", answer}, {"time", unix_seconds()}};
  write_line(row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

int64_t device_bytes() {
  return cuda_allocated_bytes() + library_device_bytes();
}

int64_t resident_bytes() {
  long pages = 0, ignored = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  const int read = std::fscanf(file, "%ld %ld", &ignored, &pages);
  std::fclose(file);
  return read == 2 ? pages * sysconf(_SC_PAGESIZE) : 0;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace lm
