// What else this machine could train the model with: full fine-tuning, adapters, adapters of a quantized
// base, each of them with each optimizer and master; updates after backward or inside it; with a disk or
// without; every one of them planned as the run itself would be. For `lmlaunch plan --compare`, and for what
// a refusal advises. Pure.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace lm {

struct Alternative {
  // "table.key=value", to be set beside the configuration; none: the configuration as it is.
  std::vector<std::string> settings;
  Config config;  // with them
  Plan plan;
  std::string method;      // "full", "lora", "qlora", "ia3", "norms"
  std::string rule;        // of the optimizer
  double weight_bits = 0;  // of the transformer's matrices, each
  double state_bits = 0;   // of optimizer state with its master, per trained weight
  double tokens_per_second() const;
  std::string setting_text() const;  // one line, "as it is" for none
};

// Those that fit first, of them the cheapest, in seconds of a token, first; of those that do not fit first
// what needs least. What takes a disk is there only where it does not fit without one. Adapters are updated
// when the configuration says: their gradients are less than a hundredth of the rest.
std::vector<Alternative> alternatives(const PlanInputs& inputs, const Machine& machine, const World& world);

// Without those that are beaten by another one of their method, which fits, is as fast and keeps as many
// bits.
std::vector<Alternative> best_alternatives(std::vector<Alternative> all);

// What a refusal advises: the best two of each method that fit, the fastest first, each planned as above.
// Which ones these are is chosen by plans that compare no levels of recomputation: there are too many.
std::vector<Alternative> advised_alternatives(const PlanInputs& inputs, const Machine& machine,
                                              const World& world);
// Their settings and rates; "" for none.
std::string name_alternatives(const std::vector<Alternative>& rows);

// A table for people, `most` rows, and an array for programs.
std::string print_alternatives(const std::vector<Alternative>& rows, size_t most);
std::string alternatives_json(const std::vector<Alternative>& rows);

}  // namespace lm
