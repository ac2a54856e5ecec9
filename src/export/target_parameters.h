// peft's target_parameters of an adapter: the parameters of experts that have pairs (spec/expert_adapters.h).
// Values; any thread.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "spec/block_layout.h"

namespace lm {

class TargetParameters {
 public:
  explicit TargetParameters(const ModelLayout& layout);
  bool empty() const { return paths_.empty(); }
  // Whether a target of the adapter is one of these parameters, and not a module.
  bool names(const std::string& target) const;
  // null where there are none. peft looks for them in all layers: where only some have pairs, whole paths.
  // `wrapped`: with the names of the wrapper's class.
  Json names_for_peft(const AdapterSpec& spec, bool wrapped) const;

 private:
  std::vector<std::string> paths_;
};

}  // namespace lm
