#include "export/each_expert.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "export/target_parameters.h"

namespace lm {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& next) {
  throw Error(Exit::kInput, {.area = "FILE-27",
                             .what = "--each-expert: " + what,
                             .place = "",
                             .next = next,
                             .kept = "nothing was written"});
}

std::string last_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// The names of a pair's half, one for each part of the matrix that it belongs to; the modules join `targets`.
std::vector<ParameterPart> named_by(const Parameter& matrix, const Parameter& half, bool a,
                                    std::vector<std::string>& targets) {
  constexpr std::string_view kWeight = ".weight";
  std::vector<ParameterPart> out;
  for (const ParameterPart& part : matrix.parts) {
    if (!part.file.empty())
      refuse("the base's files have one tensor for all experts, " + part.file,
             "leave --each-expert out, or merge the adapter: --merge");
    const std::string path = part.name.substr(0, part.name.size() - kWeight.size());
    const std::string end = a ? ".lora_A.weight" : ".lora_B.weight";
    out.push_back({.name = std::string(kAdapterPrefix) + path + end,
                   .first = a ? 0 : part.first,
                   .rows = a ? half.rows : part.rows});
    if (std::ranges::find(targets, last_name(path)) == targets.end()) targets.push_back(last_name(path));
  }
  return out;
}

}  // namespace

EachExpert each_expert(const AdapterSpec& spec, const ModelLayout& layout) {
  const TargetParameters stacks(layout);
  if (stacks.empty()) refuse("the adapter has no pairs of experts", "leave it out");
  EachExpert out{spec, layout};
  std::erase_if(out.spec.targets, [&](const std::string& target) { return stacks.names(target); });
  for (BlockLayout& block : out.layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      Parameter& half = block.tensors[entry.tensor].parameter;
      const bool a = entry.role == TrainableRole::kLoraA;
      if (!half.of_expert() || (!a && entry.role != TrainableRole::kLoraB)) continue;
      half.parts = named_by(block.owner_of(entry), half, a, out.spec.targets);
    }
  }
  return out;
}

}  // namespace lm
