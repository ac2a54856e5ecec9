#include "plan/multiples.h"

#include <fmt/format.h>
#include <algorithm>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace lm {
namespace {

// 16 bytes: what a GPU loads at once of a row. An A100 computes 16-bit products in parts of 128 bytes.
constexpr int64_t kMultiple = 8, kMultipleOfA100 = 64;
constexpr size_t kNamed = 3;

bool is_a100(const Machine& machine) {
  return !machine.gpus.empty() && machine.gpus.front().capability == ComputeCapability{8, 0};
}

// "mlp.down" of "layers.7.mlp.down": layers are alike.
std::string kind_of(const std::string& name) {
  if (!name.starts_with("layers.")) return name;
  return name.substr(name.find('.', name.find('.') + 1) + 1);
}

struct MissedProducts {
  double all = 0, missed = 0, padded = 0;  // elements of matrices, which a token's FLOP are proportional to
  std::vector<std::string> names = {};     // "mlp.down [576, 1001]", once each

  void add(const Parameter& matrix, int64_t multiple) {
    const auto elements = static_cast<double>(matrix.elements());
    all += elements;
    if (matrix.rows % multiple == 0 && matrix.columns % multiple == 0) return;
    missed += elements;
    padded += static_cast<double>(round_up(matrix.rows, multiple)) *
              static_cast<double>(round_up(matrix.columns, multiple));
    const std::string name = fmt::format("{} [{}, {}]", kind_of(matrix.name), matrix.rows, matrix.columns);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
};

// Whether the step multiplies all rows by it. Those of an embedding are only looked up, unless it is the
// head's matrix; a head of scores has a row of each text.
bool multiplies(const Parameter& parameter, const ModelSpec& spec) {
  if (parameter.name == "head" && spec.scores()) return false;
  return parameter.kind == ParameterKind::kMatrix || (parameter.name == "embed" && spec.tied);
}

std::string named(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i) out += (i == 0 ? "" : ", ") + names[i];
  return names.size() <= kNamed ? out : out + fmt::format(" and {} more", names.size() - kNamed);
}

}  // namespace

std::vector<Choice> note_multiples(const PlanInput& in, const NumericsPlan& numerics) {
  if (in.device != DeviceType::kCuda || in.config.model.dtype == ModelDType::kF32) return {};
  std::vector<Choice> out;
  const int64_t multiple = is_a100(in.machine) ? kMultipleOfA100 : kMultiple;
  const std::string key = fmt::format("multiples of {}", multiple);
  MissedProducts products;
  for (const BlockLayout& block : in.layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      // An adapter's rank is small by intent.
      if (multiplies(place.parameter, in.spec))
        products.add(place.parameter, adapts(place.parameter.role) ? kMultiple : multiple);
    }
  }
  if (products.missed > 0) {
    out.push_back(
        {key, "missed",
         fmt::format("a GPU's matrix instructions are slower for {}; padded in the model they would have "
                     "{:.2g} % more elements, and {:.0f} % of the step's products could gain",
                     named(products.names), 100 * (products.padded / products.missed - 1),
                     100 * products.missed / products.all)});
  }
  const int64_t length = in.config.data.max_length, rows = numerics.micro_batch * length;
  if (rows % multiple == 0) return out;
  out.push_back(
      {key, "missed",
       fmt::format(
           "a full micro-batch has {} x {} tokens, and gradients of weights are sums over them; "
           "data.max_length = {} makes {:.2g} % more",
           numerics.micro_batch, length, round_up(length, multiple),
           100.0 * static_cast<double>(round_up(length, multiple) - length) / static_cast<double>(length))});
  return out;
}

}  // namespace lm
