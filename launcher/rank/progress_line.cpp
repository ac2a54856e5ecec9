#include "launcher/rank/progress_line.h"

#include <unistd.h>

#include <cstdio>
#include <limits>

#include "base/bytes.h"
#include "base/log.h"

namespace lm {
namespace {

struct Part {
  std::string text;
  int rank;  // the lower, the sooner it gets its place; 0: stays
};

template <class... Values>
std::string print(const char* format, Values... values) {
  char text[400];  // %f of the largest double has 309 digits
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

}  // namespace

std::string duration_text(double seconds) {
  const auto s = static_cast<long>(seconds);
  if (s >= 3600) return print("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  return print("%ld:%02ld", s / 60, s % 60);
}

std::string progress_line(const StepView& view, int columns) {
  const auto in = [](const char* what, double seconds) {
    return seconds < 0 ? "" : std::string("  ") + what + " " + duration_text(seconds);
  };
  const Part parts[] = {{print("step %ld/%ld", view.step, view.total), 0},
                        {print("  loss %.4f", view.loss), 0},
                        {print("  norm %.3f", view.grad_norm), 7},
                        {print("  lr %.2e", view.lr), 8},
                        {print("  %.0f tokens/s", view.tokens_per_s), 2},
                        {print("  %.0f%% of limit", view.sol_pct), 4},
                        {"  " + format_bytes(view.memory_bytes), 3},
                        {in("eval", view.seconds_to_eval), 5},
                        {in("save", view.seconds_to_save), 6},
                        {in("left", view.seconds_left), 1}};
  const auto room = static_cast<size_t>(columns);
  size_t taken = 0;
  bool shown[std::size(parts)] = {};
  for (int rank = 0; rank <= 8; ++rank) {
    for (size_t i = 0; i < std::size(parts); ++i) {
      if (parts[i].rank != rank || (rank > 0 && taken + parts[i].text.size() > room)) continue;
      shown[i] = true;
      taken += parts[i].text.size();
    }
  }
  std::string line;
  for (size_t i = 0; i < std::size(parts); ++i) line += shown[i] ? parts[i].text : "";
  return line.substr(0, room);
}

std::string progress_line(const StepView& view) {
  return progress_line(view, std::numeric_limits<int>::max());
}

void show_step(const StepView& view, int64_t every) {
  const bool due = view.step % every == 0 || view.step == view.total;
  if (isatty(STDERR_FILENO) == 0) {
    if (due) log_line(progress_line(view));
    return;
  }
  show_line(progress_line(view, line_columns()));
  if (due) log_file_line(progress_line(view));
}

}  // namespace lm
