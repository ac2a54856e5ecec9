// One step as a line of text.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// Values of the line. Seconds below 0: none is due.
struct StepView {
  int64_t step = 0, total = 0;
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, sol_pct = 0;
  int64_t memory_bytes = 0;  // of the GPU where one computes, else of the process
  double seconds_left = 0, seconds_to_eval = -1, seconds_to_save = -1;
};

// "step 12/100  loss 2.1234  ...  left 0:41" in at most `columns`. On a narrow terminal first the learning
// rate and then the norm are left out. Then words and numbers are shortened ("45% hw"); 80 columns then show
// everything else of most runs. Then these are left out, in this order: the later of the next evaluation and
// the next save, the other one, utilization, memory, tokens per second, and the time left.
std::string progress_line(const StepView& view, int columns);
// The full line, for files.
std::string progress_line(const StepView& view);

// "0:41", "1:02:03".
std::string duration_text(double seconds);

// Prints a step: a terminal's bottom line is redrawn at each step; log.txt and a pipe get a line every
// `every` steps and at the last.
void show_step(const StepView& view, int64_t every);

}  // namespace lm
