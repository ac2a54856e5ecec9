// What a plan is made from beside the configuration, as the files say it: model directory, spec, adapter and
// layout. The door's plan and the rank's are made from the same. Values.
#pragma once

#include <optional>
#include <string>

#include "launcher/environment.h"
#include "plan/plan.h"

namespace lm {

struct PlannedModel {
  std::string directory;  // resolved from model.path
  ModelSpec spec;
  std::optional<AdapterSpec> adapter;  // train.method = "lora"
  ModelLayout layout;

  const AdapterSpec* adapter_spec() const { return adapter ? &*adapter : nullptr; }
  // Borrows both.
  PlanInputs inputs(const Config& config, DeviceType device) const {
    return {config, spec, adapter_spec(), layout, device};
  }
};

// Reads config.json, and adapter_config.json where an adapter is continued. Throws Error(10, 11).
PlannedModel open_model(const Config& config, const Environment& environment);

}  // namespace lm
