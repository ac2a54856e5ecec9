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
  return setting_error("optimizer.groups: " + std::move(what), "", std::move(next));
}

// Whether lora.b_lr_ratio is of this role. PEFT has all vectors in B's group: magnitudes, and biases of
// linear layers and, beside pairs, of norms.
bool has_rate_of_b(TrainableRole role) {
  switch (role) {
    case TrainableRole::kLoraB:
    case TrainableRole::kMagnitude:
    case TrainableRole::kBias:
    case TrainableRole::kReplacement:
      return true;
    case TrainableRole::kWeight:
    case TrainableRole::kLoraA:
    case TrainableRole::kOutputScale:
    case TrainableRole::kInputScale:
    case TrainableRole::kPrefix:
    case TrainableRole::kPrompt:
    case TrainableRole::kEncoder:
    case TrainableRole::kWhole:
    case TrainableRole::kTokenRows:
    case TrainableRole::kStartA:
    case TrainableRole::kStartB:
      return false;
  }
  return false;
}

class Groups {
 public:
  Groups(const OptimizerConfig& optimizer, double b_lr_ratio)
      : optimizer_(optimizer), b_lr_ratio_(b_lr_ratio) {
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
    const bool faster = b_lr_ratio_ != 1 && has_rate_of_b(place.parameter.role);
    std::vector<Membership> of_part;
    for (const ParameterPart& part : parts) of_part.push_back({of(part.name), faster});
    for (size_t p = 0; p < parts.size(); ++p) {
      const bool last = p + 1 == parts.size();
      const int64_t first = place.offset + parts[p].first * place.parameter.columns;
      int64_t end = first + parts[p].rows * place.parameter.columns;
      if (last) end = round_up(end, kTensorStart);
      if (!last && of_part[p] != of_part[p + 1]) require_whole_blocks(place, parts[p], end);
      const bool grouped = of_part[p] != Membership{};
      if (grouped && of_part[p] == before_) {
        block.groups.back().elements = end - block.groups.back().first;
      } else if (grouped) {
        block.groups.push_back(range(of_part[p], first, end - first));
      }
      before_ = of_part[p];
    }
  }
  void end_block() { before_ = {}; }

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
  // The group that a tensor of the files is in, if any, and whether it has B's learning rate.
  struct Membership {
    std::optional<size_t> group;
    bool faster = false;
    bool operator==(const Membership&) const = default;
  };

  GroupRange range(const Membership& of, int64_t first, int64_t elements) const {
    GroupRange out{.first = first, .elements = elements};
    if (of.group) {
      const OptimizerGroup& settings = optimizer_.groups[*of.group];
      out.lr_scale = settings.lr_scale;
      out.weight_decay = settings.weight_decay;
    }
    if (of.faster) out.lr_scale *= b_lr_ratio_;
    return out;
  }

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
  double b_lr_ratio_;
  std::vector<NamePattern> patterns_;
  std::vector<bool> matched_;
  Membership before_;  // of the part before, in this block
};

}  // namespace

void set_groups(const OptimizerConfig& optimizer, ModelLayout& layout, double b_lr_ratio) {
  if (optimizer.groups.empty() && b_lr_ratio == 1) return;
  Groups groups(optimizer, b_lr_ratio);
  for (BlockLayout& block : layout.blocks) {
    block.groups.clear();
    for (const Trainable& entry : block.trainables) groups.add(block.tensors[entry.tensor], block);
    groups.end_block();
  }
  groups.require_matches(layout);
}

}  // namespace lm
