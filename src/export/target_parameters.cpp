#include "export/target_parameters.h"

#include <algorithm>
#include <set>

#include "spec/adapter_sites.h"
#include "weights/tensor_names.h"

namespace lm {

TargetParameters::TargetParameters(const ModelLayout& layout) {
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      const Parameter& parameter = block.tensors[entry.tensor].parameter;
      if (entry.role != TrainableRole::kLoraA || !parameter.parts.front().flat) continue;
      if (paths_.empty() || paths_.back() != parameter.site) paths_.push_back(parameter.site);
    }
  }
}

bool TargetParameters::names(const std::string& target) const {
  return std::ranges::any_of(paths_, [&](const std::string& path) { return names_module(target, path); });
}

Json TargetParameters::names_for_peft(const AdapterSpec& spec, bool wrapped) const {
  if (paths_.empty()) return nullptr;
  std::set<std::string> out;
  for (const std::string& path : paths_) {
    const bool everywhere =
        spec.layers.empty() && std::ranges::find(spec.targets, path) == spec.targets.end();
    const size_t module = path.rfind('.', path.rfind('.') - 1);  // before "experts.down_proj"
    const std::string in_layer = path.substr(path.rfind('.', module - 1) + 1);
    out.insert(everywhere ? in_layer : wrapped ? wrapped_name(path) : path);
  }
  return out;
}

}  // namespace lm
