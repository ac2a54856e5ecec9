#include "launcher/worker/progress_line.h"

#include <unistd.h>

#include <cstdio>
#include <limits>

#include "base/bytes.h"
#include "base/log.h"

namespace lm {
namespace {

struct Part {
  std::string full, brief;
  int rank;  // parts with a higher rank are left out first; 0: stays
};

template <class... Values>
std::string print(const char* format, Values... values) {
  char text[400];  // %f of the largest double has 309 digits
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// "41s", "12m", "1h02m", "3d04h".
std::string brief_duration(double seconds) {
  const auto s = static_cast<long>(seconds);
  if (s >= 86400) return print("%ldd%02ldh", s / 86400, s / 3600 % 24);
  if (s >= 3600) return print("%ldh%02ldm", s / 3600, s / 60 % 60);
  return s >= 60 ? print("%ldm", s / 60) : print("%lds", s);
}

// "950", "12.3k", "1.2M".
std::string brief_count(double count) {
  if (count < 999.5) return print("%.0f", count);
  return count < 999950 ? print("%.1fk", count / 1e3) : print("%.1fM", count / 1e6);
}

Part moment(const char* what, double seconds, int rank) {
  if (seconds < 0) return {"", "", rank};
  const std::string word = std::string(what) + " ";
  return {word + duration_text(seconds), word + brief_duration(seconds), rank};
}

}  // namespace

std::string duration_text(double seconds) {
  const auto s = static_cast<long>(seconds);
  if (s >= 3600) return print("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  return print("%ld:%02ld", s / 60, s % 60);
}

std::string progress_line(const StepView& view, int columns) {
  const bool eval_first = view.seconds_to_save < 0 || view.seconds_to_eval <= view.seconds_to_save;
  const double gib = static_cast<double>(view.memory_bytes) / static_cast<double>(kGiB);
  const Part parts[] = {
      {print("step %ld/%ld", view.step, view.total), print("%ld/%ld", view.step, view.total), 0},
      {print("loss %.4f", view.loss), print("loss %.3f", view.loss), 0},
      {print("norm %.3f", view.grad_norm), "", 7},
      {print("lr %.2e", view.lr), "", 8},
      {print("%.0f tokens/s", view.tokens_per_s), brief_count(view.tokens_per_s) + " tok/s", 2},
      {print("%.0f%% utilization", view.sol_pct), print("%.0f%% hw", view.sol_pct), 4},
      {format_bytes(view.memory_bytes), print("%.1fGiB", gib), 3},
      moment("eval", view.seconds_to_eval, eval_first ? 5 : 6),
      moment("save", view.seconds_to_save, eval_first ? 6 : 5),
      moment("left", view.seconds_left, 1)};
  const auto line = [&](bool brief, const char* gap, int most) {
    std::string out;
    for (const Part& part : parts) {
      const std::string& text = brief ? part.brief : part.full;
      if (part.rank <= most && !text.empty()) out += (out.empty() ? "" : gap) + text;
    }
    return out;
  };
  const auto room = static_cast<size_t>(columns);
  for (int most = 8; most >= 6; --most)
    if (std::string out = line(false, "  ", most); out.size() <= room) return out;
  if (std::string out = line(true, "  ", 6); out.size() <= room) return out;
  for (int most = 6; most > 0; --most)
    if (std::string out = line(true, " ", most); out.size() <= room) return out;
  return line(true, " ", 0).substr(0, room);
}

std::string progress_line(const StepView& view) {
  return progress_line(view, std::numeric_limits<int>::max());
}

void show_step(const StepView& view, int64_t every) {
  const bool due = view.step % every == 0 || view.step == view.total;
  if (logs_json() || isatty(STDERR_FILENO) == 0) {
    if (due)
      log_fields(progress_line(view), {{"step", view.step},
                                       {"total_steps", view.total},
                                       {"loss", view.loss},
                                       {"grad_norm", view.grad_norm},
                                       {"lr", view.lr},
                                       {"tokens_per_s", view.tokens_per_s}});
    return;
  }
  show_line(progress_line(view, line_columns()));
  if (due) log_file_line(progress_line(view));
}

}  // namespace lm
