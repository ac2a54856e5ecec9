#include "launcher/report/curves.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

namespace lm {
namespace {

// Six digits are more than a screen shows, and a third of the bytes of seventeen.
Json rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::strtod(text, nullptr);
}

// Null if it is missing or was not finite, which JSON cannot express.
std::optional<double> number(const Json& row, const char* name) {
  const auto found = row.find(name);
  return found != row.end() && found->is_number() ? std::optional(found->get<double>()) : std::nullopt;
}

constexpr std::string_view kEval = "eval_loss", kEvalOfSet = "eval_loss/";
constexpr const char* kAccuracy = "token_accuracy";
constexpr std::string_view kGenerated = "generate_";

// The key of an eval loss; "" if the row has none.
std::string loss_key(const Json& row) {
  for (const auto& [key, value] : row.items()) {
    if (key == kEval || key.starts_with(kEvalOfSet)) return key;
  }
  return "";
}

}  // namespace

void Curves::Spread::add(const Spread& other) {
  if (other.count == 0) return;
  least = count == 0 ? other.least : std::min(least, other.least);
  most = count == 0 ? other.most : std::max(most, other.most);
  count += other.count;
  sum += other.sum;
}

void Curves::start_anew() {
  *this = Curves(path_);
}

void Curves::read() {
  std::error_code error;
  const auto size = std::filesystem::file_size(path_, error);
  if (error || static_cast<int64_t>(size) < read_) start_anew();
  if (error) return;
  std::ifstream file(path_, std::ios::binary);
  file.seekg(read_);
  for (std::string line; std::getline(file, line);) {
    if (file.eof()) break;  // the last line is still incomplete
    read_ += std::ssize(line) + 1;
    add_row(line);
  }
}

void Curves::add_row(const std::string& line) {
  const Json row = Json::parse(line, nullptr, false);
  if (!row.is_object()) return;
  const auto step = number(row, "step");
  if (!step) return;
  ++rows_;
  if (const std::string key = loss_key(row); !key.empty()) {
    const std::string set = key == kEval ? "" : key.substr(kEvalOfSet.size());
    const std::string accuracy = set.empty() ? kAccuracy : std::string(kAccuracy) + "/" + set;
    add_evaluation(static_cast<int64_t>(*step), set, number(row, key.c_str()), number(row, accuracy.c_str()));
    add_scores(static_cast<int64_t>(*step), row);
  } else if (row.contains("prompt")) {
    add_answer(static_cast<int64_t>(*step), row);
  } else {
    add_step(static_cast<int64_t>(*step), row);
  }
}

void Curves::add_evaluation(int64_t step, const std::string& set, std::optional<double> loss,
                            std::optional<double> accuracy) {
  auto found = std::ranges::find_if(evaluations_, [&](const auto& one) { return one.first == set; });
  if (found == evaluations_.end()) found = evaluations_.insert(found, {set, {}});
  if (loss) found->second.push_back({step, *loss, accuracy});
}

void Curves::add_scores(int64_t step, const Json& row) {
  for (const auto& [key, value] : row.items()) {
    if (!key.starts_with(kGenerated) || !value.is_number()) continue;
    const std::string name = key.substr(kGenerated.size());
    auto found = std::ranges::find_if(scores_, [&](const auto& one) { return one.first == name; });
    if (found == scores_.end()) found = scores_.insert(found, {name, {}});
    found->second.emplace_back(step, value.get<double>());
  }
}

void Curves::add_answer(int64_t step, const Json& row) {
  const auto text = [&](const char* key) {
    const auto found = row.find(key);
    return found != row.end() && found->is_string() ? found->get<std::string>().substr(0, kMostAnswerText)
                                                    : std::string();
  };
  const bool first = first_answers_.size() < kMostAnswers;
  std::deque<Json>& to = first ? first_answers_ : last_answers_;
  to.push_back({step, text("prompt"), text("answer")});
  if (to.size() > kMostAnswers) to.pop_front();
}

void Curves::add_step(int64_t step, const Json& row) {
  Point point{.step = step, .of = {}};
  for (size_t s = 0; s < kSeries.size(); ++s) {
    if (const auto value = number(row, kSeries[s])) point.of[s] = {1, *value, *value, *value};
  }
  const auto merge = [](Point& into, const Point& from) {
    into.step = std::max(into.step, from.step);
    for (size_t s = 0; s < kSeries.size(); ++s) into.of[s].add(from.of[s]);
  };
  merge(whole_, point);
  skipped_ += row.contains("skipped") && row["skipped"] == true;
  tokens_ += number(row, "tokens").value_or(0);
  if (const auto loss = number(row, "loss")) last_loss_ = loss;
  const double bytes = number(row, "read_bytes").value_or(0) + number(row, "written_bytes").value_or(0);
  const double busy = number(row, "device_bytes").value_or(0) > 0 ? std::max(bytes, 1.0) : bytes;
  moving_ += busy;
  hidden_ += busy * number(row, "hidden_pct").value_or(0);
  // A point covers width_ steps; if there are too many points, two neighbours become one.
  const auto add = [&](std::vector<Point>& to, const Point& one) {
    const bool same = !to.empty() && (to.back().step - 1) / width_ == (one.step - 1) / width_;
    same ? merge(to.back(), one) : to.push_back(one);
  };
  add(points_, point);
  if (std::ssize(points_) <= kMostPoints) return;
  width_ *= 2;
  std::vector<Point> fewer;
  for (const Point& one : points_) add(fewer, one);
  points_ = std::move(fewer);
}

Json Curves::series() const {
  Json out = {{"step", Json::array()}};
  for (const Point& point : points_) out["step"].push_back(point.step);
  for (size_t s = 0; s < kSeries.size(); ++s) {
    Json& values = out[kSeries[s]] = Json::array();
    for (const Point& point : points_) {
      const Spread& of = point.of[s];
      if (of.count == 0) {
        values.push_back(nullptr);
      } else if (of.least == of.most) {
        values.push_back(rounded(of.least));
      } else {
        values.push_back(
            {rounded(of.sum / static_cast<double>(of.count)), rounded(of.least), rounded(of.most)});
      }
    }
  }
  return out;
}

Json Curves::evaluations() const {
  // Every n-th point of a long run, and the last.
  Json out = Json::array();
  for (const auto& [set, losses] : evaluations_) {
    const size_t count = losses.size(), every = count / kMostPoints + 1;
    Json points = Json::array();
    for (size_t i = 0; i < count; ++i) {
      if (i % every != 0 && i + 1 != count) continue;
      const auto& [step, loss, accuracy] = losses[i];
      Json point = {step, rounded(loss)};
      if (accuracy) point.push_back(rounded(*accuracy));
      points.push_back(std::move(point));
    }
    out.push_back({{"set", set}, {"points", std::move(points)}});
  }
  return out;
}

Json Curves::scores() const {
  Json out = Json::array();
  for (const auto& [name, values] : scores_) {
    const size_t count = values.size(), every = count / kMostPoints + 1;
    Json points = Json::array();
    for (size_t i = 0; i < count; ++i) {
      if (i % every != 0 && i + 1 != count) continue;
      points.push_back({values[i].first, rounded(values[i].second)});
    }
    out.push_back({{"name", name}, {"points", std::move(points)}});
  }
  return out;
}

Json Curves::answers() const {
  Json out = Json::array();
  for (const std::deque<Json>* rows : {&first_answers_, &last_answers_}) {
    for (const Json& row : *rows) out.push_back(row);
  }
  return out;
}

Json Curves::totals() const {
  const auto of = [&](const char* name) -> const Spread& {
    return whole_
        .of[static_cast<size_t>(std::ranges::find(kSeries, std::string_view(name)) - kSeries.begin())];
  };
  const double seconds = of("step_ms").sum / 1e3, steps = static_cast<double>(of("step_ms").count);
  const auto mean = [](const Spread& spread) {
    return spread.count > 0 ? rounded(spread.sum / static_cast<double>(spread.count)) : Json();
  };
  return {{"tokens", tokens_},
          {"seconds", rounded(seconds)},
          {"step_seconds", steps > 0 ? rounded(seconds / steps) : Json()},
          {"tokens_per_s", seconds > 0 ? rounded(tokens_ / seconds) : Json()},
          {"sol_pct", mean(of("sol_pct"))},
          {"data_seconds", rounded(of("data_ms").sum / 1e3)},
          {"mean_host_bytes", mean(of("host_bytes"))},
          {"mean_device_bytes", mean(of("device_bytes"))},
          {"host_bytes", of("host_bytes").most},
          {"device_bytes", of("device_bytes").most},
          {"disk_bytes", of("disk_bytes").most},
          {"read_bytes", of("read_bytes").sum},
          {"written_bytes", of("written_bytes").sum},
          {"to_device_bytes", of("to_device_bytes").sum},
          {"from_device_bytes", of("from_device_bytes").sum},
          {"sent_bytes", of("sent_bytes").sum},
          {"routed_bytes", of("routed_bytes").sum},
          {"hidden_pct", moving_ > 0 ? rounded(hidden_ / moving_) : Json(100)},
          {"skipped", skipped_},
          {"last_loss", last_loss_ ? rounded(*last_loss_) : Json()}};
}

}  // namespace lm
