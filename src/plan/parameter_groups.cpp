#include "plan/parameter_groups.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/name_pattern.h"
#include "config/config_text.h"
#include "plan/name_hint.h"

namespace lm {
namespace {

Error groups_error(std::string what, std::string next) {
  return Error(Exit::kConfig, {.area = "CONF-20",
                               .what = "optimizer.groups: " + std::move(what),
                               .place = "",
                               .next = std::move(next),
                               .kept = "nothing was started or written"});
}

class Groups {
 public:
  explicit Groups(const OptimizerConfig& optimizer) : optimizer_(optimizer) {
    for (const OptimizerGroup& group : optimizer.groups) patterns_.emplace_back(group.match);
    matched_.resize(patterns_.size());
  }

  // The first group that matches; nullopt if none does.
  std::optional<size_t> of(const std::string& name) {
    std::optional<size_t> out;
    for (size_t g = 0; g < patterns_.size(); ++g) {
      if (!patterns_[g].matches(name)) continue;
      matched_[g] = true;
      if (!out) out = g;
    }
    return out;
  }

  void add(const TensorPlace& place, BlockLayout& block) {
    const std::vector<ParameterPart>& parts = place.parameter.parts;
    std::vector<std::optional<size_t>> group;
    for (const ParameterPart& part : parts) group.push_back(of(part.name));
    for (size_t p = 0; p < parts.size(); ++p) {
      const bool last = p + 1 == parts.size();
      const int64_t first = place.offset + parts[p].first * place.parameter.columns;
      int64_t end = first + parts[p].rows * place.parameter.columns;
      if (last) end = round_up(end, kTensorStart);
      if (!last && group[p] != group[p + 1]) require_whole_blocks(place, parts[p], end);
      if (group[p] && group[p] == before_) {
        block.groups.back().elements = end - block.groups.back().first;
      } else if (group[p]) {
        const OptimizerGroup& settings = optimizer_.groups[*group[p]];
        block.groups.push_back({first, end - first, settings.lr_scale, settings.weight_decay});
      }
      before_ = group[p];
    }
  }
  void end_block() { before_.reset(); }

  void require_matches(const ModelLayout& layout) const {
    const auto unused = std::ranges::find(matched_, false);
    if (unused == matched_.end()) return;
    const std::string& match = optimizer_.groups[static_cast<size_t>(unused - matched_.begin())].match;
    std::vector<std::string> names;
    for (const BlockLayout& block : layout.blocks) {
      for (const Trainable& entry : block.trainables)
        for (const ParameterPart& part : block.tensors[entry.tensor].parameter.parts)
          names.push_back(part.name);
    }
    throw groups_error(
        "match = " + value_text(match) + " is in no name of a trained tensor" + name_hint(match, names),
        "name whole segments between points, or \"regex:...\"; names are those of the model's or adapter's "
        "files");
  }

 private:
  // A scale of quantized state is of values with the same settings.
  void require_whole_blocks(const TensorPlace& place, const ParameterPart& part, int64_t end) const {
    if (!is_coded(optimizer_.name) || place.parameter.elements() < kSmallTensor) return;
    if (end % kTensorStart == 0) return;
    throw groups_error(
        fmt::format("{} lies beside other tensors, and its {} elements are no multiple of {}, the block of "
                    "the quantized state of optimizer.name = {}",
                    part.name, part.rows * place.parameter.columns, kTensorStart,
                    value_text(optimizer_.name)),
        "give q_proj, k_proj and v_proj, or gate_proj and up_proj, the same group, or choose an optimizer "
        "without quantized state");
  }

  const OptimizerConfig& optimizer_;
  std::vector<NamePattern> patterns_;
  std::vector<bool> matched_;
  std::optional<size_t> before_;  // of the part before, in this block
};

}  // namespace

void set_groups(const OptimizerConfig& optimizer, ModelLayout& layout) {
  if (optimizer.groups.empty()) return;
  Groups groups(optimizer);
  for (BlockLayout& block : layout.blocks) {
    block.groups.clear();
    for (const Trainable& entry : block.trainables) groups.add(block.tensors[entry.tensor], block);
    groups.end_block();
  }
  groups.require_matches(layout);
}

}  // namespace lm
