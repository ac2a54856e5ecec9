#include "spec/expert_adapters.h"

#include <fmt/format.h>
#include <map>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "spec/adapter_parameters.h"

namespace lm {
namespace {

// By the name of an expert's matrix, the tensor of the files that its rows begin with.
std::map<std::string, std::string> first_tensors(const ModelSpec& spec, int64_t i) {
  std::map<std::string, std::string> out;
  for (const LinearModule& module : linear_modules(spec, i))
    out.try_emplace(module.matrix, fmt::format("{}{}.{}.weight", spec.names.layers, i, module.path));
  return out;
}

// What an expert's pair has beside its names.
struct PairOf {
  const ExpertStack& stack;
  int64_t expert = 0, rank = 0;
  std::string ours;   // of the matrix
  std::string own;    // in checkpoints
  std::string file;   // of the wrapper, in the files
  std::string owner;  // the tensor that the matrix begins with
};

Parameter part_of_pair(const PairOf& pair, TrainableRole role) {
  const bool a = role == TrainableRole::kLoraA;
  const std::string end = a ? ".lora_A" : ".lora_B";
  Parameter out = single(pair.ours + end, ParameterKind::kMatrix, pair.own + end + ".weight",
                         a ? pair.rank : pair.stack.rows, a ? pair.stack.columns : pair.rank);
  out.role = role;
  out.owner = pair.owner;
  out.site = pair.stack.path;
  out.expert = pair.expert;
  ParameterPart& part = out.parts.front();
  part.file = pair.file + end + ".weight";
  if (a) {
    part.slice = pair.expert;
    part.slices = pair.stack.experts;
    part.flat = true;
  } else {
    part.column = pair.expert;
    part.step = pair.stack.experts;
    part.file_columns = pair.rank * pair.stack.experts;
  }
  return out;
}

}  // namespace

std::vector<ExpertStack> expert_stacks(const ModelSpec& spec, int64_t i) {
  const std::string_view module = spec.names.experts;
  const auto* const experts = spec.layer(i).find<ExpertsSpec>();
  if (module.empty() || experts == nullptr) return {};
  const auto stack = [&](const char* matrix, int64_t rows, int64_t columns) {
    const std::string name = fmt::format("experts.{}_proj", matrix);
    const std::string_view before = module.substr(0, module.rfind("experts"));
    return ExpertStack{.name = name,
                       .path = fmt::format("{}{}.{}{}", spec.names.layers, i, before, name),
                       .matrix = matrix,
                       .experts = experts->experts,
                       .rows = rows,
                       .columns = columns};
  };
  return {stack("gate_up", 2 * experts->ffn, spec.hidden), stack("down", spec.hidden, experts->ffn)};
}

bool adapts_experts(const ModelSpec& spec, const AdapterSpec& adapter) {
  if (adapter.kind != AdapterKind::kLora) return false;
  for (int64_t i = 0; i < spec.layer_count(); ++i)
    for (const ExpertStack& stack : expert_stacks(spec, i))
      if (adapter.adapts(i, stack.path)) return true;
  return false;
}

std::vector<Parameter> expert_adapters(const ModelSpec& spec, const AdapterSpec& adapter, int64_t i) {
  std::vector<ExpertStack> stacks = expert_stacks(spec, i);
  std::erase_if(stacks, [&](const ExpertStack& stack) { return !adapter.adapts(i, stack.path); });
  if (stacks.empty()) return {};
  const std::map<std::string, std::string> owners = first_tensors(spec, i);
  const std::string module =
      fmt::format("{}{}{}.{}", kAdapterPrefix, spec.names.layers, i, spec.names.experts);
  std::vector<Parameter> out;
  for (const ExpertStack& stack : stacks) {
    const bool inside = &stack != &stacks.back();
    for (int64_t e = 0; e < stack.experts; ++e) {
      const std::string matrix = expert_name(static_cast<size_t>(e), stack.matrix);
      const auto owner = owners.find(matrix);
      LM_CHECK(owner != owners.end(), matrix);
      const PairOf pair{.stack = stack,
                        .expert = e,
                        .rank = adapter.rank_of(stack.path),
                        .ours = fmt::format("layers.{}.{}", i, matrix),
                        .own = fmt::format("{}.{}.{}_proj", module, e, stack.matrix),
                        .file = module + (inside ? ".base_layer" : ""),
                        .owner = owner->second};
      out.push_back(part_of_pair(pair, TrainableRole::kLoraA));
      out.push_back(part_of_pair(pair, TrainableRole::kLoraB));
    }
  }
  return out;
}

}  // namespace lm
