#include "launcher/rank/progress_line.h"

#include <unistd.h>

#include <cstdio>
#include <limits>
#include <vector>

#include "base/log.h"

namespace lm {
namespace {

struct Part {
  std::string text;
  int leaves;  // the highest goes first; 0: stays
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
  std::vector<Part> parts = {{print("step %ld/%ld", view.step, view.total), 0},
                             {print("  loss %.4f", view.loss), 0},
                             {print("  norm %.3f", view.grad_norm), 3},
                             {print("  lr %.2e", view.lr), 4},
                             {print("  %.0f tokens/s", view.tokens_per_s), 2},
                             {print("  %.0f%% of speed of light", view.sol_pct), 5},
                             {"  left " + duration_text(view.seconds_left), 1}};
  std::string line;
  for (int most = 5; most >= 0; --most) {
    line.clear();
    for (const Part& part : parts) line += part.leaves <= most ? part.text : "";
    if (line.size() <= static_cast<size_t>(columns)) return line;
  }
  return line.substr(0, static_cast<size_t>(columns));
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
