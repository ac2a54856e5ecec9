// A plan with a few settings changed: what comparisons, refusals and advice search among. Inside src/plan.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/alternatives.h"
#include "plan/sizes.h"

namespace lm {

// What people are told to set, and what that does; none of either: as it is configured.
struct Setting {
  std::vector<std::string> text = {};
  std::function<void(Config&)> apply = {};
  int64_t saves = 0;  // bytes of the memory that is too small, alone
};

Config with_settings(Config config, const std::vector<Setting>& settings);

// Nothing where there is no such plan (LoRA targets that the model lacks). A bug of the planner is no
// property of a configuration: it is thrown.
std::optional<Alternative> plan_with(const PlanInput& in, const std::vector<Setting>& settings,
                                     Estimated estimated);

// A run of all weights may train adapters in their place: with new tokens only where [lora] trains their
// rows, too.
bool may_train_adapters(const Config& config);

// Some class may still be told to live on disk.
bool may_use_disk(const OffloadConfig& offload);

}  // namespace lm
