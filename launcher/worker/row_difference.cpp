#include "launcher/worker/row_difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// Rows of a file, step by step.
class StepRows {
 public:
  explicit StepRows(const std::string& path) : path_(path), file_(path, std::ios::binary) { read(); }

  bool done() const { return !row_; }
  int64_t step() const { return step_; }
  int64_t last() const { return last_; }

  // The rows of the present step; the next step becomes the present one.
  std::vector<Json> take() {
    std::vector<Json> out;
    const int64_t step = step_;
    while (row_ && step_ == step) {
      out.push_back(std::move(*row_));
      read();
    }
    return out;
  }

 private:
  void read() {
    row_.reset();
    std::string line;
    if (!std::getline(file_, line) || file_.eof()) return;  // the last line may be incomplete
    ++line_;
    Json row = Json::parse(line, nullptr, false);
    const auto step = row.is_object() ? row.find("step") : row.end();
    if (!row.is_object() || step == row.end() || !step->is_number_integer())
      throw Error(Exit::kInput, {.area = "FILE-21",
                                 .what = "not a row of metrics: it is no JSON object with a step",
                                 .place = fmt::format("{}:{}", path_, line_),
                                 .next = "compare another run, or remove this line"});
    step_ = last_ = step->get<int64_t>();
    row_ = std::move(row);
  }

  std::string path_;
  std::ifstream file_;
  std::optional<Json> row_;
  int64_t line_ = 0, step_ = 0, last_ = 0;
};

// What a row is about: "" for a training step.
std::string subject_of(const Json& row) {
  if (row.contains("prompt")) return "answer to " + row["prompt"].dump();
  for (const auto& [key, value] : row.items()) {
    if (key == "eval_loss" || key.starts_with("eval_loss/")) return key;
  }
  return "";
}

std::optional<double> relative_difference(const Json& a, const Json& b) {
  if (!a.is_number() || !b.is_number()) return std::nullopt;
  const auto x = a.get<double>(), y = b.get<double>();
  const double most = std::max(std::abs(x), std::abs(y));
  return most > 0 ? std::optional(std::abs(x - y) / most) : std::nullopt;
}

// The columns that both rows have, as text: numbers in metrics.jsonl have all their digits.
void compare_columns(const Json& a, const Json& b, const std::string& subject,
                     std::vector<ColumnDifference>& out) {
  const auto add = [&](const std::string& key, const Json& x, const Json& y) {
    if (x.dump(-1, ' ', false, Json::error_handler_t::replace) ==
        y.dump(-1, ' ', false, Json::error_handler_t::replace))
      return;
    const bool own = subject.empty() || key == subject || key == "answer";
    const std::string name = !own ? key + " of " + subject : key == "answer" ? subject : key;
    out.push_back({name, {x, y}, relative_difference(x, y)});
  };
  for (const auto& [key, value] : a.items()) {
    if (is_computed(key) && b.contains(key)) add(key, value, b[key]);
  }
  // Only skipped steps have one of these columns.
  for (const char* const key : {"skipped", "overflow"}) {
    if (a.contains(key) != b.contains(key)) add(key, a.value(key, false), b.value(key, false));
  }
}

std::vector<ColumnDifference> compare_step(const std::vector<Json>& a, const std::vector<Json>& b) {
  std::vector<ColumnDifference> out;
  for (const Json& row : a) {
    const std::string subject = subject_of(row);
    const auto other = std::ranges::find(b, subject, subject_of);
    if (other != b.end()) compare_columns(row, *other, subject, out);
  }
  // The loss first: the columns of a JSON object are sorted by name.
  std::ranges::stable_partition(out, [](const ColumnDifference& one) { return one.name == "loss"; });
  return out;
}

}  // namespace

bool is_computed(std::string_view column) {
  for (const char* unit : {"_ms", "_per_s", "_bytes", "_pct"}) {
    if (column.ends_with(unit)) return false;
  }
  return column != "step" && column != "time";
}

RowDifference compare_rows(const std::string& a, const std::string& b) {
  RowDifference out;
  StepRows left(a), right(b);
  while (!left.done() && !right.done()) {
    if (left.step() != right.step()) {
      (left.step() < right.step() ? left : right).take();
      continue;
    }
    const int64_t step = left.step();
    std::vector<ColumnDifference> columns = compare_step(left.take(), right.take());
    out.compared += step > 0;
    out.last_compared = step;
    if (columns.empty()) continue;
    out.differ += step > 0;
    if (out.first) continue;
    out.first = step;
    out.columns = std::move(columns);
  }
  while (!left.done()) left.take();
  while (!right.done()) right.take();
  out.last = {left.last(), right.last()};
  return out;
}

}  // namespace lm
