// One step as a line for people.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// What the line tells of a step. Seconds below 0: there is nothing to come.
struct StepView {
  int64_t step = 0, total = 0;
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, sol_pct = 0;
  int64_t memory_bytes = 0;  // of the GPU where one computes, else of the process
  double seconds_left = 0, seconds_to_eval = -1, seconds_to_save = -1;
};

// "step 12/100  loss 2.1234  ...  left 0:41" in at most `columns`. Where they are few, the learning rate and
// then the norm are left out; then words and numbers become short ("45% hw"), which shows in 80 columns all
// else of most runs; then what matters least is left out: the later of the next evaluation and the next save,
// the other, the share of the hardware's limit, memory, tokens per second, and the time left.
std::string progress_line(const StepView& view, int columns);
// With everything, for files.
std::string progress_line(const StepView& view);

// "0:41", "1:02:03".
std::string duration_text(double seconds);

// Tells people of a step: a terminal's bottom line is redrawn at each, log.txt and a pipe get one line every
// `every` steps and at the last.
void show_step(const StepView& view, int64_t every);

}  // namespace lm
