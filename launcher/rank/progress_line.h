// One step as a line for people.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// What the line tells of a step.
struct StepView {
  int64_t step = 0, total = 0;
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, sol_pct = 0;
  double seconds_left = 0;
};

// "step 12/100  loss 2.1234  ...  left 0:41" in at most `columns`: what does not fit is left out, the share
// of the speed of light first, then learning rate, norm, tokens per second and the time left.
std::string progress_line(const StepView& view, int columns);
// With everything, for files.
std::string progress_line(const StepView& view);

// "0:41", "1:02:03".
std::string duration_text(double seconds);

// Tells people of a step: a terminal's bottom line is redrawn at each, log.txt and a pipe get one line every
// `every` steps and at the last.
void show_step(const StepView& view, int64_t every);

}  // namespace lm
