// A plan with a few settings changed: what comparisons, refusals and advice search among. Inside src/plan.
#pragma once

#include <functional>
#include <memory>
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

// What a configuration makes of a model where it is not the inputs' own: its adapter, its layout, and what
// was dry-run of these.
struct OtherModel {
  std::optional<AdapterSpec> adapter;
  ModelLayout layout;
  std::shared_ptr<DryRuns> dry_runs = std::make_shared<DryRuns>();
};

// Nothing where there is no such plan (LoRA targets that the model lacks). A bug of the planner is no
// property of a configuration: it is thrown. `kept`: where calls keep the other model whose settings differ
// in neither method, types nor adapter; the caller's, and it stays in its place.
std::optional<Alternative> plan_with(const PlanInput& in, const std::vector<Setting>& settings,
                                     Estimated estimated, std::optional<OtherModel>* kept = nullptr);

// A run of all weights may train adapters in their place: with new tokens only where [lora] trains their
// rows, too.
bool may_train_adapters(const Config& config);

// Some class may still be told to live on disk.
bool may_use_disk(const OffloadConfig& offload);

}  // namespace lm
